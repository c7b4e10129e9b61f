#!/usr/bin/env python3
"""Environments of other trainers, one each, made by uv from ``requirements/trainers-<name>.txt`` in a cache folder.

``build`` makes what is missing; ``built`` exits with 0 if all are there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("PLAUDIT_TRAINERS_CACHE", Path.home() / ".cache" / "plaudit-trainers"))
ENVIRONMENTS = {"trl": ("trl", "openrlhf"), "verl": ("verl",), "verifiers": ("verifiers",), "skyrl": ("skyrl",)}
"""Requirement files of each environment."""


def python(name: str) -> Path | None:
    """Return the interpreter of an environment; None where it is not built, or built of other requirements."""
    folder = CACHE / name
    marker = folder / "requirements"
    return folder / "bin" / "python" if marker.is_file() and marker.read_text() == _digest(name) else None


def build(name: str) -> None:
    """Make an environment."""
    folder, uv = CACHE / name, ROOT / ".uv" / "bin" / "uv"
    (folder / "requirements").unlink(missing_ok=True)
    environment = {**os.environ, "VIRTUAL_ENV": str(folder)}
    install = [uv, "pip", "install", "-q", "--no-deps"]
    subprocess.run([uv, "venv", "-q", "--python", "3.11", "--allow-existing", folder], check=True)
    for file in _files(name):
        subprocess.run([*install, "--require-hashes", "-r", file], check=True, env=environment)
    (folder / "requirements").write_text(_digest(name))


def _files(name: str) -> list[Path]:
    return [ROOT / "requirements" / f"trainers-{part}.txt" for part in ENVIRONMENTS[name]]


def _digest(name: str) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in _files(name))).hexdigest()


def main() -> None:
    """Build the environments, or report whether all are built."""
    missing = [name for name in ENVIRONMENTS if python(name) is None]
    if sys.argv[1:] == ["built"]:
        sys.exit(1 if missing else 0)
    for name in missing:
        print(f"making the environment of {name} in {CACHE / name}", flush=True)
        build(name)


if __name__ == "__main__":
    main()
