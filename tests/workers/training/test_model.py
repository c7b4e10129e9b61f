"""Models that cannot be loaded or cannot be trained packed are refused in plain words."""

from __future__ import annotations

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from plaudit_workers.job.spec.model import ModelSpec
from plaudit_workers.process import RefusedError
from plaudit_workers.tokenizer import load_tokenizer
from plaudit_workers.training.model.model import load_model


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


def test_a_chat_template_file_takes_the_place_of_the_tokenizers_own(model_folder, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages[0]['content'] }}=")
    tokenizer = load_tokenizer(ModelSpec(source=str(model_folder), chat_template=str(template)))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False) == "12="
