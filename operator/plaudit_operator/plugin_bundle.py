"""Build ``kubectl plaudit`` as one file that needs Python only, and its manifest for krew.

Run as ``python -m plaudit_operator.plugin_bundle FOLDER [--version V] [--url URL]``. The archive is the same for the
same sources, so that its digest can be checked.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MODULES = (
    "plaudit_operator",
    "plaudit_operator.names",
    "plaudit_operator.observed",
    "plaudit_operator.plugin",
    "plaudit_wire",
    "plaudit_wire.printable",
)
"""What the plugin imports, except for ``top``, which needs packages of others."""
_START = "from plaudit_operator.plugin import main\nmain()\n"
_INTERPRETER = b"#!/usr/bin/env python3\n"
_NAME = "kubectl-plaudit"
_EARLIEST = (1980, 1, 1, 0, 0, 0)


def program() -> bytes:
    """Return the program: a zip archive that ``python3`` runs."""
    content = io.BytesIO()
    content.write(_INTERPRETER)
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in [("__main__.py", _START), *sorted(_sources())]:
            archive.writestr(zipfile.ZipInfo(name, _EARLIEST), text, zipfile.ZIP_DEFLATED)
    return content.getvalue()


def _sources() -> Iterator[tuple[str, str]]:
    for module in _MODULES:
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        path = module.replace(".", "/")
        name = f"{path}/__init__.py" if spec.submodule_search_locations else f"{path}.py"
        yield name, Path(spec.origin).read_text(encoding="utf-8")


def archive(content: bytes) -> bytes:
    """Return the archive that krew downloads: the program as an executable file."""
    entry = tarfile.TarInfo(_NAME)
    entry.size, entry.mode = len(content), 0o755
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream, tarfile.open(fileobj=stream, mode="w") as files:
        files.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def manifest(version: str, url: str, digest: str) -> dict[str, Any]:
    """Return the plugin's manifest for krew, which finds the archive of this SHA-256 at the URL."""
    systems = [{"key": "os", "operator": "In", "values": ["linux", "darwin"]}]
    files = [{"from": _NAME, "to": "."}]
    platform = {"selector": {"matchExpressions": systems}, "uri": url, "sha256": digest, "files": files, "bin": _NAME}
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "plaudit"},
        "spec": {
            "version": f"v{version}",
            "shortDescription": "Show, suspend and resume RLJobs",
            "description": (
                "Shows phase, progress, problems and cost of an RLJob, the logs of its processes by role, and its "
                "metrics page; suspends and resumes it. Needs Python 3.11 or later."
            ),
            "platforms": [platform],
        },
    }


def main() -> int:
    """Write the program, its archive and the manifest into a folder."""
    parser = argparse.ArgumentParser(prog="python -m plaudit_operator.plugin_bundle", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", default=importlib.metadata.version("plaudit-operator"), help="default: its own")
    parser.add_argument("--url", default="", help="address of the archive, for the manifest (default: its file name)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    content = program()
    packed, archived = archive(content), options.folder / f"{_NAME}-{options.version}.tar.gz"
    archived.write_bytes(packed)
    path = options.folder / _NAME
    path.write_bytes(content)
    path.chmod(0o755)
    described = manifest(options.version, options.url or archived.name, hashlib.sha256(packed).hexdigest())
    (options.folder / "krew.yaml").write_text(json.dumps(described, indent=2) + "\n")
    sys.stdout.write(f"{path}\n{archived}\n{options.folder / 'krew.yaml'}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
