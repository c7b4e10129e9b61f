"""Adapters: what is trained, published, stored and exported."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel, inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit_job.load import dump_job
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import LoraSpec
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.cli import main
from plaudit_workers.training.checkpoint import load_checkpoint
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.head import load_by_rows
from plaudit_workers.training.model.lora import Adapters, adapter_config
from plaudit_workers.training.model.policy_model import build_model, placed
from plaudit_workers.training.model.sharding import Ranks
from plaudit_workers.training.publish import write_weights
from plaudit_workers.weights.index import ShardIndex
from whole_state import full_state, save_checkpoint

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None]]
LORA = {"trainer": {"lora": {"rank": 4, "alpha": 8.0}}}


def logprobs(model, ids):
    with torch.no_grad():
        logits = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


@pytest.fixture
def base(model_folder):
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)


def test_the_first_adapter_is_the_starting_model(make_job, base):
    probe = build_model(make_job(LORA)).probe()
    assert probe.logprobs == pytest.approx(logprobs(base, probe.ids), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_adapters_are_those_of_a_model_that_is_read_whole(model_folder, base, dtype):
    spec, settings = ModelSpec(source=str(model_folder)), LoraSpec(rank=4, alpha=8.0)
    torch.manual_seed(3)
    peft = inject_adapter_in_model(adapter_config(settings, str(model_folder)), base)
    torch.manual_seed(3)
    loaded = load_by_rows(spec)
    Adapters(loaded.module, settings, spec.source, dtype)
    assert all(each.is_meta != each.requires_grad for each in loaded.module.parameters())
    module = placed(loaded, Ranks(0, 1, torch.device("cpu")), dtype)
    expected = {name: each if "lora_" in name else each.to(dtype) for name, each in peft.named_parameters()}
    found = dict(module.named_parameters())
    torch.testing.assert_close(found, expected, atol=0, rtol=0)
    assert [name for name, each in found.items() if each.requires_grad] == [name for name in found if "lora_" in name]


def test_published_adapters_give_the_trainers_logprobs_in_peft(make_job, make_groups, base, tmp_path):
    policy = build_model(make_job(LORA))
    for seed in range(3):
        policy.update(make_batch(make_groups(SCORES, seed=seed), "grpo", 1.0))
    folder = tmp_path / "1.3"
    write_weights(policy, tmp_path, PolicyVersion(1, 3))
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "probe.json",
    }
    probe = policy.probe()
    assert max(abs(a - b) for a, b in zip(probe.logprobs, logprobs(base, probe.ids), strict=True)) > 1e-3
    assert probe.logprobs == pytest.approx(logprobs(PeftModel.from_pretrained(base, folder), probe.ids), abs=1e-5)


def test_the_divergence_is_that_from_the_starting_model(make_job, make_groups):
    algorithm = {"loss": {"klCoefficient": 0.1, "klEstimator": "k2"}}
    policy = build_model(make_job(LORA | {"algorithm": algorithm}))
    batch = make_batch(make_groups(SCORES), "grpo", 1.0)
    for _ in range(3):
        policy.update(batch)
    start = build_model(make_job({})).logprobs(batch)
    ratios = [mine - theirs for mine, theirs in zip(policy.logprobs(batch), start, strict=True)]
    expected = sum((ratio**2).sum() for ratio in ratios) / 2 / sum(ratio.size for ratio in ratios)
    assert policy.update(batch)["actor/kl_loss"] == pytest.approx(expected, rel=1e-4)
    assert expected > 1e-6


def test_a_resumed_adapter_repeats_the_updates_bit_by_bit(make_job, make_groups, tmp_path):
    batches = [make_batch(make_groups(SCORES, seed=seed), "grpo", 1.0) for seed in range(4)]
    policy = build_model(make_job(LORA))
    for batch in batches[:2]:
        policy.update(batch)
    path = save_checkpoint(tmp_path, 2, policy, {})
    for batch in batches[2:]:
        policy.update(batch)
    resumed = build_model(make_job(LORA))
    load_checkpoint(path, resumed)
    for batch in batches[2:]:
        resumed.update(batch)
    torch.testing.assert_close(full_state(resumed), full_state(policy), atol=0, rtol=0)


def test_a_checkpoint_holds_no_frozen_weights(make_job, tmp_path):
    build_model(make_job(LORA)).copy_state().write(tmp_path)
    assert all("lora_" in name for name in ShardIndex.read(tmp_path).tensors)


@pytest.mark.parametrize("spec", [LORA, {}], ids=["adapters", "all weights"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_checkpoint_is_the_policy_of_its_step(make_job, make_groups, tmp_path, capsys, spec, dtype):
    job = make_job(spec | {"model": {"dtype": dtype}})
    policy = build_model(job)
    run, output = tmp_path / "run", tmp_path / "exported"
    policy.update(make_batch(make_groups(SCORES), "grpo", 1.0))
    save_checkpoint(run / "checkpoints", 7, policy, {})
    probe = policy.probe()
    policy.update(make_batch(make_groups(SCORES), "grpo", 1.0))
    (run / "job.yaml").write_text(dump_job(job))
    assert main(["export", str(run), "--step", "7", "--output", str(output)]) == 0
    assert "step 7" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(output)
    assert model.dtype == getattr(torch, dtype)
    apart = [abs(a - b) for a, b in zip(probe.logprobs, logprobs(model.float(), probe.ids), strict=True)]
    assert sum(apart) / len(apart) < {"float32": 1e-5, "bfloat16": 0.05}[dtype]
    assert AutoTokenizer.from_pretrained(output).eos_token == "<eos>"
    assert main(["export", str(run), "--step", "8", "--output", str(tmp_path / "b")]) == 2
    assert "has no step 8; it has 7" in capsys.readouterr().err


def test_a_checkpoint_of_all_weights_is_refused_by_name(make_job, tmp_path):
    path = save_checkpoint(tmp_path, 1, build_model(make_job({})), {})
    with pytest.raises(RefusedError, match="lora_A"):
        load_checkpoint(path, build_model(make_job(LORA)))


@pytest.mark.parametrize(
    ("module", "problem"), [("q_projection", "q_projection"), ("embed_tokens", "embed_tokens is no linear layer")]
)
def test_other_modules_are_refused_with_the_remedy(make_job, module, problem):
    with pytest.raises(RefusedError, match=rf"targetModules.*{problem}.*Name linear layers"):
        build_model(make_job({"trainer": {"lora": {"targetModules": [module]}}}))


@pytest.mark.parametrize("spec", [LORA, {}])
def test_an_exported_model_is_the_published_policy(make_job, make_groups, tmp_path, capsys, spec):
    job = make_job(spec)
    policy = build_model(job)
    policy.update(make_batch(make_groups(SCORES), "grpo", 1.0))
    run, output = tmp_path / "run", tmp_path / "exported"
    write_weights(policy, run / "weights", PolicyVersion(1, 1))
    (run / "job.yaml").write_text(dump_job(job))
    assert main(["export", str(run), "--output", str(output)]) == 0
    assert "1.1" in capsys.readouterr().out
    probe = policy.probe()
    merged = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    assert probe.logprobs == pytest.approx(logprobs(merged, probe.ids), abs=1e-5)
    assert main(["export", str(run), "--output", str(output)]) == 2
    assert main(["export", str(run), "--output", str(tmp_path / "b"), "--version", "1.7"]) == 2
    assert "it has 1.1" in capsys.readouterr().err
