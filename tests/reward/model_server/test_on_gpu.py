"""A reward model on a GPU: the logits of a CPU, packed by the flash kernel, and memory that it gives back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from plaudit_model_server.batcher import ModelSettings
from plaudit_model_server.model import Classifier
from plaudit_reward.attention import VARLEN_ATTENTION

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """4 layers x 512 with heads of 64, one label, weights large enough that texts differ."""
    folder = tmp_path_factory.mktemp("classifier")
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.05,
    )
    torch.manual_seed(2)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", unk_token="0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sequences() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(1, 64, int(length)).tolist() for length in random.integers(2, 900, 40)]


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_logits_are_those_of_a_cpu(folder, sequences, dtype, apart):
    on_gpu = Classifier(ModelSettings(str(folder), dtype=dtype))
    on_cpu = Classifier(ModelSettings(str(folder), dtype="float32", device="cpu"))
    assert on_gpu.packs
    assert (on_gpu._model.config._attn_implementation == VARLEN_ATTENTION) == (dtype == "bfloat16")
    found, expected = (np.array(each.logits(sequences)) for each in (on_gpu, on_cpu))
    assert expected.std() > 3 * apart
    np.testing.assert_allclose(found, expected, atol=apart)


def test_a_model_that_sleeps_gives_its_memory_back(folder, sequences):
    model = Classifier(ModelSettings(str(folder), dtype="bfloat16"))
    before, held = model.logits(sequences), torch.cuda.memory_reserved()
    model.occupy(False)
    assert torch.cuda.memory_allocated() < 64 << 20
    assert torch.cuda.memory_reserved() < held
    model.occupy(True)
    np.testing.assert_allclose(model.logits(sequences), before, atol=1e-6)
