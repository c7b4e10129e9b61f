"""Images for a cluster without a registry: ``python3 tests/e2e_cluster/images.py [FOLDER]``.

Builds them, and writes archives for ``cluster load`` into the folder. The project's own Dockerfiles are built on a
Debian base image, which debootstrap creates once under the name that their FROM uses. The base includes Redis (the
official image is not available everywhere) and libnuma, which vLLM for CPUs needs.
"""

from __future__ import annotations

import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim"
OPERATOR, WORKER, REDIS = "localhost/plaudit-operator:e2e", "localhost/plaudit-worker:e2e", "localhost/redis:e2e"
_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1,redis-server"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def main(folder: Path | None) -> None:
    """Build missing images, and write their archives if a folder is given, one process after the other."""
    with Path(tempfile.gettempdir(), "plaudit-images.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        written = folder / "archives" if folder else None
        if written is None or not written.exists():
            archives = _build(folder)
            if written:
                written.write_text("".join(f"{archive}\n" for archive in archives))
        sys.stdout.write(written.read_text() if written else "")


def _build(folder: Path | None) -> list[Path]:
    if subprocess.run(["buildah", "inspect", BASE], capture_output=True, check=False).returncode:
        _make_base()
    options = ["--layers", "--isolation", "chroot", "--pull-never", "-q", *_trust()]
    for name, dockerfile in ((OPERATOR, "operator/Dockerfile"), (WORKER, "workers/Dockerfile")):
        _run("buildah", "bud", *options, "-f", dockerfile, "-t", name, ".")
    _run("buildah", "tag", BASE, REDIS)
    return [_write(name, folder) for name in (OPERATOR, WORKER, REDIS)] if folder else []


def _make_base() -> None:
    with tempfile.TemporaryDirectory() as root:
        _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root, _mirror())
        shutil.rmtree(Path(root, "var/cache/apt"), ignore_errors=True)
        container = _run("buildah", "from", "scratch").strip()
        _run("buildah", "add", "-q", container, root, "/")
        _run("buildah", "commit", "-q", container, BASE)
        _run("buildah", "rm", container)


def _trust() -> list[str]:
    """Return the options that mount this machine's CAs and pip settings, so that pip can reach its index."""
    files = [path for path in (_CERTIFICATES, Path("/etc/pip.conf")) if path.exists()]
    return [word for path in files for word in ("--volume", f"{path}:{path}:ro")]


def _mirror() -> str:
    """Return the Debian mirror of this machine."""
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        text = path.read_text() if path.is_file() else ""
        for pattern in (r"^URIs: *(\S+/debian)/?$", r"^deb (?:\[.*?\] )?(\S+/debian)/? "):
            if found := re.search(pattern, text, re.MULTILINE):
                return found[1]
    sys.exit("no Debian mirror in /etc/apt/sources.list or sources.list.d: the images' base is made from it")


def _write(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / (name.rpartition("/")[2].partition(":")[0] + ".tar")
    archive.unlink(missing_ok=True)
    _run("buildah", "push", "-q", name, f"docker-archive:{archive}:{name}")
    return archive


def _run(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
