"""Parameters that files hold under other names or in another form: read row by row, they are transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from plaudit_workers.weights.parameters import ModelFiles, StoredParameters

SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "a stack of experts, renamed": MixtralConfig(**SIZES, num_local_experts=11),
    "a stack of experts": Qwen3MoeConfig(
        **SIZES, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=True
    ),
    "another name": GraniteMoeConfig(**SIZES, num_local_experts=4),
    "one tensor of three": OlmoHybridConfig(**SIZES, pad_token_id=None),
}


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_the_model_that_transformers_loads(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    files = ModelFiles.find(str(tmp_path), None)
    assert not loaded.state_dict().keys() <= set(files.names)
    stored = StoredParameters.find(empty(MODELS[name]), files)
    for parameter, whole in loaded.state_dict().items():
        for first in range(0, whole.shape[0], 5):
            assert torch.equal(stored.rows(parameter, first, 5), whole[first : first + 5]), parameter
    for parameter, parts in stored.published().items():
        joined = torch.cat([files.whole(part).flatten() for part, _ in parts])
        assert torch.equal(joined, loaded.state_dict()[parameter].flatten()), parameter


def empty(config: PreTrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
