"""The programs that a cluster consists of: built from the modules that go/go.mod pins, kept in a cache folder."""

import hashlib
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .host import CGROUPS, FailureError, locked

HERE = Path(__file__).parent.parent
DEBIAN_PACKAGES = {  # what has to be there: the package that brings it
    "conntrack": "conntrack",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "sysctl": "procps",
    "socat": "socat",
    "umount": "mount",
}


def expect_machine() -> None:
    """Fails with all that this machine lacks."""
    if os.geteuid() != 0:
        raise FailureError("a cluster needs root: it makes network namespaces, cgroups and mounts")
    if missing := sorted({package for need, package in DEBIAN_PACKAGES.items() if not shutil.which(need)}):
        raise FailureError(
            f"Debian packages are missing:\n  apt-get install --no-install-recommends {' '.join(missing)}"
        )
    if (CGROUPS / "cgroup.controllers").exists():
        raise FailureError("this machine has only cgroups v2, on which the cluster was never tried")


class Programs:
    """The cached programs."""

    def __init__(self) -> None:
        self.version = _kubernetes_version()
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.cache = Path(os.environ.get("PLAUDIT_CLUSTER_CACHE") or base / "plaudit-cluster" / self.version).absolute()
        self.bin = self.cache / "bin"
        self.pause_image = self.cache / "pause.tar"
        self.image_stores = self.cache / "image-stores"

    def build(self) -> None:
        """Builds what is missing or older than its sources. A build that was cut short goes on where it was.

        One module holds them all: what Kubernetes, Helm and the volumes share is compiled once.
        """
        with locked(self.cache):
            build_module(HERE / "go", self.bin, self.cache / "sources.sha256", ["tool", "./..."], self._ldflags())
            if (self.bin / "server").exists():  # so is etcd's main package named
                (self.bin / "server").rename(self.bin / "etcd")
            write_image(self.pause_image, "localhost/pause:1", {"pause": self.bin / "pause"})

    def _ldflags(self) -> str:
        """Stamps the version, without which Helm cannot tell what it talks to."""
        major, minor, _ = self.version.removeprefix("v").split(".", 2)
        values = {"gitVersion": self.version, "gitMajor": major, "gitMinor": minor}
        packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        return " ".join(["-s -w", *(f"-X {package}.{key}={values[key]}" for package in packages for key in values)])


def _kubernetes_version() -> str:
    required = (HERE / "go" / "go.mod").read_text()
    found = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", required, re.MULTILINE)
    assert found
    return found[1]


def build_module(
    sources: Path, folder: Path, stamp: Path, packages: Sequence[str], ldflags: str = "-s -w", tags: str = ""
) -> None:
    """Builds the static programs of a Go module, unless the stamp tells that these very sources were built."""
    if is_built(sources, stamp, ldflags, tags):
        return
    if not shutil.which("go"):
        raise FailureError(f"there is no `go` on PATH to build {sources}")
    print(f"building {sources.name}: minutes, when Go's own caches are cold", file=sys.stderr)
    began = time.monotonic()
    stamp.unlink(missing_ok=True)
    flags = ["-trimpath", "-buildvcs=false", "-tags", tags, "-ldflags", ldflags]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    command = ["go", "build", *flags, "-o", f"{folder}/", *packages]
    if subprocess.run(command, cwd=sources, env=environment, check=False).returncode:
        raise FailureError(f"the build of {sources.name} failed")
    stamp.write_text(_digest(sources, ldflags, tags))
    print(f"built {sources.name} in {time.monotonic() - began:.0f} s", file=sys.stderr)


def is_built(sources: Path, stamp: Path, ldflags: str = "-s -w", tags: str = "") -> bool:
    """Whether these very sources were built."""
    return stamp.exists() and stamp.read_text() == _digest(sources, ldflags, tags)


def _digest(sources: Path, ldflags: str, tags: str) -> str:
    digest = hashlib.sha256((ldflags + tags).encode())
    for path in sorted(path for path in sources.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def write_image(archive: Path, name: str, programs: Mapping[str, Path]) -> None:
    """Writes an image archive of static programs and a /tmp.

    Args:
        archive: the file.
        name: of the image, with its tag.
        programs: by their paths in the image; the first one is what runs, as an ordinary user.
    """
    layer = _tar({path: program.read_bytes() for path, program in programs.items()}, folders=["tmp"])
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [f"/{next(iter(programs))}"], "User": "1000"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    descriptions = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    archive.write_bytes(_tar({"layer.tar": layer, **descriptions}))


def _tar(files: Mapping[str, bytes], folders: Sequence[str] = ()) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in folders:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
