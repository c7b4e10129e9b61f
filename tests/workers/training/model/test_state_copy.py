"""Commands between ranks: plain data that arrives as it was sent; anything else is refused, never run."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import numpy as np
import pytest

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.state_copy import CommandError, decode_command, encode_command
from plaudit_workers.weights.index import StateProgress


class Malicious:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('unpickled')",)


def test_a_batch_arrives_as_it_was_sent(make_groups: Any) -> None:
    batch = make_batch(make_groups([[0.0, 1.0], [0.5, None]]), "grpo", 0.9)
    name, received = decode_command(encode_command("update", batch))
    assert name == "update"
    assert (received.temperature, received.statistics) == (batch.temperature, batch.statistics)
    assert len(received.sequences) == len(batch.sequences) == 3
    for mine, theirs in zip(batch.sequences, received.sequences, strict=True):
        for field in ("prompt_ids", "response_ids", "behaviour_logprobs", "loss_mask"):
            sent, arrived = getattr(mine, field), getattr(theirs, field)
            assert sent.dtype == arrived.dtype
            assert np.array_equal(sent, arrived)
        assert (mine.group, mine.index, mine.advantage) == (theirs.group, theirs.index, theirs.advantage)
        assert mine.version_spans == theirs.version_spans


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("hold_proximal", PolicyVersion(2, 7)),
        ("restore", StateProgress(b"\x01\x02", 3, {"lm_head.weight": 3})),
        ("close", None),
    ],
)
def test_other_commands_arrive_as_they_were_sent(name: str, argument: Any) -> None:
    assert decode_command(encode_command(name, argument)) == (name, argument)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Malicious()),
        msgspec.msgpack.encode(["__class__", None]),
        msgspec.msgpack.encode(["update", {"sequences": "all"}]),
        b"",
    ],
    ids=["pickle", "a method that is no command", "an argument of another type", "nothing"],
)
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(CommandError, match="no command"):
        decode_command(content)
