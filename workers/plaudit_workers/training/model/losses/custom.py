"""``loss.kind: python``: a loss of the user's own, a function in a file.

``def my_loss(tokens, anchor, settings)`` gets what the other losses get (see ``ppo.ppo``) and returns float32[R], the
loss of each trained token with its gradient. Importance weights, aggregation, KL and entropy terms are added as for
every other loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from plaudit_workers.job.spec.algorithm import LossSpec
from plaudit_workers.process import RefusedError
from plaudit_workers.training.model.losses.tokens import TokenInputs, TokenLosses

PolicyLoss = Callable[[TokenInputs, Tensor, LossSpec], TokenLosses]


def load_loss(path: Path, function: str) -> PolicyLoss:
    """Import a user's loss.

    Raises:
        RefusedError: the file cannot be imported or has no such function.
    """
    try:
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        own: Callable[[TokenInputs, Tensor, LossSpec], Tensor] = getattr(module, function)
    # Importing someone else's file raises anything.
    except Exception as error:
        raise RefusedError(f"spec.algorithm.loss: {function} in {path} cannot be imported: {error!r}") from error

    def loss(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
        losses = own(tokens, anchor, settings)
        if losses.shape != tokens.logprobs.shape:
            raise RefusedError(
                f"spec.algorithm.loss: {function} in {path} returned shape {tuple(losses.shape)} for "
                f"{tokens.logprobs.numel()} tokens; return one loss a token"
            )
        nowhere = torch.zeros_like(losses, dtype=torch.bool)
        return TokenLosses(losses, nowhere, nowhere)

    return loss
