"""Time of one update of the trainer on one GPU: step time, tokens/s, MFU and peak memory, beside plain transformers.

Needs torch and transformers only, no vLLM. Both sides compute the same PPO loss on the same random sequences of a model
with random weights and the sizes of Qwen2.5: ours with packed rows, a chunked head and activation checkpointing, the
other with padding, whole logits and transformers' own gradient checkpointing. ::

    python benchmarks/gpu/train_step.py --size 1.5b --length 8192
    python benchmarks/gpu/train_step.py --size tiny --length 64 --sequences 4   # on a CPU, to see that it runs

MFU counts 6 FLOP a parameter and token plus 6 · layers · width · length for causal attention, without recomputation.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from plaudit_reward.packed_attention import PACKED_ATTENTION, PackedLayout
from plaudit_workers.job.spec.algorithm import LossSpec
from plaudit_workers.training.model.activations import checkpoint_layers
from plaudit_workers.training.model.losses.loss import policy_loss
from plaudit_workers.training.model.losses.tokens import TokenInputs
from plaudit_workers.training.model.model import forward_logits
from plaudit_workers.training.model.token_head import TokenHead, reduced

SIZES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
KEY_VALUE_HEADS = {"tiny": 2, "1.5b": 2, "7b": 4}
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16, by a part of the device's name."""


Loss = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """The model and batch that both sides compute."""

    size: str
    length: int
    sequences: int
    device: torch.device

    def model(self, attention: str) -> PreTrainedModel:
        """Return a model with random bfloat16 weights (float32 on a CPU)."""
        vocabulary = 512 if self.size == "tiny" else 151_936
        config = Qwen2Config(
            **SIZES[self.size],
            vocab_size=vocabulary,
            num_key_value_heads=KEY_VALUE_HEADS[self.size],
            max_position_embeddings=max(4096, self.length),
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        with self.device:
            model: PreTrainedModel = Qwen2ForCausalLM._from_config(config, attn_implementation=attention, dtype=dtype)
        return model

    def ids(self, model: PreTrainedModel) -> Tensor:
        """Return int64[sequences, length]."""
        return torch.randint(0, model.config.vocab_size, (self.sequences, self.length), device=self.device)


Side = Callable[[Case], tuple[PreTrainedModel, Loss]]


def ours(case: Case) -> tuple[PreTrainedModel, Loss]:
    """Return the model and the loss of one update as the trainer computes it, a row of all sequences."""
    model = case.model(PACKED_ATTENTION).eval()
    head = TokenHead(model, chunked=True)
    checkpoint_layers(model, "layers", case.device)
    rows = case.ids(model)
    positions = torch.arange(case.length, device=case.device).repeat(case.sequences)[None]
    sources = torch.cat(
        [torch.arange(n * case.length, (n + 1) * case.length - 1, device=case.device) for n in range(case.sequences)]
    )
    targets = rows[:, 1:].reshape(-1)
    layout = PackedLayout.of([case.length] * case.sequences).to(case.device)

    def loss() -> Tensor:
        with head.reducing(targets, 1.0, entropy="figure"):
            found = forward_logits(model, rows.view(1, -1), positions, layout, sources)
        return _ppo(found[:, 0], case)

    return model, loss


def plain(case: Case) -> tuple[PreTrainedModel, Loss]:
    """Return the model and the loss of one update with transformers alone: whole logits of a padded batch."""
    model = case.model("sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = case.ids(model)

    def loss() -> Tensor:
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1]
        return _ppo(reduced(logits.flatten(0, 1), rows[:, 1:].reshape(-1), 1.0)[:, 0], case)

    return model, loss


def _ppo(logprobs: Tensor, case: Case) -> Tensor:
    count = logprobs.numel()
    advantages = torch.linspace(-1, 1, case.sequences, device=case.device).repeat_interleave(case.length - 1)
    tokens = TokenInputs(
        logprobs=logprobs,
        proximal=logprobs.detach(),
        behaviour=logprobs.detach(),
        advantages=advantages,
        weights=torch.full((count,), 1 / count, device=case.device),
        lengths=torch.tensor([case.length - 1] * case.sequences),
    )
    return policy_loss(tokens, LossSpec()).total


def measure(case: Case, side: Side, steps: int) -> dict[str, float]:
    """Return seconds, tokens a second, MFU and peak memory of an update; the first one is not counted."""
    model, loss = side(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    cuda = case.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = sorted(times[1:])[steps // 2]
    tokens = case.length * case.sequences
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters()) - config.vocab_size * config.hidden_size
    flops = tokens * (6 * parameters + 6 * config.num_hidden_layers * config.hidden_size * case.length)
    name = torch.cuda.get_device_name() if cuda else ""
    peak = next((value for part, value in PEAK_FLOPS.items() if part in name), 0.0)
    figures = {"seconds": seconds, "tokens_per_s": tokens / seconds}
    if peak:
        figures["mfu"] = flops / seconds / peak
    if cuda:
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return figures


def main() -> None:
    """Measure both sides, print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each sequence (default 8,192)")
    parser.add_argument("--sequences", type=int, default=2, help="sequences of an update (default 2)")
    parser.add_argument("--steps", type=int, default=5, help="measured updates (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case(arguments.size, arguments.length, arguments.sequences, device)
    results = {}
    for name, side in {"plaudit": ours, "transformers": plain}.items():
        results[name] = measure(case, side, arguments.steps)
        print(f"{name:13}" + "  ".join(f"{figure} {value:,.4g}" for figure, value in results[name].items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"size": case.size, "length": case.length, **results}) + "\n")


if __name__ == "__main__":
    main()
