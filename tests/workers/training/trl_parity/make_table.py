"""Writes table.json: the losses that TRL computes on given tensors, and their gradients.

The project does not depend on TRL. To make the table anew, run this with an interpreter that has it::

    python tests/workers/training/trl_parity/make_table.py

TRL's ``GRPOTrainer._compute_loss`` is called as it is; of the trainer around it only what it reads is there, and the
"model" is the tensor of log-probabilities itself, so that the loss's gradient by them comes out too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from importlib.metadata import version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

TABLE = Path(__file__).with_name("table.json")
SEQUENCES, TOKENS = 4, 6
LENGTHS = (6, 3, 1, 5)
CLIP_LOW, CLIP_HIGH, CAP = 0.2, 0.28, 1.5
CISPO_CAP = 1.5
"""TRL's ``epsilon_high`` for CISPO: the largest ratio itself."""
LOSSES = {
    ("ppo", "sequence"): ("grpo", "token"),
    ("ppo", "token"): ("bnpo", "token"),
    ("ppo", "constant"): ("dr_grpo", "token"),
    ("gspo", "sequence"): ("grpo", "sequence"),
    ("cispo", "token"): ("cispo", "token"),
}
"""``loss.kind`` and ``loss.aggregation`` → TRL's ``loss_type`` and ``importance_sampling_level``."""


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Log-probabilities float32[SEQUENCES, TOKENS] of four policies, advantages [SEQUENCES], mask."""
    random = torch.Generator().manual_seed(seed)

    def near(other: torch.Tensor, distance: float) -> torch.Tensor:
        return other + distance * torch.randn(SEQUENCES, TOKENS, generator=random)

    logprobs = -3 * torch.rand(SEQUENCES, TOKENS, generator=random)
    return {
        "logprobs": logprobs,
        "proximal": near(logprobs, 0.3),
        "behaviour": near(logprobs, 0.5),
        "reference": near(logprobs, 0.4),
        "advantages": torch.randn(SEQUENCES, generator=random),
        "mask": torch.tensor([[1.0] * length + [0.0] * (TOKENS - length) for length in LENGTHS]),
    }


def trl_loss(
    given: dict[str, torch.Tensor], losses: tuple[str, str], correction: str, beta: float, *, weigh_kl: bool
) -> tuple[float, Any]:
    """What TRL makes of the tensors: the loss, and its gradient by the log-probabilities [SEQUENCES][TOKENS]."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    loss_type, level = losses
    logprobs = given["logprobs"].clone().requires_grad_()
    old = given["behaviour"] if correction == "none" else given["proximal"]
    inputs = {
        "prompt_ids": torch.zeros(SEQUENCES, 1, dtype=torch.long),
        "prompt_mask": torch.ones(SEQUENCES, 1),
        "completion_ids": torch.zeros(SEQUENCES, TOKENS, dtype=torch.long),
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": old,
        "ref_per_token_logps": given["reference"],
        "num_items_in_batch": given["mask"].sum(),
        # TRL's token_truncate, made from the same tensors when samples are generated.
        "importance_sampling_ratio": torch.exp(given["proximal"] - given["behaviour"]).clamp(max=CAP),
    }
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(gather=lambda x: x, reduce=lambda x, reduction: x, num_processes=1),
        args=SimpleNamespace(use_bias_correction_kl=weigh_kl, delta=None, steps_per_generation=1),
        aux_loss_enabled=False,
        beta=beta,
        current_gradient_accumulation_steps=1,
        epsilon_high=CISPO_CAP if loss_type == "cispo" else CLIP_HIGH,
        epsilon_low=CLIP_LOW,
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=TOKENS,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=correction == "tis",
        vllm_importance_sampling_correction=True,
    )
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad.tolist()


def main() -> None:
    """Writes the table."""
    rows = []
    kl_terms = ((0.0, False), (0.05, False), (0.05, True))
    for seed, (kind, aggregation), correction, (beta, weigh_kl) in product(range(4), LOSSES, ("none", "tis"), kl_terms):
        if kind == "gspo" and (correction == "tis" or weigh_kl):
            continue  # TRL weighs the sequence by the mean of its tokens' ratios, we (as verl) each token by its own
        given = tensors(seed)
        loss, gradient = trl_loss(given, LOSSES[kind, aggregation], correction, beta, weigh_kl=weigh_kl)
        rows.append(
            {
                "kind": kind,
                "aggregation": aggregation,
                "correction": correction,
                "kl_coefficient": beta,
                "kl_importance_weight": weigh_kl,
                **{name: tensor.tolist() for name, tensor in given.items()},
                "loss": loss,
                "gradient": gradient,
            }
        )
    clips = {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "correction_cap": CAP, "cispo_cap": CISPO_CAP}
    about = {"trl": version("trl"), **clips}
    TABLE.write_text(json.dumps({**about, "rows": rows}) + "\n")
    print(f"{len(rows)} rows of TRL {about['trl']}")


if __name__ == "__main__":
    main()
