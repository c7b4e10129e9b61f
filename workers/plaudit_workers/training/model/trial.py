"""Try a loss of the user's on random tokens, before rollouts and rewards are spent on an update that cannot be made.

The trainer does so at its start. ``python -m plaudit_workers.training.model.trial`` does it for ``plaudit
validate`` (``plaudit_job.checks``), in a process of its own because an import can do anything: ``algorithm.loss`` comes
in as JSON, the problem goes out as JSON, null if there is none.
"""

from __future__ import annotations

import os
import sys

import msgspec
import torch
from torch import Tensor

from plaudit_job.spec.algorithm import LossSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model.losses import PolicyLoss, TokenInputs, choose_loss, correct

_LENGTHS = (5, 1, 3)


def try_loss(loss: PolicyLoss, settings: LossSpec, device: torch.device) -> None:
    """Compute a loss and its gradient on nine random tokens of three sequences.

    Raises:
        RefusedError: the function raises or does not return one loss a token, or losses or gradient are not finite, or
            the losses do not depend on ``tokens.logprobs``.
    """
    name = f"spec.algorithm.loss: {settings.function} in {settings.path}"
    tokens = _random_tokens(settings, device)
    with torch.random.fork_rng(devices=[]):
        losses = loss(tokens, correct(tokens, settings).anchor, settings).losses
    if not losses.isfinite().all():
        raise RefusedError(f"{name} returned losses that are not finite for random tokens: {losses.tolist()}")
    try:
        gradient: Tensor | None = torch.autograd.grad(losses.sum(), tokens.logprobs, allow_unused=True)[0]
    except RuntimeError as error:
        raise RefusedError(f"{name} returned losses whose gradient cannot be computed: {error}") from error
    if gradient is None:
        raise RefusedError(f"{name} returned losses that do not depend on tokens.logprobs: nothing would be trained")
    if not gradient.isfinite().all():
        raise RefusedError(f"{name} has a gradient that is not finite for random tokens: {gradient.tolist()}")


def _random_tokens(settings: LossSpec, device: torch.device) -> TokenInputs:
    random, num_tokens = torch.Generator().manual_seed(0), sum(_LENGTHS)
    logprobs = -3 * torch.rand(num_tokens, generator=random)
    proximal, behaviour, reference = (logprobs + 0.1 * torch.randn(num_tokens, generator=random) for _ in range(3))
    advantages = torch.randn(len(_LENGTHS), generator=random).repeat_interleave(torch.tensor(_LENGTHS))
    entropies = torch.rand(num_tokens, generator=random)
    return TokenInputs(
        logprobs=logprobs.to(device).requires_grad_(),
        proximal=proximal.to(device),
        behaviour=behaviour.to(device),
        advantages=advantages.to(device),
        weights=torch.full((num_tokens,), 1 / num_tokens, device=device),
        lengths=torch.tensor(_LENGTHS, device=device),
        entropies=entropies.to(device).requires_grad_(settings.entropy_coefficient > 0),
        reference=reference.to(device) if settings.has_kl_term else None,
    )


def _main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # the file may print; only the problem goes to standard output
    settings = LossSpec.model_validate_json(sys.stdin.buffer.read())
    problem: str | None = None
    try:
        try_loss(choose_loss(settings), settings, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except RefusedError as error:
        problem = str(error)
    os.write(answer, msgspec.json.encode(problem))
    os._exit(0)  # do not wait for threads that the file has started


if __name__ == "__main__":
    _main()
