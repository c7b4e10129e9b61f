"""Prompts of a measured difficulty: which are kept, and that their order is that of every start."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from plaudit_job.spec.rollout import PassRateSpec, TrainDataSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.tokenizer import ChatTemplate
from plaudit_workers.training.data import PromptData

RATES = [0.0, 0.05, 0.5, 0.95, 1.0, 1]


@pytest.fixture
def template(model_folder):
    return ChatTemplate(AutoTokenizer.from_pretrained(model_folder))


@pytest.fixture
def write(tmp_path):
    def write(infos):
        path = tmp_path / "train.jsonl"
        rows = [
            {"data_source": "a", "prompt": f"{n}=", "reward_model": {"ground_truth": str(n)}, "extra_info": info}
            for n, info in enumerate(infos)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_rows_outside_the_bounds_are_left_out_and_the_order_is_the_same_at_every_start(write, template):
    path = write([{"pass_rate": rate} for rate in RATES])
    section = TrainDataSpec(path=path, pass_rate=PassRateSpec(min=0.05, max=0.95))
    starts = [PromptData.load(section, template, seed=3) for _ in range(2)]
    orders = [[data.prompt_at(position).row for position in range(6)] for data in starts]
    assert orders[0] == orders[1]
    assert sorted(orders[0][:3]) == sorted(orders[0][3:]) == [1, 2, 3]
    assert starts[0].num_filtered == 3


@pytest.mark.parametrize("value", [None, "0.5", 1.5, -0.1, True])
def test_a_row_without_a_pass_rate_is_refused_by_number(write, template, value):
    path = write([{"solved": 0.5}, {"solved": value} if value is not None else {}])
    section = TrainDataSpec(path=path, pass_rate=PassRateSpec(field="solved"))
    with pytest.raises(RefusedError, match=r"row 2: extra_info\['solved'\] is .*data.train.passRate requires"):
        PromptData.load(section, template, seed=0)


def test_bounds_without_any_prompt_are_refused(write, template):
    path = write([{"pass_rate": rate} for rate in RATES])
    section = TrainDataSpec(path=path, pass_rate=PassRateSpec(min=0.6, max=0.7))
    with pytest.raises(RefusedError, match=r"widen data\.train\.passRate"):
        PromptData.load(section, template, seed=0)
    with pytest.raises(ValidationError, match=r"min 0\.8 is above max 0\.2"):
        PassRateSpec(min=0.8, max=0.2)
