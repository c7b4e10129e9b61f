"""The start of several ranks: each builds the model on the meta device and reads its rows of the parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from forked_ranks import run_ranks
from plaudit_job.spec.algorithm import ModelSpec
from plaudit_workers.training.model.head import build_empty
from rank_starts import load_models

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SIZES = {
    "vocab_size": 23,  # an odd number of rows: the ranks' shards differ
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "rope_theta": 1e4,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "like-qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "like-qwen2-tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "like-qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "like-llama": LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "like-gemma3": Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
# Three experts on two ranks: the shards differ.
MODELS["like-qwen3-moe"] = Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=3)
MODELS["like-mixtral"] = MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=False)
LARGE = Qwen2Config(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)


def save(config: object, folder: Path, tokenizer: Path) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=[14, 2], temperature=0.6, do_sample=True)
    model.save_pretrained(folder, max_shard_size="20KB" if config is not LARGE else "50MB")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)


def leave_out(folder: Path, name: str) -> None:
    """Remove a tensor from the files of a model."""
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    path = folder / index["weight_map"].pop(name)
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    index_path.write_text(json.dumps(index))


@pytest.fixture(scope="module")
def results(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What each of two ranks reports."""
    folder = tmp_path_factory.mktemp("start")
    for name, config in {**MODELS, "large": LARGE}.items():
        save(config, folder / name, model_folder)
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=32, num_hidden_layers=2)).save_pretrained(
        folder / "state-space"
    )
    run_ranks(load_models, folder, 2)
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", MODELS)
def test_the_model_is_the_one_that_is_read_whole(results: list[dict], name: str) -> None:
    for found in results:
        assert found[name] == {
            "on meta": True,
            "parameters": True,
            "buffers": True,
            "logits": pytest.approx(0, abs=1e-5),
            "companions": True,
            "published": True,
            "refused": {"float32": "", "bfloat16": ""},
        }


def test_no_rank_holds_the_whole_model(results: list[dict]) -> None:
    """Half of it is each rank's share; the layers that the check of packed rows gathers come on top."""
    for found in results:
        assert 0.45 < found["peak"] < 0.95


def test_a_model_with_adapters_is_the_one_that_is_read_whole(results: list[dict]) -> None:
    for found in results:
        same = {"parameters": True, "trained": True, "logits": True}
        assert found["adapted"] == {"torch.float32": same, "torch.bfloat16": same}


def test_frozen_weights_never_exist_in_float32(results: list[dict]) -> None:
    """Half of the float32 model is all of its weights in bfloat16; a rank holds half of those."""
    for found in results:
        assert 0.2 < found["peak with adapters"] < 0.5


def test_a_model_that_mixes_packed_sequences_is_refused_in_both_precisions(results: list[dict]) -> None:
    for found in results:
        assert all("'mamba' cannot be trained" in message for message in found["state-space"].values())


@pytest.mark.parametrize("form", ["another format", "a missing tensor", "a missing expert", "another shape"])
def test_a_model_whose_files_do_not_hold_its_parameters_is_loaded_whole(
    model_folder: Path, tmp_path: Path, form: str
) -> None:
    save(MODELS["like-mixtral" if form == "a missing expert" else "like-qwen2"], tmp_path, model_folder)
    spec = ModelSpec(source=str(tmp_path))
    assert build_empty(spec) is not None
    if form == "another format":
        for path in tmp_path.glob("*.safetensors*"):
            path.unlink()
    elif form == "a missing tensor":
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        (tmp_path / index["weight_map"]["lm_head.weight"]).unlink()
    elif form == "a missing expert":
        leave_out(tmp_path, "model.layers.1.block_sparse_moe.experts.2.w3.weight")
    else:
        stored = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(stored | {"vocab_size": 29}))
    assert build_empty(spec) is None
