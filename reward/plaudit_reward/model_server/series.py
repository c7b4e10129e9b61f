"""Define the server's Prometheus series, separate for queue, batches and inference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class ModelServerSeries:
    """Hold the series of ``/metrics``."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        name = "plaudit_model_server_{}".format
        self._queue = Gauge(name("queue_sequences"), "Sequences that wait", registry=own)
        self._wait = Histogram(
            name("queue_wait_seconds"), "From a sequence's arrival to its pass", registry=own, buckets=_SECONDS
        )
        self._sequences = Histogram(
            name("batch_sequences"), "Sequences of a forward pass", registry=own, buckets=_SEQUENCES
        )
        self._tokens = Histogram(
            name("batch_tokens"), "Tokens of a forward pass without padding", registry=own, buckets=_TOKENS
        )
        self._padding = Counter(name("padding_tokens"), "Tokens computed as padding", registry=own)
        self._inference = Histogram(name("inference_seconds"), "A forward pass", registry=own, buckets=_SECONDS)
        self._requests = Counter(name("requests"), "Requests to /classify by HTTP status", ["code"], registry=own)

    def count_queue(self, sequences: Callable[[], int]) -> None:
        """Call ``sequences`` for the number of waiting sequences at each scrape."""
        self._queue.set_function(sequences)

    def computed(self, lengths: Sequence[int], padding: int, waits_s: Sequence[float], began_s: float) -> None:
        """Record a finished forward pass that began at ``began_s`` of ``time.perf_counter``."""
        self._inference.observe(time.perf_counter() - began_s)
        for wait_s in waits_s:
            self._wait.observe(wait_s)
        self._sequences.observe(len(lengths))
        self._tokens.observe(sum(lengths))
        self._padding.inc(padding)

    def answered(self, code: int) -> None:
        """Record a response."""
        self._requests.labels(str(code)).inc()
