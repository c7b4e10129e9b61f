"""Which models are given packed rows."""

import copy

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from plaudit_model_server.model import enable_packing

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_labels": 1,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
PACKED = [
    (Qwen3Config(**SIZES, head_dim=8), True),
    (MixtralConfig(**SIZES, num_local_experts=4), True),
    # The frequencies of its positions depend on the longest sequence of the row.
    (LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}), False),
    # Its state-space layers carry a little from one sequence into the next: less than bfloat16 rounds.
    (JambaConfig(**SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=2, mamba_d_state=4), False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("config", "packed"), PACKED)
def test_a_model_whose_layers_look_across_sequences_is_not_packed(
    config: PreTrainedConfig, packed: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config), dtype=dtype).eval()
    own = model.config._attn_implementation
    assert enable_packing(model) is packed
    assert (model.config._attn_implementation != own) is packed
