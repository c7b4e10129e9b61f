"""Images for a cluster without a registry: ``python3 tests/e2e_cluster/images.py``.

Builds what is missing, and prints the archives for ``cluster up --images``. The project's own Dockerfiles are
built on a Debian image, which debootstrap makes once. It includes Redis (the official image is not available
everywhere) and libnuma, which vLLM for CPUs needs.

A tag is the digest of what goes into its image, so that checkouts of one machine share images that are equal, and
never overwrite others. Archives lie in the cluster's cache for three hours after their last use.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PACKAGES = "python3,python3-venv,ca-certificates,libnuma1,redis-server"
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "plaudit-cluster", "images")
_OF_CONTAINERS = "docker.io/library/python:3.11-slim"
"""For ``make test-containers`` and examples, where no registry has it."""
_KEPT_S = 3 * 3600.0


def digest(*texts: str, files: Iterable[Path] = ()) -> str:
    """Return the digest of texts and of files, by which a tag names its image's content."""
    found = hashlib.sha256("\0".join(texts).encode())
    for path in files:
        found.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def _built_from(dockerfile: str) -> str:
    """Return the name of the project's image of a Dockerfile."""
    text = (ROOT / dockerfile).read_text()
    copied = [ROOT / path for path in re.findall(r"^COPY (?!--)(\S+)", text, re.MULTILINE)]
    files = [path for each in copied for path in ([each] if each.is_file() else sorted(each.rglob("*")))]
    content = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    part = {"operator": "operator", "workers": "worker"}[Path(dockerfile).parent.name]
    return f"localhost/plaudit-{part}:e2e-{digest(text, BASE, files=content)}"


BASE = REDIS = f"localhost/plaudit-base:e2e-{digest(_PACKAGES)}"
_DOCKERFILES = {_built_from(path): path for path in ("operator/Dockerfile", "workers/Dockerfile")}
OPERATOR, WORKER = _DOCKERFILES
_MACHINE_DOCKERFILE = f"""
FROM {BASE}
RUN mkdir -p /opt/tools/bin /repo && cp /bin/cat /opt/tools/bin/cat && echo kept > /repo/file
RUN rm -rf /var/lib/apt /var/cache
ENV PATH=/opt/tools/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /repo
"""
MACHINE = f"localhost/plaudit-machine:e2e-{digest(_MACHINE_DOCKERFILE)}"
"""Of agents' machines: Debian with a program of its own and a repository."""


def main() -> None:
    """Build missing images, and print all archives, one process of this machine after the other."""
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archives = [_archived(name) for name in (BASE, OPERATOR, WORKER, MACHINE)]
        _remove_unused()
    sys.stdout.write("".join(f"{archive}\n" for archive in archives))


def archive_of(name: str) -> Path:
    """Return the path of an image's archive."""
    return _CACHE / f"{name.rpartition('/')[2].replace(':', '_')}.tar"


def _archived(name: str) -> Path:
    """Return the archive of an image, built where one of the two is missing."""
    archive = archive_of(name)
    if subprocess.run(["buildah", "inspect", name], capture_output=True, check=False).returncode:
        archive.unlink(missing_ok=True)
        _build(name)
    if archive.exists():
        os.utime(archive, ns=(time.time_ns(), archive.stat().st_mtime_ns))  # used; nodes know it by its other time
    else:
        begun = archive.with_suffix(".begun")
        begun.unlink(missing_ok=True)
        _run("buildah", "push", "-q", name, f"docker-archive:{begun}:{name}")
        begun.rename(archive)
    return archive


def _build(name: str) -> None:
    options = ["--layers", "--isolation", "chroot", "--pull-never", "-q", "-t", name]
    if name == BASE:
        _make_base()
    elif name == MACHINE:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "Dockerfile").write_text(_MACHINE_DOCKERFILE)
            _run("buildah", "bud", *options, folder)
    else:
        options += ["--build-arg", f"PYTHON_IMAGE={BASE}", *_trust()]
        _run("buildah", "bud", *options, "-f", _DOCKERFILES[name], ".")


def _remove_unused() -> None:
    """Remove images whose archives nobody has used for hours."""
    for archive in _CACHE.glob("*.tar"):
        if time.time() - archive.stat().st_atime > _KEPT_S:
            archive.unlink()
            name = f"localhost/{archive.stem.replace('_', ':')}"
            subprocess.run(["buildah", "rmi", name], capture_output=True, check=False)


def _make_base() -> None:
    with tempfile.TemporaryDirectory() as root:
        _run("debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", root, _mirror())
        shutil.rmtree(Path(root, "var/cache/apt"), ignore_errors=True)
        container = _run("buildah", "from", "scratch").strip()
        _run("buildah", "add", "-q", container, root, "/")
        _run("buildah", "commit", "-q", container, BASE)
        _run("buildah", "rm", container)
    if subprocess.run(["buildah", "inspect", _OF_CONTAINERS], capture_output=True, check=False).returncode:
        _run("buildah", "tag", BASE, _OF_CONTAINERS)


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


def _run(*argv: str) -> str:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(argv)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
