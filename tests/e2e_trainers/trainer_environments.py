#!/usr/bin/env python3
"""Environments of other trainers and of agent frameworks, each made by uv in a cache folder.

Their requirements are in ``requirements/trainers-<name>.txt``.

``build`` makes what is missing; ``built`` exits with 0 if there is any. Tests of the others are skipped.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PLAUDIT_TRAINERS_CACHE", Path.home() / ".cache" / "plaudit-trainers"))
ENVIRONMENTS = {
    "trl": ("3.11", "trl", "openrlhf", "areal"),
    "verl": ("3.11", "verl"),
    "verifiers": ("3.11", "verifiers"),
    "skyrl": ("3.11", "skyrl"),
    "tinker": ("3.11", "tinker"),
    "nemo-gym": ("3.12", "nemo-gym"),
    "openenv": ("3.11", "openenv"),
    "open-reward": ("3.11", "open-reward"),
    "agentlightning": ("3.12", "agentlightning"),
    "agents": ("3.11", "agents"),
    "harbor": ("3.12", "harbor"),
}
"""Python version and requirement files of each environment."""


def python(name: str) -> Path | None:
    """Return the interpreter of an environment; None where it is not built, or built of other requirements."""
    folder = CACHE / name
    marker = folder / "requirements"
    return folder / "bin" / "python" if marker.is_file() and marker.read_text() == _digest(name) else None


def build(name: str) -> None:
    """Make an environment."""
    folder, uv = CACHE / name, ROOT / ".uv" / "bin" / "uv"
    (folder / "requirements").unlink(missing_ok=True)
    # Where pyenv has several versions, only one is on the path.
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, Path.home().glob(".pyenv/versions/*/bin"))])
    environment = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(folder)}
    install = [uv, "pip", "install", "-q", "--no-deps"]
    create = [uv, "venv", "-q", "--python", ENVIRONMENTS[name][0], "--allow-existing", folder]
    subprocess.run(create, check=True, env=environment)
    for file in _files(name):
        subprocess.run([*install, "--require-hashes", "-r", file], check=True, env=environment)
    (folder / "requirements").write_text(_digest(name))


def _files(name: str) -> list[Path]:
    return [ROOT / "requirements" / f"trainers-{part}.txt" for part in ENVIRONMENTS[name][1:]]


def _digest(name: str) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in _files(name))).hexdigest()


def main() -> None:
    """Build the environments, or report whether all are built."""
    missing = [name for name in ENVIRONMENTS if python(name) is None]
    if sys.argv[1:] == ["built"]:
        sys.exit(1 if len(missing) == len(ENVIRONMENTS) else 0)
    for name in missing:
        print(f"making the environment of {name} in {CACHE / name}", flush=True)
        try:
            build(name)
        except subprocess.CalledProcessError as error:
            print(f"{name} cannot be installed from here: its tests are skipped ({error})")


if __name__ == "__main__":
    main()
