"""The worker image has neither torch nor transformers: what its Dockerfile imports has to do without."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from plaudit_wire import VERSION
from plaudit_workers.cli import COMMANDS

DOCKERFILE = Path(__file__).parents[2] / "workers" / "Dockerfile"
ABSENT = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'vllm', 'ray'))); "


@pytest.mark.long
def test_what_the_worker_image_imports_needs_no_heavy_packages():
    [imported] = re.findall(r'python3 -c "(import plaudit_workers[^"]+)"', DOCKERFILE.read_text())
    done = subprocess.run([sys.executable, "-c", ABSENT + imported], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_every_command_but_run_works_without_heavy_packages():
    modules = sorted({command.function.partition(":")[0] for name, command in COMMANDS.items() if name != "run"})
    program = f"{ABSENT}from importlib import import_module; [import_module(name) for name in {modules!r}]"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_gateway_and_reward_models_load_nothing_that_reads_stored_samples():
    program = "import sys; sys.modules.update(dict.fromkeys(('pyarrow', 'numpy'))); "
    program += "import plaudit_workers.gateway, plaudit_model_server.api"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_modules_that_the_gpu_image_imports_exist():
    modules = re.findall(r"plaudit_\w+(?:\.\w+)+", DOCKERFILE.with_suffix(".gpu").read_text())
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


@pytest.mark.long
def test_images_need_no_metadata_of_the_distributions():
    """They hold the packages alone."""
    documents = (
        "import importlib.metadata; importlib.metadata.distribution = None\n"
        "from plaudit_metrics.service.openapi import document; document('a')\n"
        "from plaudit_workers.service import application, openapi; openapi.document()\n"
    )
    done = subprocess.run([sys.executable, "-c", documents], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_distribution_has_the_version_that_processes_report():
    folder = DOCKERFILE.parents[1]
    names = [tomllib.loads(path.read_text())["project"]["name"] for path in folder.glob("*/pyproject.toml")]
    assert len(names) == 9
    assert {importlib.metadata.version(name) for name in names} == {VERSION}
