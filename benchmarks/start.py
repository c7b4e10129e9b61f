"""Measure what a start takes: from the command to the first score of a service, and to the first step of the demo.

``plaudit run`` starts the processes of ``examples/07-reward-service`` and ``examples/01-copy-digits`` itself, and, in
turns with it, on a Ray that is started for the run, whose start and processes count too.

- *seconds*: from the start of the first process until a score came back over HTTP, or ``steps.jsonl`` has a line.
- *CPU-s*: user + system seconds of all processes until then.
- *PSS*: proportional set size (pages that processes share count once) of all processes then, and the private part.

Usage: ``python benchmarks/start.py [--json FILE] [--quick]`` (``--quick``: the service alone, once, without Ray)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transport import below, cpu_seconds

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ROUNDS = 3
WITHIN_S = 300.0
SAMPLE = {"response": "#### 4", "ground_truth": "4", "data_source": "openai/gsm8k"}
RAY = """
import sys, ray
from plaudit_workers.launch.ray_processes import connect_to_ray

connect_to_ray(None, num_cpus=8)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


def scored(run: Path) -> bool:
    """Return True if the service of this run returns a score."""
    try:
        service = json.loads((run / "service.json").read_text())
        headers = {"Authorization": f"Bearer {service['token']}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{service['url']}/v1/score", json.dumps(SAMPLE).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["outcome"] == "scored"
    except (OSError, ValueError):
        return False


def stepped(run: Path) -> bool:
    """Return True if a step of this run has closed."""
    steps = run / "steps.jsonl"
    return steps.exists() and steps.stat().st_size > 0


DONE = {"07-reward-service": scored, "01-copy-digits": stepped}


def memory_mb(root: int) -> tuple[float, float]:
    """Proportional and private memory of a process and all that descend from it."""
    whole, private = 0, 0
    for pid in below(root):
        with contextlib.suppress(OSError):
            sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE))
            whole += int(sizes.get("Pss", 0))
            private += int(sizes.get("Private_Clean", 0)) + int(sizes.get("Private_Dirty", 0))
    return whole / 1024, private / 1024


@contextlib.contextmanager
def ray_of_its_own(wanted: bool) -> Iterator[tuple[list[int], list[str]]]:
    """Start a Ray if it is wanted: its pid, and the arguments that name it."""
    if not wanted:
        yield [], []
        return
    with subprocess.Popen([sys.executable, "-c", RAY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ray:
        assert ray.stdout is not None
        yield [ray.pid], ["--address", ray.stdout.readline().strip()]
        assert ray.stdin is not None
        ray.stdin.close()


def start(example: Path, folder: Path, *, on_ray: bool) -> dict[str, float]:
    """Start an example; return what it took to its first score or step."""
    log = folder / "log"
    began = time.monotonic()
    with ray_of_its_own(on_ray) as (pids, arguments), log.open("wb") as output:
        command = [sys.executable, "-m", "plaudit_workers.cli", "run", str(example / "job.yaml")]
        command += ["--runs-folder", str(folder), "--run", "run", *arguments]
        # A Ray that plaudit run starts has a token, in a file of this user.
        environment = {**os.environ, **({"RAY_AUTH_MODE": "token"} if on_ray else {})}
        run = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
        pids.append(run.pid)
        while not DONE[example.name](folder / "run"):
            if run.poll() is not None or time.monotonic() - began > WITHIN_S:
                raise SystemExit(f"{example.name} did not start:\n{log.read_text()}")
            time.sleep(0.02)
        took = {"seconds": time.monotonic() - began, "cpu_s": sum(map(cpu_seconds, pids))}
        memory = [memory_mb(pid) for pid in pids]
        run.send_signal(signal.SIGINT)
        run.wait(120)
    return took | {"pss_mb": sum(whole for whole, _ in memory), "private_mb": sum(private for _, private in memory)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="the service alone, once, without Ray")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(EXAMPLES, Path(name) / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
        examples = Path(name) / "examples"
        if not arguments.quick:
            prepare = [sys.executable, str(examples / "01-copy-digits" / "prepare.py")]
            subprocess.run(prepare, check=True, stdout=subprocess.DEVNULL)
        for example in ("07-reward-service",) if arguments.quick else DONE:
            rounds: dict[bool, list[dict[str, float]]] = {False: []} if arguments.quick else {False: [], True: []}
            for number in range(1 if arguments.quick else ROUNDS):
                for on_ray, found in rounds.items():
                    folder = Path(name) / f"{example}-{number}-{on_ray}"
                    folder.mkdir()
                    found.append(start(examples / example, folder, on_ray=on_ray))
            for on_ray, found in rounds.items():
                row: dict[str, Any] = {"example": example, "on": "Ray" if on_ray else "this machine"}
                row |= {key: statistics.median(each[key] for each in found) for key in found[0]}
                rows.append(row)
                print(
                    f"{example} on {row['on']}: {row['seconds']:.1f} s, {row['cpu_s']:.1f} CPU-s, "
                    f"{row['pss_mb']:.0f} MB (private {row['private_mb']:.0f})",
                    flush=True,
                )
    if arguments.json:
        machine = {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
