"""A trainer of a simulated run as a process of its own, to be killed: ``trainer_program.py <settings as JSON>``."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace


async def main() -> None:
    spec = importlib.util.spec_from_file_location("simulated_run", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    simulated_run = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = simulated_run
    spec.loader.exec_module(simulated_run)
    settings = json.loads(sys.argv[1])
    server = SimpleNamespace(url=settings["url"], password=settings["password"])
    simulation = simulated_run.Simulation(server, settings["run"], Path(settings["folder"]))
    simulation.update_s = lambda groups: settings["update_s"]
    done, _ = await simulation.train(simulated_run.make_plan(**settings["plan"]))
    raise SystemExit(0 if done else 5)


asyncio.run(main())
