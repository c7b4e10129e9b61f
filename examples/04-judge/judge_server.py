"""Stands in for a judge: answers chat completions as a model would, by comparing the digits in the prompt.

``python judge_server.py --port 8377``. ``--latency`` is how long it thinks on average (seconds); ``--busy`` is the
share of requests that it refuses with 429, as an endpoint above its own limits does; ``--key`` is the key it wants.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def judge(prompt: str) -> str:
    """The answer to a prompt made by judge.j2."""
    wanted = re.search(r"Wanted: (.*)", prompt)
    written = re.search(r"(?s)<response-(?P<fence>\w+)>\n(?P<text>.*)\n</response-(?P=fence)>", prompt)
    if wanted is None or written is None:
        return "I see nothing to judge."
    right = sum(a == b for a, b in zip(wanted[1], written["text"], strict=False))
    verdict = {"reason": f"{right} of {len(wanted[1])} digits", "score": right / len(wanted[1])}
    return f"Let me see. {json.dumps(verdict)}"


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    latency_s = 0.1
    busy_share = 0.0
    key = ""

    def do_POST(self) -> None:
        """``/v1/chat/completions``."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            return self.answer(404, {"error": {"message": f"there is no {self.path}"}})
        if self.key and self.headers["Authorization"] != f"Bearer {self.key}":
            return self.answer(401, {"error": {"message": "no such key"}})
        if random.random() < self.busy_share:
            return self.answer(429, {"error": {"message": "too many requests"}})
        time.sleep(random.uniform(0.5, 1.5) * self.latency_s)
        prompt = request["messages"][-1]["content"]
        content = judge(prompt)
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(content) // 4}
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        body = {"object": "chat.completion", "model": request["model"], "choices": [choice], "usage": usage}
        return self.answer(200, body)

    def answer(self, status: int, body: dict[str, object]) -> None:
        """Sends JSON."""
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the base class's name
        """Says nothing of single requests."""


class Server(ThreadingHTTPServer):
    """One thread a connection."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is no news."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def main() -> None:
    """Serves until it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8377, help="default: 8377")
    parser.add_argument("--latency", type=float, default=0.1, help="seconds an answer takes on average (default: 0.1)")
    parser.add_argument("--busy", type=float, default=0.0, help="share of requests refused with 429 (default: 0)")
    parser.add_argument("--key", default="", help="the key that requests must carry (default: none)")
    arguments = parser.parse_args()
    Handler.latency_s, Handler.busy_share, Handler.key = arguments.latency, arguments.busy, arguments.key
    server = Server(("127.0.0.1", arguments.port), Handler)
    print(f"judging at http://127.0.0.1:{arguments.port}/v1", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
