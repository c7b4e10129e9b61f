"""Score 1,000 samples by verl's reward loop: by the function, then by the reward manager."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from report import progress, report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

SAMPLES, WORDS = 1000, [str(number) for number in range(50)]
NO_SCORE = -7.0
SERVICE = {"url": os.environ["PLAUDIT_URL"], "token": os.environ["PLAUDIT_TOKEN"]}


def save_tokenizer(folder: str) -> PreTrainedTokenizerFast:
    """Save a tokenizer of whole words."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<eos>", "<pad>", *WORDS])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def configuration(way: str, folder: str) -> Any:
    """Return verl's own defaults with the lines of docs/trainers/verl.md."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "reward" / "reward.yaml")
    if way == "function":
        config.custom_reward_function.path = "pkg://plaudit_client.adapters.verl"
        config.custom_reward_function.reward_kwargs = {"on_failure": NO_SCORE, **SERVICE}
    else:
        config.reward_manager.source = "importlib"
        config.reward_manager.name = "PlauditRewardManager"
        config.reward_manager.module.path = "pkg://plaudit_client.adapters.verl_manager"
        config.reward_kwargs = {"on_failure": NO_SCORE, **SERVICE}
    model = {"path": folder, "tokenizer_path": folder}
    return OmegaConf.create({"reward": config, "actor_rollout_ref": {"model": model}})


def trajectory(row: int, tokenizer: PreTrainedTokenizerFast) -> DataProto:
    """Return one finished trajectory as the agent loop hands it over: padded on the right."""
    words = [WORDS[(row + i) % len(WORDS)] for i in range(1 + row % 5)]
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    padding = 8 - len(ids)
    columns = {
        "data_source": "numbers",
        "reward_model": {"ground_truth": row, "style": "rule"},
        "extra_info": {"split": "train", "need_tools_kwargs": None},
        "raw_prompt": [{"role": "user", "content": f"row {row}"}],
        "__num_turns__": 2,
    }
    return DataProto.from_dict(
        tensors={
            "prompts": torch.zeros((1, 4), dtype=torch.long),
            "responses": torch.tensor([ids + [2] * padding]),
            "attention_mask": torch.tensor([[1] * (4 + len(ids)) + [0] * padding]),
        },
        non_tensors={name: _column(value) for name, value in columns.items()},
    )


def _column(value: Any) -> np.ndarray:
    column = np.empty(1, dtype=object)
    column[0] = value
    return column


def response_of(row: int) -> str:
    """Return the text of a row's trajectory."""
    return " ".join(WORDS[(row + i) % len(WORDS)] for i in range(1 + row % 5))


async def main(way: str) -> None:
    """Score every trajectory by one reward worker of verl, all at once."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_tokenizer(folder)
        worker = RewardLoopWorker(configuration(way, folder))
        num_done = 0

        async def score(row: int) -> dict[str, Any]:
            nonlocal num_done
            result: dict[str, Any] = await worker.compute_score(trajectory(row, tokenizer))
            num_done += 1
            progress(num_done)
            return result

        results = await asyncio.gather(*(score(row) for row in range(SAMPLES)))
    columns = {tuple(result["reward_extra_info"]) for result in results}
    scored = [result["reward_extra_info"]["scored"] for result in results]
    assert all((result["reward_score"] == NO_SCORE) == (not ok) for result, ok in zip(results, scored, strict=True))
    report(
        (
            (response_of(row), row, result["reward_score"] if ok else None)
            for row, (result, ok) in enumerate(zip(results, scored, strict=True))
        ),
        kinds_of_columns=len(columns),
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
