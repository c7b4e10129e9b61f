"""The image of agents' machines in the tests: Debian with a program of its own and a repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import images
from real_cluster import harness

IMAGE = "localhost/plaudit-machine:e2e"
DOCKERFILE = f"""
FROM {images.BASE}
RUN mkdir -p /opt/tools/bin /repo && cp /bin/cat /opt/tools/bin/cat && echo kept > /repo/file
RUN rm -rf /var/lib/apt /var/cache
ENV PATH=/opt/tools/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
WORKDIR /repo
"""


def load(folder: Path) -> None:
    """Build the image, and load it into the tests' cluster; ``folder`` is for its archive."""
    if subprocess.run(["buildah", "inspect", images.BASE], capture_output=True).returncode:
        subprocess.run([sys.executable, images.__file__], check=True)
    (folder / "Dockerfile").write_text(DOCKERFILE)
    built = ["buildah", "bud", "--isolation", "chroot", "--pull-never", "-q", "-t", IMAGE, str(folder)]
    subprocess.run(built, check=True, capture_output=True)
    archive = folder / "machine.tar"
    subprocess.run(["buildah", "push", "-q", IMAGE, f"docker-archive:{archive}:{IMAGE}"], check=True)
    subprocess.run(harness("load", str(archive)), check=True)
    archive.unlink()
