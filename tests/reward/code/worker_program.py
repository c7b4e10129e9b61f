"""A reward worker for the sandbox's tests: scores programs that it reads from standard input, one JSON object a line.

    python worker_program.py ROOT|UNPRIVILEGED|WITHOUT_LANDLOCK

It is told to be unprivileged after it was started as such a user: it then gives up what it could still regain, and
refuses itself new namespaces, as a restricted container does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import platform
import struct
import sys
from typing import Any

import msgspec

from plaudit_job.rules.arguments import CodeOptions
from plaudit_reward.code.scorer import CodeScorer
from plaudit_reward.scorer import Attempt
from plaudit_sandbox.confinement import install
from plaudit_wire.errors import ScoringError
from plaudit_wire.records import Sample

UNSHARE = {"x86_64": 272, "aarch64": 97}[platform.machine()]
LANDLOCK_CREATE_RULESET = 444

in_memory = "-".join(["memory", "of", "the", "worker"])


def refuse_calls(refused: dict[int, int]) -> None:
    """Makes these system calls fail, as the runtime of a container does."""
    instructions = [(0x20, 0, 0, 0)]
    for number, error in refused.items():
        instructions += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
    instructions.append((0x06, 0, 0, 0x7FFF0000))
    install(b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions))


async def main(state: str) -> None:
    if state != "ROOT":
        assert os.geteuid() != 0
        missing = {LANDLOCK_CREATE_RULESET: errno.ENOSYS} if state == "WITHOUT_LANDLOCK" else {}
        refuse_calls({UNSHARE: errno.EPERM, **missing})
    print(json.dumps({"pid": os.getpid(), "uid": os.geteuid(), "address": id(in_memory)}), flush=True)
    scorers: dict[str, CodeScorer] = {}
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line), scorers)), flush=True)
    for scorer in scorers.values():
        await scorer.close()


async def answer(asked: dict[str, Any], scorers: dict[str, CodeScorer]) -> dict[str, Any]:
    key = json.dumps(asked["options"])
    sample = Sample("t-0-1.0", 0, "codecontests", "", asked["response"], ground_truth=asked["ground_truth"])
    attempt = Attempt(asked.get("limit_s", 60.0))
    try:
        if key not in scorers:
            scorer = CodeScorer("code", CodeOptions.read(asked["options"]), processes=1)
            await scorer.open()
            scorers[key] = scorer
        score = await scorers[key].score(sample, attempt)
    except ScoringError as error:
        return {"error": type(error).__name__, "reason": str(error)}
    return {**msgspec.to_builtins(score), "attempt": dataclasses.asdict(attempt)}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
