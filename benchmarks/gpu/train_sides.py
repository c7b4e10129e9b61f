"""The sides of ``train_step``: how Plaudit, plain transformers and TRL compute the log-probabilities of an update.

All have float32 parameters, passes in the same precision, recomputed layers, and log-probabilities of the response's
tokens. They differ in attention (packed or padded) and in what they keep of the logits.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from train_case import Case
from transformers import PreTrainedModel

from plaudit_reward.attention import PACKED_ATTENTION, VARLEN_ATTENTION, PackedLayout, problem_of
from plaudit_workers.training.model.head import TokenHead
from plaudit_workers.training.model.memory import checkpoint_layers, compile_layers

CHUNK_TOKENS = 1024
"""Tokens whose logits ``chunked_logits`` holds at a time."""

Loss = Callable[[], Tensor]
Side = Callable[[Case], tuple[PreTrainedModel, Loss]]


def plaudit(case: Case, *, compiled: bool = False, offload: bool = False) -> tuple[PreTrainedModel, Loss]:
    """Return the model and the loss of an update as the trainer computes them: a row of all sequences."""
    model = case.model(PACKED_ATTENTION).eval()
    if compiled:
        compile_layers(model)
    checkpoint_layers(model, "layers", case.device, offload=offload)
    _choose_attention(model, case)
    with case.autocast():
        head = TokenHead(model, chunked=True, device=case.device)
    rows = case.ids(model)
    positions = torch.arange(case.length, device=case.device).repeat(case.sequences)[None]
    places = torch.arange(rows.numel(), device=case.device).view_as(rows)
    sources, targets = places[:, case.prompt - 1 : -1].flatten(), rows[:, case.prompt :].flatten()
    layout = PackedLayout.of([case.length] * case.sequences).to(case.device)
    row = {"position_ids": positions, "packed_layout": layout, "use_cache": False, "logits_to_keep": sources}

    def loss() -> Tensor:
        with case.autocast(), head.reducing(targets, 1.0, entropy="figure"):
            values = model(input_ids=rows.view(1, -1), **row).logits[0]
        return case.loss_of(values[:, 0])

    return model, loss


def _choose_attention(model: PreTrainedModel, case: Case) -> None:
    """Let the model use the flash kernel for variable lengths if the trainer would, and say so."""
    if case.device.type != "cuda":
        return
    problem = problem_of(model, case.device, case.dtype)
    if not problem:
        model.set_attn_implementation(VARLEN_ATTENTION)
    print(f"attention: {'blocks, because ' + problem if problem else 'flash kernel for variable lengths'}")


def whole_logits(case: Case) -> tuple[PreTrainedModel, Loss]:
    """Return them with transformers alone: the float32 logits of all trained tokens."""
    model, rows = _padded(case)

    def loss() -> Tensor:
        with case.autocast():
            logits = model(input_ids=rows, use_cache=False, logits_to_keep=case.length - case.prompt + 1).logits[:, :-1]
        return case.loss_of(_chosen(logits, rows[:, case.prompt :]).flatten())

    return model, loss


def chunked_logits(case: Case) -> tuple[PreTrainedModel, Loss]:
    """Return them with transformers and a log-softmax of a few tokens at a time, computed again for the gradient."""
    model, rows = _padded(case)
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]

    def chosen(hidden: Tensor, targets: Tensor) -> Tensor:
        return _chosen(head(hidden), targets)

    def loss() -> Tensor:
        with case.autocast():
            hidden = model.base_model(input_ids=rows, use_cache=False).last_hidden_state[:, case.prompt - 1 : -1]
            parts = zip(
                hidden.flatten(0, 1).split(CHUNK_TOKENS),
                rows[:, case.prompt :].flatten().split(CHUNK_TOKENS),
                strict=True,
            )
            found = torch.cat([checkpoint(chosen, *part, use_reentrant=False) for part in parts])
        return case.loss_of(found)

    return model, loss


def trl(case: Case) -> tuple[PreTrainedModel, Loss]:
    """Return them with TRL's own function and fused head, as GRPOTrainer calls them."""
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    model, rows = _padded(case)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=case.autocast, is_main_process=False))
    everywhere = torch.ones_like(rows)

    def loss() -> Tensor:
        logprobs, *_ = GRPOTrainer._get_per_token_logps_and_entropies(
            trainer, model, rows, everywhere, case.length - case.prompt, compute_entropy=True
        )
        return case.loss_of(logprobs.flatten())

    return model, loss


def sides() -> dict[str, Side]:
    """Return the sides that can run here, by their labels."""
    found: dict[str, Side] = {
        "plaudit": plaudit,
        "transformers, whole logits": whole_logits,
        "transformers, chunked logits": chunked_logits,
    }
    if torch.cuda.is_available():  # what a CPU compiles for a minute, and does not offload
        found["plaudit, compile"] = functools.partial(plaudit, compiled=True)
        found["plaudit, activationOffload"] = functools.partial(plaudit, offload=True)
    return found | ({"TRL, fused head": trl} if importlib.util.find_spec("trl") else {})


def _padded(case: Case) -> tuple[PreTrainedModel, Tensor]:
    """Return a model with transformers' attention and checkpointing, and int64[sequences, length]."""
    model = case.model("sdpa").train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, case.ids(model)


def _chosen(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.float()
    return logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
