"""The policy: one update whatever the packing, states that come back bit for bit, the model's log-probabilities."""

from __future__ import annotations

import dataclasses
import math

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen3Config

from plaudit_job.spec.algorithm import OptimizerSpec
from plaudit_reward.attention import PACKED_ATTENTION
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.checkpoint import load_checkpoint
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.head import TokenHead
from plaudit_workers.training.model.optimizer import rate_share
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.publish import write_weights
from plaudit_workers.weights.files import ShardReader
from plaudit_workers.weights.index import ShardIndex
from plaudit_workers.weights.published import Probe
from whole_state import full_state, save_checkpoint

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None], [0.2, 0.4, 0.6, 0.8], [0.5, 0.5, 0.5, 0.5]]


@pytest.fixture
def batches(make_groups):
    return [make_batch(make_groups(SCORES, seed=seed), "grpo", 0.8) for seed in range(4)]


def with_behaviour(batch, logprobs):
    """The batch as if a policy with these log-probabilities had sampled it."""
    sequences = [
        dataclasses.replace(sequence, behaviour_logprobs=own)
        for sequence, own in zip(batch.sequences, logprobs, strict=True)
    ]
    return dataclasses.replace(batch, sequences=tuple(sequences))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "correction", "aggregation"),
    [
        ("ppo", {"correction": "none"}, "token"),
        ("ppo", {"correction": "tis", "correctionLevel": "sequence"}, "sequence"),
        ("gspo", {"correction": "none"}, "constant"),
        ("cispo", {"correction": "reject", "correctionLevel": "geometric"}, "token"),
        ("dppo", {"correction": "decoupled"}, "sequence"),
    ],
)
def test_updates_do_not_depend_on_the_micro_batches(make_job, batches, kind, correction, aggregation):
    loss = {"kind": kind, "aggregation": aggregation, "entropyCoefficient": 0.05, "klCoefficient": 0.1, **correction}
    states, figures = [], []
    for budget in (1, 40, 4096):
        policy = build_model(make_job({"algorithm": {"loss": loss}, "trainer": {"microBatchTokens": budget}}))
        figures.append([policy.update(batch) for batch in batches[:2]][-1])
        states.append(full_state(policy))
    for figure, state in zip(figures[1:], states[1:], strict=True):
        assert figure == pytest.approx(figures[0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(state, states[0], atol=1e-5, rtol=1e-4)


def test_an_update_is_adamw_on_the_gradient_of_the_loss(make_job, batches, model_folder):
    """The whole path once more, by hand: plain transformers, one sequence at a time, torch's own AdamW."""
    batch = batches[0]
    loss = {"correction": "none", "clipRatioC": 0.0}
    settings = {"loss": loss, "optimizer": {"learningRate": 1e-3, "maxGradNorm": 0.5}}
    policy = build_model(make_job({"algorithm": settings}))
    figures = policy.update(batch)

    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    loss = torch.zeros(())
    for sequence in batch.sequences:
        ids = torch.tensor([*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()])
        logprobs = (model(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
        chosen = logprobs[sequence.prompt_ids.size - 1 : -1].gather(1, ids[sequence.prompt_ids.size :, None])[:, 0]
        ratio = (chosen - torch.from_numpy(sequence.behaviour_logprobs.copy())).exp()
        advantage = sequence.advantage
        loss = loss - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum()
    (loss / batch.num_trained_tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()

    assert figures["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert figures["actor/pg_loss"] == pytest.approx(loss.item() / batch.num_trained_tokens, rel=1e-4)
    torch.testing.assert_close(full_state(policy), dict(model.state_dict()), atol=1e-5, rtol=1e-3)


def test_a_multi_turn_sample_is_trained_on_the_tokens_that_the_policy_chose(make_job, batches, model_folder):
    """Tool output is context: its tokens are read, but have no loss, whatever their log-probabilities say."""
    sequences = []
    for sequence in batches[0].sequences:
        mask = np.arange(sequence.response_ids.size) % 3 != 1
        noisy = np.where(mask, sequence.behaviour_logprobs, np.float32(-99)).astype(np.float32)
        sequences.append(dataclasses.replace(sequence, loss_mask=mask, behaviour_logprobs=noisy))
    batch = dataclasses.replace(batches[0], sequences=tuple(sequences))
    loss = {"correction": "none", "clipRatioC": 0.0}
    policy = build_model(make_job({"algorithm": {"loss": loss, "optimizer": {"maxGradNorm": 1e9}}}))
    figures = policy.update(batch)

    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    loss, num_tokens = torch.zeros(()), 0
    for sequence in sequences:
        ids = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
        logprobs = (model(input_ids=torch.tensor([ids])).logits[0] / 0.8).log_softmax(-1)
        for place in np.flatnonzero(sequence.loss_mask):
            at = sequence.prompt_ids.size + int(place)
            ratio = (logprobs[at - 1, ids[at]] - float(sequence.behaviour_logprobs[place])).exp()
            loss = loss - torch.minimum(ratio * sequence.advantage, ratio.clamp(0.8, 1.28) * sequence.advantage)
            num_tokens += 1
    (loss / num_tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert batch.num_trained_tokens == num_tokens < sum(s.response_ids.size for s in sequences)
    assert figures["actor/pg_loss"] == pytest.approx(loss.item() / num_tokens, rel=1e-4)
    assert figures["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_logprobs_and_probe_are_the_models(make_job, batches, model_folder):
    policy = build_model(make_job({}))
    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")

    def expected(ids, temperature):
        with torch.no_grad():
            logprobs = (model(input_ids=torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
        return logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()

    for sequence, found in zip(batches[0].sequences, policy.logprobs(batches[0]), strict=True):
        ids = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
        np.testing.assert_allclose(found, expected(ids, 0.8)[sequence.prompt_ids.size - 1 :], atol=1e-5)
    probe = policy.probe()
    assert probe.logprobs == pytest.approx(expected(probe.ids, 1.0).tolist(), abs=1e-5)


def test_samples_of_the_present_policy_have_weight_and_ratio_one(make_job, batches):
    policy = build_model(make_job({}))
    fresh = with_behaviour(batches[0], policy.logprobs(batches[0]))
    figures = policy.update(fresh)
    assert figures["actor/importance_weight"] == pytest.approx(1, abs=1e-5)
    assert figures["actor/behaviour_kl"] == pytest.approx(0, abs=1e-6)


def from_version(batch, *numbers):
    """The batch as if sequence i had been written by version 1.numbers[i], and all others by 1.9."""
    sequences = [
        dataclasses.replace(sequence, version_spans=((0, PolicyVersion(1, (*numbers, *[9] * index)[index])),))
        for index, sequence in enumerate(batch.sequences)
    ]
    return dataclasses.replace(batch, sequences=tuple(sequences))


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_samples_of_the_published_version_are_compared_with_it(make_job, batches, mini_batches):
    settings = {"promptsPerStep": 4, "miniBatchesPerStep": mini_batches, "optimizer": {"learningRate": 0.05}}
    policy = build_model(make_job({"algorithm": settings}))
    published = [policy.logprobs(batch) for batch in batches[:2]]
    policy.hold_proximal(PolicyVersion(1, 3))
    off = [own + np.float32(0.25) * (index == 1) for index, own in enumerate(published[0])]
    batch = from_version(with_behaviour(batches[0], off), 3, 3, 2)
    share = batch.sequences[1].num_trained_tokens / sum(s.num_trained_tokens for s in batch.sequences[:2])
    assert policy.update(batch)["actor/logprob_mismatch"] == pytest.approx(0.25 * share, rel=1e-3)
    # The weights have moved: a second mini-batch is compared with the published ones, a second step with nothing.
    second = policy.update(from_version(with_behaviour(batches[1], published[1]), 3, 3))
    if mini_batches > 1:
        assert second["actor/logprob_mismatch"] == pytest.approx(0, abs=1e-5)
    else:
        assert "actor/logprob_mismatch" not in second
        assert "actor/logprob_mismatch_limit" not in second


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 0.05), ("float16", 0.05), ("bfloat16", 0.3)])
def test_the_limit_of_the_difference_is_that_of_the_precision(make_job, batches, dtype, limit):
    policy = build_model(make_job({"model": {"dtype": dtype}}))
    policy.hold_proximal(PolicyVersion(1, 3))
    figures = policy.update(from_version(with_behaviour(batches[0], policy.logprobs(batches[0])), 3))
    assert figures["actor/logprob_mismatch_limit"] == limit
    assert figures["actor/logprob_mismatch"] < limit


@pytest.mark.parametrize("correction", ["tis", "decoupled"])
def test_the_clip_is_around_the_published_policy(make_job, batches, correction):
    """Mini-batches of a step see the step's first policy; the next publication moves it along."""
    settings = {"promptsPerStep": 4, "miniBatchesPerStep": 2, "loss": {"correction": correction}}
    policy = build_model(make_job({"algorithm": {**settings, "optimizer": {"learningRate": 0.1}}}))
    published = policy.logprobs(batches[1])
    first = policy.update(with_behaviour(batches[0], policy.logprobs(batches[0])))
    assert first["actor/pg_clipfrac"] == 0
    moved = policy.logprobs(batches[1])
    assert np.abs(np.concatenate(moved) - np.concatenate(published)).max() > 0.3

    second = policy.update(with_behaviour(batches[1], published))
    assert second["actor/importance_weight"] == pytest.approx(1, abs=1e-4)
    assert second["actor/pg_clipfrac"] > 0
    policy.hold_proximal(PolicyVersion(1, 1))
    third = policy.update(with_behaviour(batches[2], policy.logprobs(batches[2])))
    assert third["actor/pg_clipfrac"] == 0


@pytest.mark.parametrize("correction", ["tis", "decoupled"])
def test_resumed_training_is_bit_equal(make_job, batches, correction, tmp_path):
    settings = {"algorithm": {"loss": {"correction": correction}, "optimizer": {"warmupSteps": 3}}}
    through, first, second = (build_model(make_job(settings)) for _ in range(3))
    for batch in batches:
        figures = through.update(batch)
    for batch in batches[:2]:
        first.update(batch)
    first.copy_state().write(tmp_path)
    second.load(str(tmp_path))
    for batch in batches[2:]:
        figures_resumed = second.update(batch)
    assert figures_resumed == figures
    torch.testing.assert_close(full_state(second), full_state(through), atol=0, rtol=0)


@pytest.mark.parametrize("correction", ["tis", "decoupled", "none"])
def test_a_step_stopped_in_its_middle_goes_on_as_if_it_never_had(make_job, batches, correction, tmp_path):
    """The step's first weights are in the checkpoint: they are published again, and the rest is clipped around them."""
    loss = {"correction": correction, "klCoefficient": 0.1}
    settings = {"promptsPerStep": 4, "miniBatchesPerStep": 4, "loss": loss, "optimizer": {"learningRate": 0.1}}
    job = make_job({"algorithm": settings})
    through, stopped, resumed = (build_model(job) for _ in range(3))
    for policy in (through, stopped):
        policy.hold_proximal(PolicyVersion(1, 0))
        for batch in batches[:2]:
            policy.update(batch)
    fresh = build_model(job)
    first_weights, first_probe = full_state(fresh), fresh.probe()
    save_checkpoint(tmp_path / "checkpoints", 0, stopped, {})
    present = full_state(stopped)

    load_checkpoint(tmp_path / "checkpoints" / "step-000000", resumed)
    write_weights(resumed, tmp_path, PolicyVersion(2, 0))
    stored = load_file(tmp_path / "2.0" / "model.safetensors")
    if correction != "none":  # nothing is clipped around them without a correction
        torch.testing.assert_close(stored, first_weights, atol=0, rtol=0)
        assert msgspec.json.decode((tmp_path / "2.0" / "probe.json").read_bytes(), type=Probe) == first_probe
    torch.testing.assert_close(full_state(resumed), present, atol=0, rtol=0)
    for batch in batches[2:]:
        expected = through.update(batch)
        for name in ("actor/logprob_mismatch", "actor/logprob_mismatch_limit"):
            expected.pop(name, None)  # compares samples of the announced version, 2.0 after a resume
        assert resumed.update(batch) == expected
    torch.testing.assert_close(full_state(resumed), full_state(through), atol=0, rtol=0)

    # The next publication is of the trained weights.
    write_weights(resumed, tmp_path, PolicyVersion(2, 1))
    torch.testing.assert_close(load_file(tmp_path / "2.1" / "model.safetensors"), full_state(through), atol=0, rtol=0)
    through.hold_proximal(PolicyVersion(1, 1))
    assert resumed.update(batches[0]) == through.update(batches[0])


def test_a_state_from_before_the_first_update_comes_back(make_job, batches, tmp_path):
    fresh, later = build_model(make_job({})), build_model(make_job({}))
    later.update(batches[0])
    fresh.copy_state().write(tmp_path)
    later.load(str(tmp_path))
    assert later.update(batches[1]) == fresh.update(batches[1])
    torch.testing.assert_close(full_state(later), full_state(fresh), atol=0, rtol=0)


def test_a_saved_state_is_not_moved_by_later_updates(make_job, batches, tmp_path):
    policy = build_model(make_job({}))
    policy.update(batches[0])
    state, published = policy.copy_state(), full_state(policy)
    copies = {name: tensor.clone() for name, tensor in published.items()}
    policy.update(batches[1])
    state.write(tmp_path)
    reader = ShardReader(tmp_path)
    for name, tensor in copies.items():
        assert torch.equal(reader.whole(f"model/{name}"), tensor)
        assert torch.equal(published[name], tensor)
        assert not torch.equal(full_state(policy)[name], tensor)


def test_warm_up_grows_over_the_updates_of_its_steps(make_job, batches):
    optimizer = {"learningRate": 0.004, "warmupSteps": 2}
    job = make_job({"algorithm": {"promptsPerStep": 4, "miniBatchesPerStep": 2, "optimizer": optimizer}})
    policy = build_model(job)
    rates = [policy.update(batches[0])["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.001, 0.002, 0.003, 0.004, 0.004, 0.004])


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("linear", [2, 4, 4, 3, 2]), ("cosine", [2, 4, 4, 2 + 2**0.5, 2]), ("constant", [2, 4, 4, 4, 4])],
)
def test_the_rate_after_the_warm_up_follows_its_schedule(schedule, rates):
    settings = OptimizerSpec(schedule=schedule, min_rate_share=0.0)
    assert [4 * rate_share(settings, update, 2, 6) for update in range(5)] == pytest.approx(rates)
    assert rate_share(settings, 9, 2, 6) == pytest.approx(1.0 if schedule == "constant" else 0.0)


def test_epochs_clip_around_the_policy_before_the_first_of_them(make_job, make_groups, tmp_path):
    settings = {"epochs": 3, "loss": {"correction": "tis"}, "optimizer": {"learningRate": 0.1}}
    job = make_job({"algorithm": settings})
    model = build_model(job)
    backend = TorchBackend(job, model, tmp_path)
    backend.publish(PolicyVersion(1, 0))
    before = full_state(model)
    figures = backend.update(make_groups(SCORES))
    assert figures["actor/pg_clipfrac"] > 0  # none in the first of the three, so the mean is that of the others
    model.copy_state().write(tmp_path)
    assert ShardIndex.read(tmp_path).progress.updates == 3
    assert any(not torch.equal(before[name], tensor) for name, tensor in full_state(model).items())


def gradients(model, batch):
    """The gradients of an update by parameter name."""
    found = {}
    step = model._optimizer.step
    model._optimizer.step = lambda: (
        found.update({name: parameter.grad.clone() for name, parameter in model._parameters.items()}) or step()
    )
    return model.update(batch), found


@pytest.mark.parametrize("kind", ["layers", "selective"])
def test_activation_checkpointing_changes_no_gradient(make_job, batches, kind):
    jobs = ({}, {"trainer": {"activationCheckpointing": kind}})
    found = [gradients(build_model(make_job(job)), batches[0]) for job in jobs]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_the_chunked_head_gives_the_gradients_of_whole_logits(make_job, batches, entropy):
    job = make_job({"algorithm": {"loss": {"entropyCoefficient": entropy}}, "trainer": {"microBatchTokens": 4096}})
    chunked, whole = build_model(job), build_model(job)
    chunked._head = TokenHead(chunked._model, chunk_bytes=4 * 16 * 5)  # five tokens at a time
    whole._head.chunked = False
    found = [gradients(model, batches[0]) for model in (chunked, whole)]
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


class Exponentials(TorchDispatchMode):
    """Counts the exponentials of all logits: one for entropies."""

    num = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if operation is torch.ops.aten.exp.default and result.shape[1:] == (16,):
            self.num += 1
        return result


def test_entropies_are_computed_in_the_policys_own_passes_alone(make_job, batches):
    loss = {"klCoefficient": 0.1, "correction": "decoupled"}
    job = make_job({"algorithm": {"epochs": 2, "loss": loss}, "trainer": {"microBatchTokens": 10_000}})
    policy = build_model(job)
    counts = []
    for compute in (policy.update, policy.update, policy.logprobs, policy.divergences):
        with Exponentials() as passes:
            compute(batches[0])
        counts.append(passes.num)
    assert counts == [1, 1, 0, 0]


def test_a_model_that_changes_the_logits_behind_its_head_keeps_them_whole():
    config = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    packed = {"attn_implementation": PACKED_ATTENTION}
    assert TokenHead(AutoModelForCausalLM.from_config(Qwen3Config(**config, **heads), **packed)).chunked
    granite = GraniteConfig(**{name: config[name] for name in list(config)[:-1]}, **heads, logits_scaling=2.0)
    assert not TokenHead(AutoModelForCausalLM.from_config(granite, **packed)).chunked


def test_sequences_without_a_gradient_are_left_out_and_change_nothing_else(make_job, batches):
    policy, everything = build_model(make_job({})), build_model(make_job({}))
    everything._with_gradient = lambda batch, weights: (batch, weights)
    figures, expected = policy.update(batches[0]), everything.update(batches[0])
    assert figures["training/sequences_skipped"] == 4  # the group of equal scores
    assert figures["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], rel=1e-5)
    torch.testing.assert_close(full_state(policy), full_state(everything), atol=1e-6, rtol=1e-5)


def test_an_update_without_any_gradient_moves_nothing(make_job, batches, make_groups):
    policy = build_model(make_job({}))
    policy.update(batches[0])
    before = full_state(policy)
    figures = policy.update(make_batch(make_groups([[1.0, 1.0], [0.0, 0.0]]), "grpo", 0.8))
    assert figures["training/sequences_skipped"] == 4
    torch.testing.assert_close(full_state(policy), before, atol=0, rtol=0)


def test_a_gradient_that_is_not_finite_is_thrown_away(make_job, batches):
    policy = build_model(make_job({}))
    policy.update(batches[0])
    before = full_state(policy)
    broken = [dataclasses.replace(sequence, advantage=math.nan) for sequence in batches[1].sequences]
    figures = policy.update(dataclasses.replace(batches[1], sequences=tuple(broken)))
    assert figures["actor/skipped_updates"] == 1
    assert "actor/grad_norm" not in figures
    torch.testing.assert_close(full_state(policy), before, atol=0, rtol=0)
    assert policy.update(batches[2])["actor/skipped_updates"] == 0


def test_an_empty_batch_changes_nothing(make_job, make_groups):
    policy = build_model(make_job({}))
    before = full_state(policy)
    figures = policy.update(make_batch(make_groups([[None, None]]), "grpo", 1.0))
    assert figures["training/sequences"] == 0
    torch.testing.assert_close(full_state(policy), before, atol=0, rtol=0)


def test_published_weights_have_the_jobs_precision_and_training_stays_near_float32(make_job, batches, tmp_path):
    rough, exact = build_model(make_job({"model": {"dtype": "bfloat16"}})), build_model(make_job({}))
    assert {tensor.dtype for tensor in full_state(rough).values()} == {torch.bfloat16}
    found, expected = rough.update(batches[0]), exact.update(batches[0])
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.05)
    rough.copy_state().write(tmp_path)
    assert {tensor.dtype for tensor in ShardIndex.read(tmp_path).tensors.values()} == {"F32"}


def test_sampling_that_cuts_the_distribution_is_refused(make_job):
    with pytest.raises(RefusedError, match="topP"):
        build_model(make_job({"rollout": {"sampling": {"topP": 0.9}}}))
