"""Evaluate a verifiers environment with ``vf-eval``; its only reward is the service's, plugged in by name."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from report import progress, report

CONFIG = """
model = "numbers"
push = false
rich = "None"
[client]
base_url = "{url}"
api_key_var = "NO_KEY"
[run]
name = "numbers"
[env.taskset]
id = "numbers_taskset"
[env.agent.harness]
id = "numbers_harness"
[env.agent.runtime]
type = "subprocess"
[env.taskset.task.rewards.plaudit]
fn = "plaudit_client.adapters.verifiers:score"
"""


class Model(BaseHTTPRequestHandler):
    """An OpenAI endpoint that answers with the prompt."""

    num_answers = 0

    def do_POST(self) -> None:
        """Answer a chat completion."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": f"answer {body['messages'][-1]['content']}"}
        usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "numbers", "choices": [choice]}
        content = json.dumps({**answer, "usage": usage}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        Model.num_answers += 1
        progress(Model.num_answers)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    """Accepts all connections of an evaluation at once; the default refuses more than five that wait."""

    request_queue_size = 256


def main() -> None:
    """Run the evaluation, and report its traces."""
    from verifiers.v1.cli.eval.main import main as evaluate

    model = Server(("127.0.0.1", 0), Model)
    threading.Thread(target=model.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        config = Path(folder, "eval.toml")
        config.write_text(CONFIG.format(url=f"http://127.0.0.1:{model.server_port}/v1"))
        try:
            evaluate(["@", str(config), "--output-dir", folder])
        except SystemExit as end:  # with failed traces the command ends with another code
            print(f"vf-eval ended with {end.code}")
        (file,) = Path(folder).rglob("traces.jsonl")
        report(map(_trace, _traces(file)))


def _traces(file: Path) -> list[dict]:
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    return [trace for episode in episodes for trace in episode["traces"]]


def _trace(trace: dict) -> tuple[str, int, float | None]:
    """Return response, row and reward; a trace that failed has no reward."""
    row = trace["task"]["data"]["ground_truth"]
    reward = trace["rewards"].get("plaudit")
    assert (reward is None) == bool(trace["errors"]), trace["errors"]
    return f"answer row {row}", row, None if reward is None else reward["score"]


if __name__ == "__main__":
    main()
