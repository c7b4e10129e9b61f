"""Writes table.json: the losses and gradients that verl computes on random tensors, and its advantages.

The project does not depend on verl. To make the table anew, run this with an interpreter that has it::

    python tests/workers/training/verl_parity/make_table.py

verl's registered functions are called as published: ``get_policy_loss_fn``, ``compute_rollout_correction_weights``,
``compute_rollout_rejection_mask``, ``kl_penalty_forward``, ``apply_kl_penalty``, ``AdaptiveKLController``,
``compute_grpo_outcome_advantage`` and ``compute_reinforce_plus_plus_baseline_outcome_advantage``.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights, compute_rollout_rejection_mask
from verl.workers.config import ActorConfig

TABLE = Path(__file__).with_name("table.json")
SEQUENCES, TOKENS = 4, 6
LENGTHS = (6, 3, 1, 5)
MASK = torch.tensor([[1.0] * length + [0.0] * (TOKENS - length) for length in LENGTHS])
CLIPS = {"ppo": (0.2, 0.28, 3.0), "gspo": (0.05, 0.08, 3.0), "cispo": (0.3, 0.5, 3.0), "dppo": (0.05, 0.08, 1.5)}
VERL_NAMES = {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo", "dppo": "dppo_tv"}
AGGREGATIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
CORRECTIONS = (
    ("none", "token"),
    ("tis", "token"),
    ("tis", "sequence"),
    ("decoupled", "token"),
    ("reject", "geometric"),
)
CAP, FLOOR = 1.5, 0.7


def tensors(seed: int, spread: float) -> dict[str, torch.Tensor]:
    """Log-probabilities float32[SEQUENCES, TOKENS] of four policies, advantages [SEQUENCES]."""
    random = torch.Generator().manual_seed(seed)

    def near(other: torch.Tensor, distance: float) -> torch.Tensor:
        return (other + distance * torch.randn(SEQUENCES, TOKENS, generator=random)).round(decimals=4)

    logprobs = (-3 * torch.rand(SEQUENCES, TOKENS, generator=random)).round(decimals=4)
    return {
        "logprobs": logprobs,
        "proximal": near(logprobs, spread),
        "behaviour": near(logprobs, spread),
        "reference": near(logprobs, 3 * spread),
        "advantages": torch.randn(SEQUENCES, generator=random).round(decimals=4),
    }


def correction(given: dict[str, torch.Tensor], kind: str, level: str) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return verl's importance weights and its mask of the tokens that are kept."""
    log_ratio = given["proximal"] - given["behaviour"]
    if kind == "none":
        return None, torch.ones_like(MASK)
    if kind == "reject":
        # verl compares the inverse ratio with its bounds.
        bounds = f"{1 / CAP}_{1 / FLOOR}"
        return None, compute_rollout_rejection_mask(log_ratio, MASK, "seq_mean_k1", bounds)[0]
    threshold = CAP if kind == "tis" else f"{FLOOR}_{CAP}"
    return compute_rollout_correction_weights(log_ratio, MASK, level, threshold)[0], torch.ones_like(MASK)


def row(seed: int, kind: str, aggregation: str, correction_kind: str, level: str) -> dict[str, Any]:
    """Compute one case."""
    given = tensors(seed, 0.3 if seed % 2 else 0.8)
    low, high, ratio_c = CLIPS[kind]
    config = ActorConfig(
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=ratio_c,
        global_batch_info={},
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
    )
    weights, kept = correction(given, correction_kind, level)
    weights = kept if weights is None else weights * kept  # the aggregation counts rejected tokens
    logprobs = given["logprobs"].clone().requires_grad_()
    anchor = given["behaviour"] if correction_kind == "none" else given["proximal"]
    loss, figures = core_algos.get_policy_loss_fn(VERL_NAMES[kind])(
        old_log_prob=anchor,
        log_prob=logprobs,
        advantages=given["advantages"][:, None].expand_as(MASK),
        response_mask=MASK,
        loss_agg_mode=AGGREGATIONS[aggregation],
        config=config,
        rollout_is_weights=weights,
    )
    loss.backward()
    return {
        "kind": kind,
        "aggregation": aggregation,
        "correction": correction_kind,
        "level": level,
        **{name: tensor.tolist() for name, tensor in given.items()},
        "loss": loss.item(),
        "clipped": figures["actor/pg_clipfrac"],
        "gradient": logprobs.grad.tolist(),
    }


def divergences() -> list[dict[str, Any]]:
    """Compute verl's estimates of the divergence, with gradients."""
    rows = []
    for seed, name in product(range(3), ("k1", "k2", "k3")):
        given = tensors(seed, 1.5)
        logprobs = given["logprobs"].clone().requires_grad_()
        estimates = core_algos.kl_penalty_forward(logprobs, given["reference"], name)
        estimates.sum().backward()
        values = {"logprobs": given["logprobs"], "reference": given["reference"], "estimates": estimates.detach()}
        rows.append({"name": name, "gradient": logprobs.grad.tolist(), **{k: v.tolist() for k, v in values.items()}})
    return rows


def baselines() -> list[dict[str, Any]]:
    """Compute verl's REINFORCE++-baseline on groups of two and more."""
    rows = []
    for seed in range(6):
        random = np.random.default_rng(seed)
        group = np.repeat(np.arange(4), random.integers(2, 5, 4))
        lengths = random.integers(1, 9, group.size)
        scores = random.choice([0.0, 0.25, 0.5, 1.0], group.size)
        mask = torch.tensor(np.arange(8)[None] < lengths[:, None]).float()
        rewards = torch.zeros_like(mask)
        rewards[torch.arange(group.size), torch.tensor(lengths) - 1] = torch.tensor(scores, dtype=torch.float32)
        found, _ = core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
            token_level_rewards=rewards, response_mask=mask, index=group
        )
        given = {"group": group, "lengths": lengths, "scores": scores, "advantages": found[:, 0].numpy()}
        rows.append({name: values.tolist() for name, values in given.items()})
    return rows


def penalties() -> list[dict[str, Any]]:
    """Compute verl's rewards with the divergence in them, and its GRPO advantages of these."""
    rows = []
    for seed, name in product(range(4), ("k1", "k2", "k3")):
        given, coefficient = tensors(seed + 100, 1.0), 0.02 * (seed + 1)
        random = np.random.default_rng(seed)
        scores, group = random.choice([0.0, 0.25, 0.5, 1.0], SEQUENCES), np.array([0, 0, 1, 1])
        at_the_end = torch.zeros_like(MASK)
        at_the_end[torch.arange(SEQUENCES), torch.tensor(LENGTHS) - 1] = torch.tensor(scores, dtype=torch.float32)
        data = DataProto.from_dict(
            tensors={
                "response_mask": MASK,
                "token_level_scores": at_the_end,
                "old_log_probs": given["proximal"],
                "ref_log_prob": given["reference"],
            }
        )
        data, figures = apply_kl_penalty(data, core_algos.FixedKLController(coefficient), kl_penalty=name)
        rewards = data.batch["token_level_rewards"]
        advantages, _ = core_algos.compute_grpo_outcome_advantage(rewards, MASK, group)
        found = {"rewards": rewards.sum(-1), "advantages": advantages[:, 0]}
        rows.append(
            {
                "name": name,
                "coefficient": coefficient,
                "scores": scores.tolist(),
                "group": group.tolist(),
                "proximal": given["proximal"].tolist(),
                "reference": given["reference"].tolist(),
                "figures": figures,
                **{key: values.tolist() for key, values in found.items()},
            }
        )
    return rows


def controllers() -> list[dict[str, Any]]:
    """Compute the coefficients of verl's adaptive controller over updates of changing size and divergence."""
    rows = []
    for seed in range(4):
        random = np.random.default_rng(seed)
        settings = {"first": 0.01 * (seed + 1), "target": 0.05 * (seed + 1), "horizon": 500 * (seed + 1)}
        controller = core_algos.AdaptiveKLController(settings["first"], settings["target"], settings["horizon"])
        updates = []
        for divergence in random.choice([-0.1, 0.0, 0.04, 0.05, 0.055, 0.1, 0.2, 3.0], 30):
            num_samples = int(random.integers(1, 600))
            controller.update(divergence, num_samples)
            updates.append([float(divergence), num_samples, float(controller.value)])
        rows.append({**settings, "updates": updates})
    return rows


def main() -> None:
    """Writes the table."""
    cases = product(range(3), CLIPS, AGGREGATIONS, CORRECTIONS)
    rows = [row(seed + 10 * n, kind, aggregation, *which) for n, (seed, kind, aggregation, which) in enumerate(cases)]
    about = {"verl": version("verl"), "cap": CAP, "floor": FLOOR, "clips": CLIPS, "lengths": LENGTHS, "tokens": TOKENS}
    table = {**about, "rows": rows, "divergences": divergences(), "baselines": baselines(), "penalties": penalties()}
    table["controllers"] = controllers()
    TABLE.write_text(
        json.dumps(json.loads(json.dumps(table), parse_float=lambda text: float(f"{float(text):.6g}"))) + "\n"
    )
    print(f"{len(rows)} rows of verl {about['verl']}")


if __name__ == "__main__":
    main()
