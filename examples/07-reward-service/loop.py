"""A training loop of any kind, reduced to what it has to do with rewards: submit, go on, take scores.

Run ``plaudit run job.yaml`` first, then ``python loop.py --run NAME`` with the name that it printed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from plaudit_workers.client import SyncRewardClient

SAMPLES_PER_PROMPT = 4


def responses(question: tuple[int, int], draw: random.Random) -> list[str]:
    """What a policy would generate: right now and then."""
    return [f"{sum(question)} it is: #### {sum(question) + draw.choice([0, 0, 1])}" for _ in range(SAMPLES_PER_PROMPT)]


def train(client: SyncRewardClient, steps: int) -> list[float]:
    """The loop; returns the mean reward of each step."""
    draw = random.Random(0)
    means = []
    for step in range(steps):
        scores: dict[str, list[float | None]] = {}
        for prompt in range(8):
            question = (draw.randint(1, 9), draw.randint(1, 9))
            samples = [
                {
                    "data_source": "openai/gsm8k",
                    "prompt": f"{question[0]} + {question[1]} = ?",
                    "response": response,
                    "ground_truth": str(sum(question)),
                }
                for response in responses(question, draw)
            ]
            group = client.submit_group(samples, id=f"step-{step}-prompt-{prompt}")
            scores[group] = [None] * len(samples)
        for result in client.results():  # generation of the next step could go on meanwhile
            scores[result.id][result.index] = result.score  # None: it could not be scored, and must not count as 0
        scored = [score for of_group in scores.values() for score in of_group if score is not None]
        means.append(sum(scored) / len(scored))
        print(f"step {step}: {len(scored)} scored, mean reward {means[-1]:.3f}")
    return means


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True, help="id of the run that serves")
    parser.add_argument("--runs-folder", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    service = json.loads((arguments.runs_folder / arguments.run / "service.json").read_text())
    login = {name: service[name] for name in ("username", "password")}
    with SyncRewardClient(service["url"], run=service["run"], wait_s=60, **login) as client:
        train(client, arguments.steps)
