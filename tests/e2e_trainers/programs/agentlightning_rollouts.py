"""Complete 100 rollouts of agent-lightning's own server and manager, whose hook asks the service for rewards."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import httpx
import uvicorn
from agentlightning.hooks import load_hooks
from agentlightning.server.app import create_app
from agentlightning.verl.agl_rollout_manager import AglRolloutManager
from report import progress, report

ROWS = 100
INSTEAD = -1.0
"""Of samples without a score, which are told by it."""


def server() -> str:
    """Start agent-lightning's server in a thread; return its URL."""
    temperatures = {"train": {"temperature": 1}, "val": {"temperature": 0}}
    config = {"key": "", "default_proxy": {"model_name": "numbers", **temperatures}}
    running = uvicorn.Server(uvicorn.Config(create_app(config), port=0, log_level="warning"))
    threading.Thread(target=running.run, daemon=True).start()
    while not running.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"


def play(url: str) -> None:
    """Be the agents: answer each queued rollout and report that it succeeded."""
    with httpx.Client(base_url=url) as client:
        done = 0
        while done < ROWS:
            for rollout in client.get("/api/rollouts", params={"state_in": "queuing", "limit": 10}).json():
                place, row = f"/api/rollouts/{rollout['rollout_id']}", rollout["input"]["ground_truth"]
                client.patch(place, json={"status": {"state": "running", "last_attempt_id": "a"}})
                message = {"role": "assistant", "content": f"answer {row}"}
                data = {
                    "request": {"messages": [{"role": "user", "content": f"row {row}"}]},
                    "response": {"prompt_token_ids": [1], "choices": [{"message": message, "token_ids": [2]}]},
                }
                client.post(f"{place}/attempt/a/events", json={"event_type": "model_request", "data": data})
                client.patch(place, json={"status": {"state": "succeeded"}})
                done += 1
                progress(done)


def main() -> None:
    """Run all rollouts."""
    os.environ["PLAUDIT_ON_FAILURE"] = str(INSTEAD)
    hooks = Path(tempfile.mkdtemp()) / "hooks.py"
    hooks.write_text("from plaudit_client.adapters.agentlightning import RewardHooks\n")
    url = server()
    manager = AglRolloutManager(
        agl_base_url=url, agl_key="", model="numbers", step=1, poll_interval_seconds=0.05, hooks=load_hooks(str(hooks))
    )
    threading.Thread(target=play, args=(url,), daemon=True).start()
    data = {"prompt": [f"row {row}" for row in range(ROWS)], "ground_truth": [*range(ROWS)]}
    completed = manager.enqueue_and_wait_until_completed(data, is_train=True)
    rewards = [(int(each.input["ground_truth"]), each.final_reward) for each in completed]
    report((f"answer {row}", row, None if reward == INSTEAD else reward) for row, reward in rewards)


if __name__ == "__main__":
    main()
