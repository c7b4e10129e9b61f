"""Losses against values worked out by hand, their gradients where they must vanish, and a user's own from a file."""

from __future__ import annotations

import math
import re

import pytest
import torch

from plaudit_job.spec.algorithm import LossSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.losses import TokenInputs, choose_loss, correct, k3, policy_loss, token_weights
from plaudit_workers.training.model.policy_model import build_model

PLAIN = {"correction": "none", "clip_low": 0.2, "clip_high": 0.28}


def tokens(logprobs, behaviour, advantages, weights=None, **further):
    logprobs = torch.tensor(logprobs, requires_grad=True)
    return TokenInputs(
        logprobs=logprobs,
        proximal=torch.tensor(further.pop("proximal", logprobs.tolist())),
        behaviour=torch.tensor(behaviour),
        advantages=torch.tensor(advantages),
        weights=torch.tensor([1.0] * len(behaviour) if weights is None else weights),
        lengths=torch.tensor(further.pop("lengths", [len(behaviour)])),
        **further,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "has_gradient"),
    [
        (1.0, 2.0, -2.0, True),
        (1.2, 1.0, -1.2, True),  # below 1.28
        (1.5, 1.0, -1.28, False),  # clipped above
        (1.5, -1.0, 1.5, True),  # wrong way: the clip does not protect it
        (0.5, 1.0, -0.5, True),
        (0.5, -1.0, 0.8, False),  # clipped below
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, has_gradient):
    inputs = tokens([math.log(ratio) - 1.0], [-1.0], [advantage])
    terms = policy_loss(inputs, LossSpec(**PLAIN))
    terms.total.backward()
    assert terms.total.item() == pytest.approx(loss, rel=1e-6)
    assert (inputs.logprobs.grad.item() != 0) is has_gradient
    assert terms.sums["actor/pg_clipfrac"].item() == float(not has_gradient)


@pytest.mark.parametrize(
    ("correction", "ppo_kl"), [("none", -0.25), ("tis", -0.125), ("decoupled", -0.125), ("reject", -0.125)]
)
def test_ppo_kl_is_the_distance_to_the_policy_of_the_clip_and_behaviour_kl_to_the_one_that_sampled(correction, ppo_kl):
    inputs = tokens([-1.0, -1.0], [-1.5, -1.0], [1.0, 1.0], [0.5, 0.5], proximal=[-1.0, -1.25])
    sums = policy_loss(inputs, LossSpec(correction=correction)).sums
    assert sums["actor/ppo_kl"].item() == pytest.approx(ppo_kl)
    assert sums["actor/behaviour_kl"].item() == pytest.approx((math.expm1(0.5) - 0.5) / 2)


@pytest.mark.parametrize(("ratio_c", "loss", "gradient"), [(3.0, 3.0, 0.0), (0.0, math.exp(10), math.exp(10))])
def test_dual_clip_bounds_a_token_of_negative_advantage(ratio_c, loss, gradient):
    inputs = tokens([-1.0], [-11.0], [-1.0])
    terms = policy_loss(inputs, LossSpec(**PLAIN, clip_ratio_c=ratio_c))
    terms.total.backward()
    assert terms.total.item() == pytest.approx(loss, rel=1e-5)
    assert inputs.logprobs.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert terms.sums["actor/pg_clipfrac_lower"].item() == float(ratio_c > 0)


def test_k3_of_a_token_far_from_the_reference_is_bounded_as_in_verl():
    logprobs = torch.tensor([-11.0, -1.0], requires_grad=True)
    estimates = k3(logprobs, torch.tensor([-1.0, -11.0]))
    estimates.sum().backward()
    assert estimates.tolist() == pytest.approx([10.0, math.exp(-10) + 9])
    assert logprobs.grad.tolist() == pytest.approx([0.0, 1 - math.exp(-10)])


def test_the_first_gradient_is_the_policy_gradient():
    inputs = tokens([-1.0, -2.0], [-1.0, -2.0], [3.0, -1.0], weights=[0.25, 0.75])
    policy_loss(inputs, LossSpec(**PLAIN)).total.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-0.75, 0.75])


def test_truncated_importance_weights_scale_the_gradient_and_are_cut():
    # pi / mu is 1.5, and 4 which is cut to 2; the ratio to the present policy itself is 1.
    inputs = tokens([math.log(0.6), math.log(0.4)], [math.log(0.4), math.log(0.1)], [1.0, 1.0])
    terms = policy_loss(inputs, LossSpec(correction="tis", correction_cap=2.0))
    terms.total.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.5, -2.0])
    assert terms.sums["actor/importance_weight"].item() == pytest.approx(3.5)
    assert terms.sums["actor/importance_capped"].item() == 1


@pytest.mark.parametrize("correction", ["tis", "decoupled"])
def test_the_clip_is_around_the_proximal_policy_and_the_weight_that_of_the_behaviour(correction):
    # mu 0.25, prox 0.5, pi 0.7: weight 2 (not above 3), ratio 1.4 clipped to 1.28.
    inputs = tokens([math.log(0.7)], [math.log(0.25)], [1.0], proximal=[math.log(0.5)])
    terms = policy_loss(inputs, LossSpec(correction=correction, correction_cap=3.0))
    assert terms.total.item() == pytest.approx(-2 * 1.28)
    # The other way round the minimum is the unclipped one.
    inputs = tokens([math.log(0.7)], [math.log(0.25)], [-1.0], proximal=[math.log(0.5)])
    assert policy_loss(inputs, LossSpec(correction=correction, correction_cap=3.0)).total.item() == pytest.approx(
        2 * 1.4
    )


def test_decoupled_leaves_out_the_policy_gradient_of_a_token_above_the_cap():
    # Weights 1.5 and 4 with a cap of 2; the entropy term stays.
    inputs = tokens([math.log(0.6), math.log(0.4)], [math.log(0.4), math.log(0.1)], [1.0, 1.0])
    terms = policy_loss(inputs, LossSpec(correction="decoupled", correction_cap=2.0))
    terms.total.backward()
    assert inputs.logprobs.grad.tolist() == pytest.approx([-1.5, 0.0])
    assert terms.sums["actor/importance_capped"].item() == 1


def test_no_correction_needs_no_proximal_policy():
    corrected = correct(tokens([-1.0], [-1.0], [1.0], proximal=[math.nan]), LossSpec(correction="none"))
    assert (corrected.anchor.item(), corrected.weight.item(), corrected.capped.item()) == (-1.0, 1.0, False)


@pytest.mark.parametrize("correction", ["none", "tis", "decoupled"])
def test_a_token_the_rollout_thought_impossible_gives_a_finite_loss(correction):
    inputs = tokens([-0.1], [-200.0], [1.0])
    terms = policy_loss(inputs, LossSpec(correction=correction))
    terms.total.backward()
    assert math.isfinite(terms.total.item())
    assert math.isfinite(inputs.logprobs.grad.item())


def test_kl_and_entropy_terms_by_hand():
    inputs = tokens(
        [math.log(0.5)], [math.log(0.5)], [0.0], entropies=torch.tensor([0.6]), reference=torch.tensor([math.log(0.25)])
    )
    settings = LossSpec(**PLAIN, kl_coefficient=0.1, entropy_coefficient=0.01)
    terms = policy_loss(inputs, settings)
    kl = 0.5 - math.log(0.5) - 1  # r = 0.25 / 0.5
    assert terms.sums["actor/kl_loss"].item() == pytest.approx(kl)
    assert terms.total.item() == pytest.approx(0.1 * kl - 0.01 * 0.6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("correction", ["none", "tis"])
def test_a_weighted_estimate_has_the_gradient_of_the_divergence(estimator, correction):
    reference = torch.tensor([0.3, 0.3, 0.4])
    logits = torch.tensor([0.7, 0.2, 0.1]).log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    expected = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log())).sum(), logits, retain_graph=True)[0]
    # One token of each kind, weighted by its probability under the policy that sampled.
    sampled = torch.tensor([0.5, 0.3, 0.2])
    frozen = sampled.log() if correction == "none" else logprobs.detach()
    weights = sampled if correction == "none" else logprobs.detach().exp()
    tokens = TokenInputs(
        logprobs, frozen, frozen, torch.zeros(3), weights, torch.tensor([3]), reference=reference.log()
    )
    settings = LossSpec(correction=correction, kl_coefficient=1.0, kl_estimator=estimator)
    (plain,) = torch.autograd.grad(policy_loss(tokens, settings).total, logits, retain_graph=True)
    weighted = policy_loss(tokens, settings.model_copy(update={"kl_importance_weight": True})).total
    torch.testing.assert_close(torch.autograd.grad(weighted, logits)[0], expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(plain, expected, rtol=0.1)


def test_k3_is_zero_for_equal_policies_and_its_mean_is_the_divergence():
    probabilities, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    divergence = (probabilities * (probabilities / reference).log()).sum()
    estimates = k3(probabilities.log(), reference.log())
    assert (probabilities * estimates).sum().item() == pytest.approx(divergence.item(), rel=1e-5)
    assert (estimates > 0).all()
    assert k3(probabilities.log(), probabilities.log()).abs().max().item() == 0


@pytest.mark.parametrize(
    ("aggregation", "verl"),
    [
        ("token", lambda losses, mask: (losses * mask).sum() / mask.sum()),
        ("sequence", lambda losses, mask: ((losses * mask).sum(1) / mask.sum(1)).mean()),
    ],
)
def test_aggregation_is_verls_on_padded_rows(aggregation, verl):
    mask = torch.tensor([[1, 1, 1, 1.0], [1, 0, 0, 0], [1, 1, 0, 0]])
    losses = torch.tensor([[0.5, -1, 2, 0.25], [3, 9, 9, 9], [-2, 1, 9, 9]])
    weights = token_weights(aggregation, [4, 1, 2], 8)
    found = sum((losses[row] * mask[row]).sum() * weight for row, weight in enumerate(weights))
    assert found.item() == pytest.approx(verl(losses, mask).item())


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_aggregation_weights_of_all_tokens_sum_to_one(aggregation):
    lengths = [5, 1, 9, 2]
    weights = token_weights(aggregation, lengths, 16)
    assert sum(weight * length for weight, length in zip(weights, lengths, strict=True)) == pytest.approx(1)


def test_a_constant_divisor_gives_a_token_the_same_weight_whatever_the_lengths():
    assert set(token_weights("constant", [5, 1], 16)) == set(token_weights("constant", [9, 16], 16)) == {1 / 32}


@pytest.mark.parametrize(("kind", "inside"), [("decoupled", math.exp(-0.6)), ("reject", 1.0)])
def test_both_caps_leave_out_whole_sequences_by_their_geometric_mean(kind, inside):
    # Mean log-ratios -0.6, 1 and -1.5: only the first is within [0.3, 2].
    behaviour = [-1.0, -1.2, -3.0, -0.5]
    inputs = tokens([-1.0] * 4, behaviour, [1.0] * 4, proximal=[-2.0, -1.4, -2.0, -2.0], lengths=[2, 1, 1])
    settings = LossSpec(correction=kind, correction_level="geometric", correction_cap=2.0, correction_floor=0.3)
    corrected = correct(inputs, settings)
    assert corrected.weight.tolist() == pytest.approx([inside, inside, 0.0, 0.0])
    assert corrected.capped.tolist() == [False, False, True, True]


OWN_LOSS = """
def reinforce(tokens, anchor, settings):
    return -tokens.advantages * tokens.logprobs

def wrong(tokens, anchor, settings):
    return tokens.logprobs.sum()
"""


def test_a_loss_from_a_file_of_the_users(tmp_path):
    (tmp_path / "own.py").write_text(OWN_LOSS)
    settings = LossSpec(kind="python", path=str(tmp_path / "own.py"), function="reinforce", correction="none")
    inputs = tokens([-2.0, -1.0], [-2.0, -1.0], [3.0, -1.0])
    terms = policy_loss(inputs, settings)
    terms.total.backward()
    assert terms.total.item() == pytest.approx(3 * 2 - 1)
    assert inputs.logprobs.grad.tolist() == [-3.0, 1.0]
    with pytest.raises(RefusedError, match=r"returned shape \(\) for 2 tokens; return one loss a token"):
        policy_loss(inputs, settings.model_copy(update={"function": "wrong"}))
    with pytest.raises(RefusedError, match=r"absent in .* cannot be imported"):
        choose_loss(settings.model_copy(update={"function": "absent"}))


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
