"""A trainer of a simulated run as a process, to be killed: ``trainer_program.py <settings as JSON>``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from types import SimpleNamespace

from simulated_run import Simulation, make_plan


async def main() -> None:
    settings = json.loads(sys.argv[1])
    server = SimpleNamespace(url=settings["url"], password=settings["password"])
    simulation = Simulation(server, settings["run"], Path(settings["folder"]))
    simulation.update_s = lambda groups: settings["update_s"]
    done, _ = await simulation.train(make_plan(**settings["plan"]))
    raise SystemExit(0 if done else 5)


asyncio.run(main())
