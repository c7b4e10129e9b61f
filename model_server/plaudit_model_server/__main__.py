"""Serve one reward model behind ``/classify``: ``python -m plaudit_model_server``.

Exit codes: 0 stopped (SIGTERM, SIGINT) after a drain · 1 crashed, may be started again · 2 refused, with one message.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvloop

from plaudit_model_server.batcher import BatchLimits, Forward, ModelSettings, Occupy
from plaudit_model_server.front_process import spare_collector, tune, with_front
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.logs import configure_logs

if TYPE_CHECKING:
    from plaudit_model_server.model import Classifier

_REFUSED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the arguments, load the model, serve it."""
    given = _parser().parse_args(arguments)
    configure_logs(None, worker=given.served_model_name or given.model)
    tune()
    settings = ModelSettings(
        given.model, given.revision, given.dtype, given.device, given.max_model_len, given.trust_remote_code
    )
    # Here, not above: --help and a wrong argument need no torch.
    from plaudit_model_server.model import Classifier

    try:
        classifier = Classifier(settings)
    except (ConfigurationError, OSError) as error:
        return _refuse(error)
    spare_collector()

    def front(forward: Forward, occupy: Occupy, computing: int | None) -> int:
        try:
            uvloop.run(_serve(given, classifier, forward, occupy, computing))
        except OSError as error:
            return _refuse(error)
        return 0

    return with_front(front, classifier.logits, classifier.occupy)


def _refuse(error: Exception) -> int:
    sys.stderr.write(f"{error}\n")
    return _REFUSED


async def _serve(
    given: argparse.Namespace, classifier: Classifier, forward: Forward, occupy: Occupy, computing: int | None
) -> None:
    from plaudit_model_server.api import Access, Address, serve
    from plaudit_reward.endpoint.served import TOKEN_VARIABLE
    from plaudit_reward.endpoint.vllm_sleep import SLEEP_TOKEN_VARIABLE

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # Not earlier: while a model is loaded there is nothing to drain, and a signal ends the process at once.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if computing is not None:

        def gone() -> None:
            loop.remove_reader(computing)
            stop.set()

        loop.add_reader(computing, gone)
    limits = BatchLimits(given.max_batch_tokens, given.max_padding, given.max_queue)
    address = Address(given.host, given.port, given.served_model_name or given.model)
    token, sleep_token = (os.environ.get(name, "").strip() for name in (TOKEN_VARIABLE, SLEEP_TOKEN_VARIABLE))
    access = Access(token, given.max_body_bytes, sleep_token)
    await serve(classifier, address, limits, stop, forward, access, occupy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m plaudit_model_server",
        description="Serves a sequence classifier of transformers behind vLLM's /classify, with dynamic batching. "
        "PLAUDIT_MODEL_SERVER_TOKEN: the bearer token that requests must carry (default: none).",
    )
    parser.add_argument("--model", required=True, help="hub id or folder")
    parser.add_argument("--served-model-name", default="", help="its name in requests (default: --model)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit on the hub")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="", help="cpu, cuda, cuda:1 (default: a GPU where there is one)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python that comes with the model")
    parser.add_argument("--max-model-len", type=_positive, help="tokens of one input; longer ones are refused")
    parser.add_argument("--max-batch-tokens", type=_positive, default=16_384, help="of one forward pass, with padding")
    parser.add_argument(
        "--max-padding",
        type=_positive,
        default=64,
        help="tokens of padding that one more input may bring to a padded pass",
    )
    parser.add_argument("--max-queue", type=_positive, default=4096, help="inputs that wait; beyond it: 429")
    parser.add_argument("--max-body-bytes", type=_positive, default=4 << 20, help="of a request; beyond it: 413")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= float(text) < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number from 1 to {(1 << 31) - 1}")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
