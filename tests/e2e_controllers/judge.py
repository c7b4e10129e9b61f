"""A judge in a pod: takes the seconds that a response names, and counts how often it was asked about each sample."""

import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT = 8000
asked: Counter[str] = Counter()
lock = threading.Lock()


class Judge(BaseHTTPRequestHandler):
    """``POST`` scores ``<seconds> <sample>``; ``GET`` tells the counts."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seconds, sample = request["messages"][-1]["content"].split()
        with lock:
            asked[sample] += 1
        time.sleep(float(seconds))
        message = {"role": "assistant", "content": "score: 1"}
        self._answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    def do_GET(self) -> None:
        with lock:
            self._answer(dict(asked))

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", PORT), Judge).serve_forever()
