"""The benchmark of an update computes the same on all sides, as the trainer does, and needs no package of a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from train_case import LOSS, OPTIMIZER, Case
from train_sides import sides
from train_step import measured

from plaudit_job.spec.algorithm import LossSpec, OptimizerSpec
from plaudit_workers.commands.sizing import trainer_parts

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "train_step.py"
WITHOUT_PACKAGES = """
import os, runpy, sys
parts = ("wire", "metrics", "job", "sandbox", "reward", "workers")
sys.path[:] = [path for path in sys.path if os.path.basename(path) not in parts]
for name in ("accelerate", "msgspec", "peft", "pydantic", "redis"):
    sys.modules[name] = None  # an import of it fails
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def case(prompt=5):
    return Case("tiny", length=24, prompt=prompt, sequences=3, device=torch.device("cpu"))


@pytest.mark.parametrize("name", [name for name in sides() if name != "plaudit"])
def test_all_sides_of_the_benchmark_compute_the_same_update(name):
    found = []
    for side in (sides()["plaudit"], sides()[name]):
        model, loss = side(case())
        value = loss()
        value.backward()
        found.append((value.item(), {name: parameter.grad for name, parameter in model.named_parameters()}))
    assert abs(found[0][0] - found[1][0]) < 1e-5
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-6)


def test_parameters_are_float32_under_passes_in_bfloat16():
    rough = Case("tiny", 24, 5, 3, torch.device("cpu"), torch.bfloat16)
    for side in sides().values():
        model, loss = side(rough)
        loss().backward()
        assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("settings", "spec"), [(LOSS, LossSpec()), (OPTIMIZER, OptimizerSpec())])
def test_the_settings_are_the_defaults_of_a_job(settings, spec):
    assert {name: getattr(spec, name) for name in vars(settings)} == vars(settings)


def test_the_plan_of_the_benchmark_is_that_of_the_job(make_job):
    job = make_job(
        {
            "model": {"dtype": "float32"},
            "data": {"train": {"maxPromptLength": 5}},
            "rollout": {"sampling": {"maxTokens": 19}, "engine": {"maxModelLength": 24}},
            "trainer": {"microBatchTokens": 72, "activationCheckpointing": "layers"},
        }
    )
    expected = {part.name: part.num_bytes for part in trainer_parts(job.spec, case().shape)}
    assert case().planned() == expected


def test_a_side_that_runs_out_of_memory_is_a_result():
    def side(_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.3 GiB.\nSee the documentation")

    assert measured(case(), "TRL", side, 1, 1) == {"out_of_memory": "CUDA out of memory. Tried to allocate 9.3 GiB."}


@pytest.mark.bench
def test_the_script_runs_without_the_packages_that_read_a_job(tmp_path):
    written = tmp_path / "figures.json"
    options = ["--size", "tiny", "--length", "32", "--steps", "1", "--json", str(written)]
    command = [sys.executable, "-c", WITHOUT_PACKAGES, str(SCRIPT), *options]
    subprocess.run(command, check=True, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
    figures = json.loads(written.read_text())
    assert {"plaudit", "transformers, whole logits", "transformers, chunked logits"} <= figures["sides"].keys()
    ours = figures["sides"]["plaudit"]
    assert ours["planned_gb"] == pytest.approx(sum(ours["planned_parts_gb"].values()))
    assert ours["seconds"] > 0
