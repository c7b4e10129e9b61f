"""The trainer's ways that need a GPU: the flash kernel, memory on the host, compiled layers, weights that leave it.

``make test-gpu`` runs these tests on a machine with one; elsewhere they are left out. What they compare with is
computed on the CPU, or in another way on the GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from builders import make_body, make_prompt
from plaudit_reward.attention import VARLEN_ATTENTION, PackedLayout, disagreement, packed_attention, varlen_attention
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import ScorerRecord, ScoringRecord, Stamps
from plaudit_workers.stream.groups import Group, GroupSample
from plaudit_workers.training.checkpoint import load_checkpoint
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.head import reduced
from plaudit_workers.training.model.policy_model import PolicyModel, build_model
from plaudit_workers.training.publish import offer_weights, write_weights
from plaudit_workers.weights.files import host_copy
from plaudit_workers.weights.receive import Reception
from whole_state import full_state, save_checkpoint

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # of torch's compiler about torch itself
]

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, 0.5], [0.2, 0.4, 0.6, 0.8]]
CUDA = torch.device("cuda")
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def wide_folder(model_folder, tmp_path_factory) -> Path:
    """8 layers x 512 with grouped heads of 64, and the tokenizer of the tiny model."""
    folder = tmp_path_factory.mktemp("wide")
    config = Qwen2Config(
        vocab_size=16,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def wide_job(make_job, wide_folder):
    def make(trainer: dict[str, object] | None = None, dtype: str = "bfloat16", **algorithm: object):
        return make_job(
            {
                "model": {"source": str(wide_folder), "dtype": dtype},
                "trainer": {"microBatchTokens": 8192, **(trainer or {})},
                "algorithm": algorithm,
            }
        )

    return make


@pytest.fixture
def batch(make_groups):
    return make_batch(make_groups(SCORES, seed=3, longest=60), "grpo", 1.0)


@pytest.fixture
def long_batch(make_groups):
    return make_batch(make_groups([[0.0, 1.0] * 8], seed=4, longest=900), "grpo", 1.0)


def on_cpu(monkeypatch: pytest.MonkeyPatch, job: object) -> PolicyModel:
    with monkeypatch.context() as context:
        context.setattr(torch.cuda, "is_available", lambda: False)
        return build_model(job)


def logprobs(policy: PolicyModel, batch: object) -> np.ndarray:
    return np.concatenate(policy.logprobs(batch))


@pytest.mark.parametrize("window", [None, 16, 300])
@pytest.mark.parametrize("sizes", [(14, 2, 64), (12, 2, 128), (32, 8, 128), (8, 4, 256), (4, 4, 8)])
def test_the_kernel_computes_what_blocks_compute_in_float32(sizes, window):
    heads, key_value_heads, width = sizes
    lengths = [5000, 2100, 2100, 700, 650, 33, 5, 1]
    layout, random = PackedLayout.of(lengths).to(CUDA), torch.Generator().manual_seed(0)
    counts = (heads, key_value_heads, key_value_heads)
    parts = [torch.randn(1, count, sum(lengths), width, generator=random) for count in counts]
    found = []
    for attention, dtype in ((varlen_attention, torch.bfloat16), (packed_attention, torch.float32)):
        own = [part.to(CUDA, torch.bfloat16).to(dtype).requires_grad_() for part in parts]
        output, _ = attention(torch.nn.Identity(), *own, None, packed_layout=layout, sliding_window=window)
        found.append([output.detach(), *torch.autograd.grad(output.float().square().sum(), own)])
    for of_kernel, of_blocks in zip(*found, strict=True):
        assert float((of_kernel.float() - of_blocks).norm() / of_blocks.norm()) < 0.01
    assert disagreement(CUDA, torch.bfloat16, sizes) == ""


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-4), ("bfloat16", 0.03)])
def test_a_gpu_computes_what_a_cpu_does(wide_job, batch, monkeypatch, dtype, apart):
    policy, other = build_model(wide_job(dtype=dtype)), on_cpu(monkeypatch, wide_job(dtype="float32"))
    assert (policy._model.config._attn_implementation == VARLEN_ATTENTION) == (dtype == "bfloat16")
    np.testing.assert_allclose(logprobs(policy, batch), logprobs(other, batch), atol=apart)
    np.testing.assert_allclose(policy.probe().logprobs, other.probe().logprobs, atol=apart)
    found, expected = policy.update(batch), other.update(batch)
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert found[name] == pytest.approx(expected[name], rel=10 * apart, abs=apart), name


def test_what_layers_keep_changes_memory_and_not_the_gradient(wide_job, long_batch):
    kinds = {
        "none": {"activationCheckpointing": "none"},
        "selective": {"activationCheckpointing": "selective"},
        "layers": {"activationCheckpointing": "layers"},
        "host": {"activationCheckpointing": "layers", "activationOffload": True},
    }
    figures, peaks = {}, {}
    for name, trainer in kinds.items():
        policy = build_model(wide_job(trainer))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        figures[name] = policy.update(long_batch)
        peaks[name] = torch.cuda.max_memory_allocated() - before
        policy.close()
        del policy
    for name in kinds:
        assert figures[name]["actor/grad_norm"] == pytest.approx(figures["none"]["actor/grad_norm"], rel=0.01), name
    assert peaks["none"] > 1.3 * peaks["selective"] > 1.3 * peaks["layers"] / 1.2, peaks
    assert peaks["layers"] > peaks["host"], peaks


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_a_compiled_reduction_of_logits_gives_what_the_eager_one_does(
    wide_job, batch, long_batch, monkeypatch, entropy
):
    job = wide_job(loss={"entropyCoefficient": entropy})
    compiled = build_model(job)
    assert compiled._head._reduced is not reduced
    monkeypatch.setattr("plaudit_workers.training.model.head._compiled_reduction", lambda *_: None)
    eager = build_model(job)
    assert eager._head._reduced is reduced
    for each in (batch, long_batch):
        np.testing.assert_allclose(logprobs(compiled, each), logprobs(eager, each), atol=1e-3)
        found, expected = compiled.update(each), eager.update(each)
        for name in ("actor/grad_norm", "actor/entropy", "actor/pg_loss"):
            assert found[name] == pytest.approx(expected[name], rel=0.01, abs=1e-4), name


def test_compiled_layers_compute_what_eager_ones_do(wide_job, batch, long_batch):
    eager, compiled = build_model(wide_job()), build_model(wide_job({"compile": True}))
    for each in (batch, long_batch, batch):
        apart = np.abs(logprobs(compiled, each) - logprobs(eager, each))
        assert apart.mean() < 0.02
        assert apart.max() < 0.2
        found, expected = compiled.update(each), eager.update(each)
        assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=0.03)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["whole", "lora"])
def test_a_checkpoint_continues_on_a_gpu_as_if_nothing_had_happened(wide_job, batch, tmp_path, lora):
    trainer = {"lora": lora} if lora else {}
    policy = build_model(wide_job(trainer))
    first = policy.update(batch)
    path = save_checkpoint(tmp_path, 1, policy, {})
    other = build_model(wide_job(trainer))
    load_checkpoint(path, other)
    torch.testing.assert_close(full_state(other), full_state(policy), atol=0, rtol=0)
    np.testing.assert_array_equal(logprobs(other, batch), logprobs(policy, batch))
    second = [each.update(batch) for each in (policy, other)]
    assert second[0]["actor/grad_norm"] == pytest.approx(second[1]["actor/grad_norm"], rel=1e-3)
    assert first["actor/grad_norm"] > 0


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
def test_what_is_copied_in_several_pieces_is_the_same(dtype):
    rows = torch.randn(26_000_001, device=CUDA)[1:].view(1000, 26_000)
    for each in (rows, rows[:, 3:7], rows[0, 0], rows[:0]):
        torch.testing.assert_close(host_copy(each, dtype), each.cpu().to(dtype or each.dtype), atol=0, rtol=0)


def test_weights_leave_the_gpu_as_files_copies_changes_and_over_the_network(wide_job, batch, tmp_path):
    policy = build_model(wide_job(optimizer={"learningRate": 1e-3}))
    for number in range(2):
        write_weights(policy, tmp_path, PolicyVersion(1, number))
        announcement = offer_weights(policy, PolicyVersion(1, number), "token", "redis://127.0.0.1")
        with Reception(announcement.version, announcement.transfer) as reception:
            torch.testing.assert_close(
                load_file(reception.receive() / WEIGHTS), load_file(tmp_path / f"1.{number}" / WEIGHTS), atol=0, rtol=0
            )
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"1.{number}", dtype=torch.float32)
        ids = torch.tensor([policy.probe().ids])
        with torch.no_grad():
            expected = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(policy.probe().logprobs, expected.numpy(), atol=0.05)
        policy.update(batch)
    policy.close()


def test_mini_batches_are_clipped_around_weights_that_lie_on_the_gpu(wide_job, batch):
    settings = {
        "promptsPerStep": 4,
        "miniBatchesPerStep": 2,
        "loss": {"correction": "decoupled", "klCoefficient": 0.1},
        "optimizer": {"learningRate": 1e-3},
    }
    policy = build_model(wide_job(**settings))
    policy.hold_proximal(PolicyVersion(1, 1))
    first, second = policy.update(batch), policy.update(batch)
    assert first["actor/pg_clipfrac"] == 0
    assert second["actor/kl_loss"] > first["actor/kl_loss"]
    policy.free_memory()


@torch.no_grad()
def copied_digits(
    model: PreTrainedModel, random: np.random.Generator, version: PolicyVersion
) -> tuple[list[Group], float]:
    """Sample one token 16 times for each of 8 digits, and return the groups and the share that repeat their digit."""
    groups, right = [], 0
    for number, digit in enumerate(random.integers(0, 10, 8).tolist()):
        logprobs = model(torch.tensor([[digit, 10]], device=CUDA)).logits[0, -1].float().log_softmax(-1).cpu().numpy()
        chances = np.exp(logprobs.astype(np.float64))
        tokens = random.choice(len(chances), 16, p=chances / chances.sum()).tolist()
        name = f"t-{version.number}-1.{number}"
        prompt = make_prompt(name, 16, position=number, prompt_ids=np.array([digit, 10], "<i4").tobytes())
        samples = []
        for index, token in enumerate(tokens):
            score = float(token == digit)
            body = make_body(
                prompt,
                index,
                str(token),
                [token],
                logprobs=logprobs[token].astype("<f4").tobytes(),
                version_spans=[(0, version.incarnation, version.number)],
            )
            scoring = ScoringRecord("scored", score, scorers={"mine": ScorerRecord("scored", score, call_s=0.1)})
            samples.append(GroupSample(index, Stamps(1.0, 1.1, 1.5, None, 1.6, 1.7), body, "digest", scoring))
            right += token == digit
        groups.append(Group(name, "ready", prompt, samples, 1, 1.0, 1.8, 1.9))
    return groups, right / (8 * 16)


def test_a_policy_learns_on_a_gpu(make_job, tmp_path):
    """GRPO on one token: the reward is 1 for the digit that the prompt ends with, sampled from published weights."""
    job = make_job({"model": {"dtype": "bfloat16"}, "algorithm": {"optimizer": {"learningRate": 3e-3}, "steps": 80}})
    policy, random, rewards = build_model(job), np.random.default_rng(0), []
    for step in range(80):
        version = PolicyVersion(1, step)
        write_weights(policy, tmp_path, version)
        policy.hold_proximal(version)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / f"1.{step}", dtype=torch.bfloat16).to(CUDA)
        groups, reward = copied_digits(model, random, version)
        rewards.append(reward)
        policy.update(make_batch(groups, "grpo", 1.0))
    assert np.mean(rewards[:5]) < 0.3
    assert np.mean(rewards[-10:]) > 0.75, rewards
