"""``loss.kind: python``: a loss of the user's own, a function in a file.

``def my_loss(tokens, anchor, settings)`` gets what the other losses get (see ``ppo.ppo``) and returns float32[R], the
loss of each trained token with its gradient. Importance weights, aggregation, KL and entropy terms are added as for
every other loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model.losses.tokens import TokenInputs, TokenLosses

if TYPE_CHECKING:
    from plaudit_workers.job.spec.algorithm import LossSpec

PolicyLoss = Callable[[TokenInputs, Tensor, "LossSpec"], TokenLosses]
_FIELD = "spec.algorithm.loss"


def load_loss(path: Path, function: str) -> PolicyLoss:
    """Import a user's loss.

    Returns:
        The loss. It raises ``RefusedError`` where the function raises, or returns anything but a loss with a gradient
        for each token.

    Raises:
        RefusedError: the file cannot be imported or has no such function.
    """
    own = _imported(path, function)

    def loss(tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> TokenLosses:
        if not tokens.logprobs.numel():  # a row that only keeps a rank busy
            losses = tokens.logprobs
        else:
            losses = _checked(_called(own, tokens, anchor, settings), tokens, settings)
        nowhere = torch.zeros_like(losses, dtype=torch.bool)
        return TokenLosses(losses, nowhere, nowhere)

    return loss


def _imported(path: Path, function: str) -> Callable[..., object]:
    try:
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(module)
        own = getattr(module, function)
    # Importing someone else's file raises anything.
    except Exception as error:
        raise RefusedError(f"{_FIELD}: {function} in {path} cannot be imported: {error!r}") from error
    if not callable(own):
        raise RefusedError(f"{_FIELD}: {function} in {path} is {type(own).__name__}; name a function")
    return own  # type: ignore[no-any-return]


def _called(own: Callable[..., object], tokens: TokenInputs, anchor: Tensor, settings: LossSpec) -> object:
    try:
        return own(tokens, anchor, settings)
    # Someone else's function raises anything; started again it would raise the same.
    except Exception as error:
        lines = [each.lineno for each in extract_tb(error.__traceback__) if each.filename == settings.path]
        place = f", line {lines[-1]}," if lines else ""
        raise RefusedError(
            f"{_FIELD}: {settings.function} in {settings.path}{place} raised {error!r}. It is called as "
            f"{settings.function}(tokens, anchor, settings)"
        ) from error


def _checked(losses: object, tokens: TokenInputs, settings: LossSpec) -> Tensor:
    """Return the losses of a user's function.

    Raises:
        RefusedError: they are something else than a loss with a gradient for each token.
    """
    name = f"{_FIELD}: {settings.function} in {settings.path}"
    if not isinstance(losses, Tensor):
        raise RefusedError(f"{name} returned {type(losses).__name__}; return a tensor, one loss a token")
    if losses.shape != tokens.logprobs.shape:
        raise RefusedError(
            f"{name} returned shape {tuple(losses.shape)} for {tokens.logprobs.numel()} tokens; return one loss a token"
        )
    if not losses.requires_grad:
        raise RefusedError(
            f"{name} returned losses without a gradient, so nothing would be trained; compute them from "
            "tokens.logprobs, without detach() or no_grad()"
        )
    return losses
