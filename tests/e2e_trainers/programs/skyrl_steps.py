"""Step 200 environments of SkyRL-Gym, some at a time, as SkyRL's generator does in threads."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import skyrl_gym
from report import progress, report

from plaudit_client import NoScoreError
from plaudit_client.adapters.skyrl import register

EPISODES = 200


def episode(row: int) -> tuple[str, int, float | None]:
    """Run one episode as SkyRL does; return response, row and reward."""
    extras = {"reward_spec": {"ground_truth": row, "method": "rule"}, "data_source": "numbers", "max_turns": 1}
    env = skyrl_gym.make("plaudit", env_config={}, extras=extras)
    prompt, _ = env.init([{"role": "user", "content": f"row {row}"}])
    assert prompt[0]["content"] == f"row {row}"
    action = f"answer {row}"
    try:
        output = env.step(action)
    except NoScoreError:
        return action, row, None
    finally:
        progress(row)
    assert output["done"]
    assert output["metadata"] == {"outcome": "scored", "scored": True}
    return action, row, output["reward"]


if __name__ == "__main__":
    register(url=os.environ.pop("PLAUDIT_URL"), token=os.environ.pop("PLAUDIT_TOKEN"))
    with ThreadPoolExecutor(32) as pool:
        report(list(pool.map(episode, range(EPISODES))))
