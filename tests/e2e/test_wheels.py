"""The wheels, installed into an empty environment outside the checkout, without a Redis of the system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plaudit_metrics.sources.steps import read_steps

ROOT = Path(__file__).parents[2]
PARTS = ("client", "wire", "job", "metrics", "sandbox", "reward", "model_server", "workers", "operator")
UV = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with all wheels; other packages come from the checkout's environment, not its parts."""
    folder = tmp_path_factory.mktemp("wheels")
    wheels = folder / "dist"
    for part in PARTS:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(build, cwd=ROOT / part, check=True, capture_output=True)
    home = folder / "environment"
    venv.create(home, with_pip=False)
    files = [str(file) for file in sorted(wheels.iterdir())]
    install = [UV, "pip", "install", "-q", "--offline", "--no-deps", "--python", str(home / "bin" / "python"), *files]
    subprocess.run(install, check=True)
    # A folder that a .pth file adds has its own .pth files ignored: the checkout's editable parts stay out.
    packages = next((home / "lib").glob("python*/site-packages"))
    (packages / "heavy.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home


def test_every_file_of_the_parts_is_in_the_wheels(environment: Path) -> None:
    packages = next((environment / "lib").glob("python*/site-packages"))
    for part in PARTS:
        package = ROOT / part / f"plaudit_{part}"
        files = {path.relative_to(package.parent) for path in package.rglob("*") if path.is_file()}
        files = {path for path in files if "__pycache__" not in path.parts}
        assert files
        assert not [path for path in sorted(files) if not (packages / path).exists()]


def test_an_example_runs_from_the_wheels_on_the_redis_server_of_a_wheel(
    environment: Path,
    example: Callable[[str], Path],
    change_job: Callable[..., Path],
    scripted: dict[str, Any],
    tmp_path: Path,
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "uname", "ps"):  # Ray's; no redis-server
        (programs / name).symlink_to(str(shutil.which(name)))
    job = change_job(example("01-copy-digits") / "job.yaml", rollout__engine=scripted, data__validation=None)
    plaudit = [str(environment / "bin" / "plaudit"), "run", str(job), "--run", "digits", "--steps", "2"]
    variables = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    variables["PATH"] = str(programs)
    done = subprocess.run(
        plaudit, capture_output=True, text=True, check=False, cwd=tmp_path, env=variables, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "digits"
    assert [step.step for step in read_steps(run / "steps.jsonl")] == [1, 2]
    assert "valkey" in (run / "redis" / "redis.log").read_text().lower()
