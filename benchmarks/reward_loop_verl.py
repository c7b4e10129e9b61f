"""The cases of ``reward_loop`` through verl's reward loop, in an interpreter that has verl (seen with 0.9.1).

The path is verl's own per-sample one, as its agent loop takes it: reward loop workers as Ray actors, each sample handed
to one of them at random the moment it is there. A batch in which a call raises ends with that exception (the agent loop
gathers them); a batch that has not ended after ``GIVE_UP_S`` is given up.

Called by ``reward_loop.py --verl PYTHON`` as ``PYTHON -c "import reward_loop_verl; reward_loop_verl.main()" …``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl
from omegaconf import OmegaConf
from reward_loop_cases import GIVE_UP_S, SEED, Case, Row, cases, rows
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker


def main() -> None:
    """Runs all cases and writes a JSON list of results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    ray.init(num_cpus=arguments.workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = save_tokenizer(Path(folder), cases(arguments.quick))
        workers = Workers(arguments.workers, folder)
        results = [run(case, workers, tokenizer) for case in cases(arguments.quick)]
    arguments.out.write_text(json.dumps({"version": verl.__version__, "results": results}))
    ray.shutdown()


def save_tokenizer(folder: Path, all_cases: list[Case]) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: verl decodes tokens before it scores."""
    words = sorted({word for case in all_cases for row in rows(case) for word in row.response.split()})
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<eos>", "<pad>", *words])}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    return tokenizer


class Workers:
    """Reward workers of verl by reward function; those that a hung function holds are replaced."""

    def __init__(self, count: int, folder: str) -> None:
        self._count = count
        self._folder = folder
        self._by_function: dict[str, list[Any]] = {}

    def of(self, case: Case) -> list[Any]:
        """Workers that have loaded the case's function."""
        if case.function not in self._by_function:
            actor = ray.remote(RewardLoopWorker)
            workers = [actor.remote(configuration(case, self._folder)) for _ in range(self._count)]
            ray.get([worker.__ray_ready__.remote() for worker in workers])
            self._by_function[case.function] = workers
        return self._by_function[case.function]

    def end(self, case: Case) -> None:
        """Kills the case's workers."""
        for worker in self._by_function.pop(case.function):
            ray.kill(worker)


def run(case: Case, workers: Workers, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """One case, everything warm."""
    batch = [sample(row, tokenizer) for row in rows(case)]
    actors = workers.of(case)
    warm = [item for item, row in zip(batch, rows(case), strict=True) if not row.guilty and not case.longest_s][:64]
    ray.get([actors[i % len(actors)].compute_score.remote(item) for i, item in enumerate(warm)])
    choose = random.Random(SEED)
    cpu_s, began_s = cpu_of_ray(), time.perf_counter()
    answers = [choose.choice(actors).compute_score.remote(item) for item in batch]
    done, stuck = ray.wait(answers, num_returns=len(answers), timeout=GIVE_UP_S + 60 * case.longest_s)
    seconds = time.perf_counter() - began_s
    cpu_s = cpu_of_ray() - cpu_s
    result = judge(case, answers, set(done), seconds, cpu_s)
    if stuck:
        workers.end(case)
    return {**result, "stuck": len(stuck)}


def judge(case: Case, answers: list[Any], done: set[Any], seconds: float, cpu_s: float) -> dict[str, Any]:
    """Return the end of the batch, and the outcomes of samples whose function did not fail."""
    scores: list[float | None] = []
    raised = ""
    for answer in answers:
        try:
            scores.append(float(ray.get(answer)["reward_score"]) if answer in done else None)
        except Exception as error:
            raised = raised or type(error).__name__
            scores.append(None)
    innocent = [score for score, row in zip(scores, rows(case), strict=True) if not row.guilty]
    ended = "no" if len(done) < len(answers) else f"raises {raised}" if raised else "yes"
    # A gathered batch that raises gives nobody a score.
    hurt = len(innocent) if ended.startswith("raises") else sum(score != 1.0 for score in innocent)
    return {"case": case.name, "seconds": seconds, "cpu_s": cpu_s, "ended": ended, "innocents_hurt": hurt}


def configuration(case: Case, folder: str) -> Any:
    """The default of ``reward`` that verl ships, with the case's function."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer" / "config" / "reward" / "reward.yaml")
    if case.function:
        config.custom_reward_function.path = str(Path(__file__).with_name("reward_loop_functions.py"))
        config.custom_reward_function.name = case.function
    model = {"path": folder, "tokenizer_path": folder}
    return OmegaConf.create({"reward": config, "actor_rollout_ref": {"model": model}})


def sample(row: Row, tokenizer: PreTrainedTokenizerFast) -> DataProto:
    """One sample as the agent loop hands it over."""
    response = torch.tensor([tokenizer.encode(row.response, add_special_tokens=False)])
    prompt = torch.zeros((1, 8), dtype=torch.long)
    columns = {
        "data_source": "openai/gsm8k",
        "reward_model": {"ground_truth": row.ground_truth},
        "extra_info": dict(row.extra_info),
    }
    return DataProto.from_dict(
        tensors={
            "prompts": prompt,
            "responses": response,
            "attention_mask": torch.ones((1, prompt.shape[1] + response.shape[1]), dtype=torch.long),
        },
        non_tensors={name: np.array([value], dtype=object) for name, value in columns.items()},
    )


def cpu_of_ray() -> float:
    """CPU seconds of this process and of all that it started."""
    ticks, parents = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(stat.parent.name)
        parents[pid], ticks[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def below(pid: int) -> bool:
        while pid not in (0, 1, os.getpid()):
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    return sum(ticks[pid] for pid in ticks if below(pid)) / os.sysconf("SC_CLK_TCK")
