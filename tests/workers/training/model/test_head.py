"""Models that cannot be loaded or trained packed are refused; log-probabilities are those under the temperature."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    Phi3Config,
)

from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rollout import SamplingSpec
from plaudit_reward.attention import PACKED_ATTENTION
from plaudit_wire.errors import RefusedError
from plaudit_workers.tokenizer import load_tokenizer
from plaudit_workers.training.model.head import (
    load_model,
    reduced,
    refuse_cut_sampling,
    refuse_long_packed,
    refuse_unpackable,
)

SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def test_parameters_are_float32_whatever_the_job_computes_in(model_folder):
    model = load_model(ModelSpec(source=str(model_folder), dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not model.training


def test_a_path_without_a_model_is_refused_by_name(tmp_path):
    with pytest.raises(RefusedError, match=r"model\.source is .*the model cannot be loaded"):
        load_model(ModelSpec(source=str(tmp_path)))
    with pytest.raises(RefusedError, match=r"model\.tokenizer is '/nowhere': the tokenizer"):
        load_tokenizer(ModelSpec(source=str(tmp_path), tokenizer="/nowhere"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_model_whose_layers_look_across_packed_sequences_is_refused(tmp_path):
    torch.manual_seed(0)
    MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=32, num_hidden_layers=2)).save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match="'mamba' cannot be trained"):
        load_model(ModelSpec(source=str(tmp_path)))


HYBRID = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "max_position_embeddings": 64}
MAMBA = {"mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}


@pytest.mark.parametrize(
    "config", [FalconH1Config(**HYBRID, **MAMBA, head_dim=64), Lfm2Config(**HYBRID, layer_types=["conv"] * 2)]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_leak_below_the_rounding_of_bfloat16_is_refused_too(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RefusedError, match="when another sequence precedes"):
        refuse_unpackable(model, rough=True)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4),
        MixtralConfig(**SIZES, num_local_experts=4),
    ],
)
def test_attention_windows_and_experts_are_packed_in_bfloat16(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION).eval()
    with torch.autocast("cpu", torch.bfloat16):
        refuse_unpackable(model, rough=True)


ROPE_AND_CHUNKS = [
    (
        LlamaConfig(
            **SIZES,
            max_position_embeddings=16,
            rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        ),
        "dynamic position embeddings",
    ),
    (
        Phi3Config(
            **SIZES,
            max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 16,
            },
        ),
        "longrope position embeddings",
    ),
    (
        Llama4TextConfig(
            **SIZES | {"num_hidden_layers": 4},
            eos_token_id=1,
            bos_token_id=1,
            head_dim=8,
            attention_chunk_size=16,
            num_local_experts=2,
            intermediate_size_mlp=32,
            no_rope_layers=[1, 1, 1, 0],
        ),
        "chunked attention",
    ),
]


@pytest.mark.parametrize(("config", "part"), ROPE_AND_CHUNKS)
def test_positions_that_depend_on_the_longest_sequence_are_refused_beyond_its_limit(config, part):
    model = AutoModelForCausalLM.from_config(config)
    refuse_long_packed(model, 16)
    with pytest.raises(RefusedError, match=rf"{part} cannot be trained on sequences of more than 16 tokens"):
        refuse_long_packed(model, 17)


def test_scaled_position_embeddings_of_fixed_frequencies_have_no_limit():
    scaled = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(**SIZES, rope_parameters={**scaled, "original_max_position_embeddings": 16})
    refuse_long_packed(AutoModelForCausalLM.from_config(config), 100_000)


def test_a_chat_template_file_takes_the_place_of_the_tokenizers_own(model_folder, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}=")
    tokenizer = load_tokenizer(ModelSpec(source=str(model_folder), chat_template=str(template)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False) == "12="


def test_logits_are_divided_by_the_temperature():
    logits, targets = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]), torch.tensor([1, 2])
    expected = torch.log_softmax(logits / 0.5, -1)[[0, 1], targets]
    torch.testing.assert_close(reduced(logits, targets, 0.5)[:, 0], expected)


@pytest.mark.parametrize("use", ["figure", "loss"])
def test_entropy_is_that_of_the_scaled_distribution(use):
    logits = torch.tensor([[2.0, 0.0, -1.0], [1.0, 1.0, 1.0]], requires_grad=True)
    expected = torch.distributions.Categorical(logits=logits / 2.0).entropy()
    found = reduced(logits, torch.tensor([0, 1]), 2.0, entropy=use)
    torch.testing.assert_close(found[:, 1], expected)
    (own,) = torch.autograd.grad(found[:, 1].sum(), logits)
    (other,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(own, other if use == "loss" else torch.zeros_like(other))


def test_half_precision_logits_are_computed_in_float32():
    found = reduced(torch.tensor([[30.0, 0.0]], dtype=torch.bfloat16), torch.tensor([1]), 1.0)[:, 0]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-30.0, abs=1e-5)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"top_p": 0.9}, "topP 0.9"),
        ({"top_k": 20}, "topK 20"),
    ],
)
def test_sampling_that_cannot_be_trained_on_is_refused(sampling, words):
    with pytest.raises(RefusedError, match=words):
        refuse_cut_sampling(SamplingSpec(**sampling))


def test_plain_sampling_is_accepted():
    refuse_cut_sampling(SamplingSpec(temperature=0.7))
