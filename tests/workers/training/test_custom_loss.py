"""A loss from a file of the user's: what it must return is checked before the first update, and in every update."""

from __future__ import annotations

import re

import pytest
import torch

from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.losses import TokenInputs, choose_loss
from plaudit_workers.training.model.policy_model import build_model

SCORES = [[0.0, 1.0, 0.5, 0.25]]


@pytest.fixture
def own_loss(tmp_path):
    """The settings of a loss whose body is the argument."""

    def write(body, parameters="tokens, anchor, settings"):
        (tmp_path / "own.py").write_text(f"import torch\n\ndef mine({parameters}):\n    {body}\n")
        return {"algorithm": {"loss": {"kind": "python", "path": str(tmp_path / "own.py"), "function": "mine"}}}

    return write


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise KeyError('entropy')", ", line 4, raised KeyError('entropy'). It is called as mine(tokens, anchor, set"),
        ("pass", "returned NoneType; return a tensor, one loss a token"),
        ("return tokens.logprobs, {}", "returned tuple; return a tensor"),
        ("return tokens.logprobs.detach().numpy()", "returned ndarray; return a tensor"),
        ("return tokens.logprobs.mean()", "returned shape () for 9 tokens; return one loss a token"),
        ("return tokens.logprobs[:, None]", "returned shape (9, 1) for 9 tokens"),
        ("return tokens.logprobs.detach() * tokens.advantages", "returned losses without a gradient"),
        ("return torch.ones_like(anchor).requires_grad_()", "do not depend on tokens.logprobs"),
        ("return tokens.logprobs * float('nan')", "returned losses that are not finite for random tokens: [nan"),
        ("return (tokens.logprobs - tokens.logprobs.detach()).abs().sqrt()", "has a gradient that is not finite"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_at_the_start(make_job, own_loss, body, words):
    with pytest.raises(RefusedError, match=rf"spec\.algorithm\.loss: mine in .*own\.py.*{re.escape(words)}"):
        build_model(make_job(own_loss(body)))


def test_a_loss_with_other_parameters_is_refused_at_the_start(make_job, own_loss):
    with pytest.raises(RefusedError, match=r"raised TypeError.*It is called as mine\(tokens, anchor, settings\)"):
        build_model(make_job(own_loss("return tokens.logprobs", "tokens, anchor")))


def test_what_is_no_function_is_refused(make_job, own_loss, tmp_path):
    job = make_job(own_loss("pass"))
    (tmp_path / "own.py").write_text("mine = 3\n")
    with pytest.raises(RefusedError, match=r"mine in .*own\.py is int; name a function"):
        build_model(job)


@pytest.mark.parametrize("broken", ["raise ValueError(tokens.lengths)", "losses = None", "losses = losses.detach()"])
def test_a_loss_that_fails_in_an_update_is_refused_too(make_job, make_groups, own_loss, broken):
    body = f"losses = -tokens.advantages * tokens.logprobs\n    if len(losses) != 9: {broken}\n    return losses"
    policy = build_model(make_job(own_loss(body)))
    with pytest.raises(RefusedError, match=r"spec\.algorithm\.loss: mine in .*own\.py"):
        policy.update(make_batch(make_groups(SCORES, longest=16), "grpo", 1.0))


def test_the_trial_leaves_the_random_state_as_it_was(make_job, own_loss):
    states = []
    for body in ("return tokens.logprobs", "return tokens.logprobs * torch.rand(len(anchor))"):
        build_model(make_job(own_loss(body)))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_a_row_without_tokens_is_not_given_to_the_function(make_job, own_loss):
    """Such a row keeps a rank busy beside others; most functions cannot take a maximum over nothing."""
    settings = make_job(own_loss("return tokens.logprobs - tokens.logprobs.max()")).spec.algorithm.loss
    nothing = torch.zeros(0, requires_grad=True)
    tokens = TokenInputs(nothing, nothing, nothing, nothing, nothing, torch.zeros(0, dtype=torch.int64))
    choose_loss(settings)(tokens, nothing, settings).losses.sum().backward()
    assert nothing.grad.shape == (0,)
