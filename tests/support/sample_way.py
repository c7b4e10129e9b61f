"""Count the product files that execute for a sample, a group and a step: ``python tests/support/sample_way.py``.

A run of ``simulated_run`` (real conductor, scoring and Redis; the policy and the engine are scripted) is watched from
its third step on. A file is of a sample if one of its functions is called at least once for each sample; of a group if
at least once for each group; else it is of the step, the polls, or the end of the run. Files that only hold data do not
execute and are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), *(str(each.parent) for each in sorted(ROOT.glob("*/pyproject.toml")))]

from plaudit_workers.launch.redis import RedisServer  # noqa: E402
from product_modules import distributions  # noqa: E402
from simulated_run import SAMPLES, Simulation, make_plan  # noqa: E402

STEPS, PROMPTS, UNWATCHED = 6, 8, 2
GROUPS = (STEPS - UNWATCHED) * PROMPTS
WATCHED_SHARE = 0.9
"""Of the calls: a few samples of the third step may be under way when the watch begins."""


class Watch:
    """Calls of functions in product files, while it is on."""

    def __init__(self) -> None:
        self.on = False
        self.calls: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._shown: dict[str, str] = {}
        self._folders = tuple(f"{each}/" for each in distributions())

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.on:
            return
        name = frame.f_code.co_filename
        shown = self._shown.get(name)
        if shown is None:
            own = name.startswith(self._folders)
            shown = self._shown[name] = str(Path(name).relative_to(ROOT)) if own else ""
        if shown:
            self.calls[shown][frame.f_code.co_qualname] += 1


async def run_watched(watch: Watch, server: RedisServer, folder: Path) -> None:
    simulation = Simulation(server, "sample-way", folder)
    plan = make_plan(steps=STEPS, prompts_per_step=PROMPTS, checkpoint_every_steps=STEPS)
    async with simulation.workers():
        training = asyncio.create_task(simulation.train(plan))
        await simulation.until_steps(UNWATCHED)
        watch.on = True
        done, _ = await training
        watch.on = False
    assert done


def parted(watch: Watch) -> dict[str, list[str]]:
    """The files, by what they execute for."""
    parts: dict[str, list[str]] = {"a sample": [], "a group": [], "a step, polls and the end": []}
    for file, functions in sorted(watch.calls.items()):
        most = max(functions.values())
        by_sample, by_group = most >= GROUPS * SAMPLES * WATCHED_SHARE, most >= GROUPS * WATCHED_SHARE
        parts["a sample" if by_sample else "a group" if by_group else "a step, polls and the end"].append(file)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--files", action="store_true", help="name the files, each with its most called function")
    arguments = parser.parse_args()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder, "redis")) as server:
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            asyncio.run(run_watched(watch, server, Path(folder, "run")))
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    print(f"{len(watch.calls)} product files execute")
    for name, files in parted(watch).items():
        print(f"{len(files):4} for {name}")
        for file in files if arguments.files else ():
            function, calls = max(watch.calls[file].items(), key=lambda each: each[1])
            print(f"       {file}  {function} {calls}")


if __name__ == "__main__":
    main()
