"""Measure the CPU time of reading stored samples: a page of the list, one sample, one prompt in all steps.

It writes a run of stored samples, 1,000 a step, with responses of 300 words, and asks the metrics service's API for
pages. Printed are the CPU seconds of the whole process (the service runs in it) for each request: the first time, and
the median of the next ones. ``pages`` is the number of requests until 50 samples are found or all are searched, since
one page reads at most 128 files; ``complete`` is the CPU time of all of them.

    python benchmarks/stored_samples.py [--quick] [--folder FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow
import pyarrow.parquet

from plaudit_metrics.service.api import RunApi
from plaudit_metrics.service.series.run import RunSeries
from plaudit_metrics.service.view import RunView
from plaudit_metrics.sources.steps import KeptSteps
from plaudit_workers.stored_samples import store_groups, write_samples

SAMPLES_PER_STEP = 1000
GROUP = 8
PROMPTS = 25_000
WORDS = 300
REPEATED = 5


def write_run(folder: Path, steps: int) -> None:
    """Write ``folder/samples`` unless it is complete already."""
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    schema = pyarrow.parquet.read_schema(store_groups(folder / "schema", 1, 1, [], {}))
    draw, numbers = random.Random(5), np.random.default_rng(5)
    words = [f"w{draw.randrange(10**6)}" for _ in range(20_000)]
    texts = [" ".join(draw.choices(words, k=WORDS)) for _ in range(SAMPLES_PER_STEP)]
    place = np.arange(SAMPLES_PER_STEP)
    for step in range(1, steps + 1):
        target = folder / "samples" / f"step-{step:06d}-i1.parquet"
        if target.exists():
            continue
        draw.shuffle(texts)
        score = numbers.random(SAMPLES_PER_STEP)
        poison = step % 250 == 1  # a rare outcome
        group = (step * SAMPLES_PER_STEP + place) // GROUP
        columns: dict[str, Any] = {
            "step": np.full(SAMPLES_PER_STEP, step),
            "group": [f"t-{each}-1.0" for each in group],
            "index": place % GROUP,
            "split": ["train"] * SAMPLES_PER_STEP,
            "data_source": ["gsm8k" if each % 2 else "math" for each in group],
            "prompt": [f"Prompt {each % PROMPTS}: {texts[0][:200]}" for each in group],
            "prompt_id": [f"{each % PROMPTS:016x}" for each in group],
            "response": texts,
            "ground_truth_json": ['"4"'] * SAMPLES_PER_STEP,
            "extra_info_json": ["{}"] * SAMPLES_PER_STEP,
            "outcome": ["poison" if poison and each == 0 else "scored" for each in place],
            "score": pyarrow.array(score, mask=(place == 0) & poison),
            "response_tokens": place + 100,
            "admitted_at": np.full(SAMPLES_PER_STEP, 1e9),
            "deliveries": np.full(SAMPLES_PER_STEP, 1),
            "end": ["trained"] * SAMPLES_PER_STEP,
            **dict.fromkeys(("limiter_s", "retry_s", "call_s"), np.full(SAMPLES_PER_STEP, 0.1)),
        }
        filled = {name: columns[name] if name in columns else [None] * SAMPLES_PER_STEP for name in schema.names}
        write_samples(pyarrow.table(filled, schema=schema), target)


async def measure(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Ask for each page several times; a new service for each kind, so that the first request knows nothing."""
    middle = f"{steps // 2}"
    prompt_id = f"{(steps * SAMPLES_PER_STEP) // GROUP % PROMPTS:016x}"
    group = f"t-{steps // 2 * SAMPLES_PER_STEP // GROUP + 3}-1.0"
    questions: dict[str, tuple[str, dict[str, str]]] = {
        "newest samples": ("samples", {}),
        "one step": ("samples", {"first_step": middle, "last_step": middle}),
        "one step, lowest scores": ("samples", {"first_step": middle, "last_step": middle, "order": "lowest"}),
        "score above 0.999": ("samples", {"lowest": "0.999"}),
        "one source, low scores": ("samples", {"data_source": "math", "highest": "0.01"}),
        "rare outcome": ("samples", {"outcome": "poison"}),
        "one prompt in all steps": ("samples", {"prompt_id": prompt_id}),
        "one group": ("samples", {"group": group, "first_step": middle, "last_step": middle}),
        "one sample": (f"samples/{middle}/{group}/3", {}),
    }
    return [await _measured(name, folder, path, query) for name, (path, query) in questions.items()]


async def _measured(name: str, folder: Path, path: str, query: dict[str, str]) -> dict[str, Any]:
    application = RunApi("bench", RunView(RunSeries(), KeptSteps()), lambda: "", run_folder=folder).application()
    transport = httpx.ASGITransport(application)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client:

        async def ask(**more: str) -> tuple[float, dict[str, Any]]:
            began = time.process_time()
            response = await client.get(f"/api/v1/{path}", params={**query, **more})
            response.raise_for_status()
            return time.process_time() - began, response.json()

        first_s, content = await ask()
        costs, found = [first_s], len(content.get("samples", [content]))
        while content.get("next") and found < 50:
            cost_s, content = await ask(start=content["next"])
            costs.append(cost_s)
            found += len(content["samples"])
        again_s = statistics.median([(await ask())[0] for _ in range(REPEATED)])
    return {
        "request": name,
        "found": found,
        "first_s": first_s,
        "again_s": again_s,
        "slowest_page_s": max(costs),
        "pages": len(costs),
        "complete_s": sum(costs),
    }


def main() -> int:
    """Write the run, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20,000 samples in place of 1,000,000")
    parser.add_argument("--folder", type=Path, help="keeps the samples for another run (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    steps = 20 if arguments.quick else 1000
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        began = time.process_time()
        write_run(folder, steps)
        size = sum(path.stat().st_size for path in (folder / "samples").iterdir())
        print(
            f"{steps * SAMPLES_PER_STEP:,} samples, {size / 1e6:.0f} MB, written in {time.process_time() - began:.0f} s"
        )
        rows = asyncio.run(measure(folder, steps))
    print(f"{'request':26} found  first s  again s  slowest page s  pages  complete s")
    for row in rows:
        print(
            f"{row['request']:26} {row['found']:5} {row['first_s']:8.3f} {row['again_s']:8.3f} "
            f"{row['slowest_page_s']:15.3f} {row['pages']:6} {row['complete_s']:11.3f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"samples": steps * SAMPLES_PER_STEP, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
