"""Images that new nodes have from the start: unpacked once on this machine, and linked into each node.

Importing a gigabyte takes a node 40 CPU seconds. A store is the folder of a containerd that has imported the archives;
a node gets hard links to its files, which nobody changes: containers write to layers of their own.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from .host import locked, run, wait

_KEPT_S = 3 * 3600.0
_DATABASES = ("io.containerd.metadata.v1.bolt/meta.db", "io.containerd.snapshotter.v1.overlayfs/metadata.db")
_CONFIG = """\
version = 2
root = "{store}"
state = "{folder}/state"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{folder}/socket"
"""


@contextlib.contextmanager
def store_of(archives: Sequence[Path], stores: Path) -> Iterator[Path]:
    """Yields the store of these archives, made unless it exists; removes those that nobody has used for hours.

    Args:
        archives: the image archives.
        stores: the folder of all stores, which stays locked until the end.
    """
    with locked(stores):
        store = stores / hashlib.sha256("".join(map(fingerprint, archives)).encode()).hexdigest()[:12]
        if not store.exists():
            begun = store.with_suffix(".begun")
            shutil.rmtree(begun, ignore_errors=True)
            with _containerd(begun) as socket:
                for archive in archives:
                    run("ctr", f"--address={socket}", "--namespace=k8s.io", "images", "import", archive.absolute())
            begun.rename(store)
        os.utime(store)
        for other in stores.iterdir():
            if other.is_dir() and time.time() - other.stat().st_mtime > _KEPT_S:
                shutil.rmtree(other)
        yield store


def fingerprint(archive: Path) -> str:
    """Returns what tells an archive from others."""
    status = archive.stat()
    return f"{archive.absolute()} {status.st_size} {status.st_mtime_ns}\n"


def link(store: Path, folder: Path) -> None:
    """Makes the folder of a new node's containerd from a store, in copies where links cannot be made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    same_disk = store.stat().st_dev == folder.parent.stat().st_dev
    run("cp", "--archive", *(["--link"] if same_disk else []), store, folder)
    for database in _DATABASES:
        (folder / database).unlink()
        shutil.copyfile(store / database, folder / database)


@contextlib.contextmanager
def _containerd(store: Path) -> Iterator[Path]:
    """Yields the socket of a containerd whose folder is the store."""
    with tempfile.TemporaryDirectory() as name:
        folder, config = Path(name), Path(name, "config.toml")
        config.write_text(_CONFIG.format(store=store.absolute(), folder=folder))
        # Its mounts end with it.
        command = ["unshare", "--mount", "containerd", f"--config={config}"]
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
            try:
                wait("containerd", (folder / "socket").is_socket)
                yield folder / "socket"
            finally:
                process.terminate()
