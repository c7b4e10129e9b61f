"""A training loop of any kind, reduced to what it has to do with rewards: submit, go on, take scores.

Run ``plaudit run job.yaml`` first, then ``python loop.py --run NAME`` with the name that it printed.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from plaudit_client import SyncRewardClient

PROMPTS_PER_STEP, SAMPLES_PER_PROMPT = 8, 4


def responses(question: tuple[int, int], draw: random.Random) -> list[str]:
    """What a policy would generate: right now and then."""
    return [f"{sum(question)} it is: #### {sum(question) + draw.choice([0, 0, 1])}" for _ in range(SAMPLES_PER_PROMPT)]


def train(client: SyncRewardClient, steps: int) -> list[float]:
    """The loop; returns the mean reward of each step."""
    draw = random.Random(0)
    means = []
    for step in range(steps):
        samples = []
        for _ in range(PROMPTS_PER_STEP):
            question = (draw.randint(1, 9), draw.randint(1, 9))
            samples += [
                {
                    "data_source": "openai/gsm8k",
                    "prompt": f"{question[0]} + {question[1]} = ?",
                    "response": response,
                    "ground_truth": str(sum(question)),
                }
                for response in responses(question, draw)
            ]
        scores: list[float | None] = [None] * len(samples)
        for result in client.score_many(samples):  # in order of completion
            scores[result.index] = result.score  # None: it could not be scored, and must not count as 0
        scored = [score for score in scores if score is not None]
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
    with SyncRewardClient(service["url"], service["token"]) as client:
        train(client, arguments.steps)
