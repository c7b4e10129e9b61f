"""Mixtures of experts are published under the names of the files that they were read from: engines know no others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig, Qwen3MoeConfig

from plaudit_job.load import dump_job
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.cli import main
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.model.weight_offer import shapes_of
from plaudit_workers.training.publish import offer_weights, write_weights
from plaudit_workers.weights.deltas import restore
from plaudit_workers.weights.files import WeightFiles
from plaudit_workers.weights.image import WeightForm, WeightImage
from plaudit_workers.weights.receive import Reception
from whole_state import full_state, save_checkpoint

SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MODELS = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=11, tie_word_embeddings=False),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=True
    ),
}
WEIGHTS = "model.safetensors"


@pytest.fixture(params=MODELS)
def source(request, model_folder, tmp_path) -> Path:
    torch.manual_seed(1)
    folder = tmp_path / "source"
    AutoModelForCausalLM.from_config(MODELS[request.param]).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


@pytest.fixture
def job(make_job, source):
    return make_job({"model": {"source": str(source)}})


def assert_equal(folder: Path, expected: Path) -> None:
    torch.testing.assert_close(load_file(folder / WEIGHTS), load_file(expected / WEIGHTS), atol=0, rtol=0)


def test_the_first_weights_are_those_of_the_files(job, source, tmp_path):
    policy = build_model(job)
    write_weights(policy, tmp_path, PolicyVersion(1, 1))
    assert_equal(tmp_path / "1.1", source)
    announcement = offer_weights(policy, PolicyVersion(1, 2), "token", "redis://127.0.0.1")
    with Reception(announcement.version, announcement.transfer) as reception:
        assert_equal(reception.receive(), source)
    policy.close()


def test_trained_weights_are_read_by_transformers(job, make_groups, tmp_path, capsys):
    policy = build_model(job)
    policy.update(make_batch(make_groups([[0.0, 1.0]]), "grpo", 1.0))
    run, output = tmp_path / "run", tmp_path / "exported"
    write_weights(policy, run / "weights", PolicyVersion(1, 1))
    read = AutoModelForCausalLM.from_pretrained(run / "weights" / "1.1").state_dict()
    for name, trained in full_state(policy).items():
        assert torch.equal(read[name], trained), name
    save_checkpoint(run / "checkpoints", 1, policy, {})
    (run / "job.yaml").write_text(dump_job(job))
    assert main(["export", str(run), "--step", "1", "--output", str(output)]) == 0
    assert_equal(output, run / "weights" / "1.1")


def test_deltas_lead_from_one_version_to_the_next(tmp_path):
    first, second, restored = (tmp_path / name for name in ("first", "second", "restored"))
    tensors = {"fused": torch.randn(5, 8, 6), "plain": torch.randn(7)}
    parts = {"fused": tuple((f"{number}.{half}", (4, 6)) for number in range(5) for half in ("gate", "up"))}
    files = WeightFiles.plan(shapes_of(tensors, torch.float32, parts), WEIGHTS, 1)
    image = WeightImage(files, 0)
    for folder in (first, second):
        folder.mkdir()
        copied = image.replace((name, tensors[name]) for name in files.order)
        image.write(WeightForm(str(folder), whole=True, delta=copied.has_delta))
        tensors["fused"][3, 5] += 1
    restored.mkdir()
    restore(first, [second], restored)
    assert_equal(restored, second)
    found = load_file(restored / WEIGHTS)
    assert torch.equal(found["3.up"][1] + 1, tensors["fused"][3, 5])
    assert {name for name, each in load_file(first / WEIGHTS).items() if not torch.equal(each, found[name])} == {"3.up"}
