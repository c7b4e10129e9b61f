"""A later release of Plaudit, made from this commit: what an upgrade has to bear.

It differs as releases do: a changed default, a new field with a default, a tightened bound, another version of the
records on the wire; and in the chart another definition of RLJob. Its images are those of this commit with one more
layer, of the changed files, so that they cost nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import IO, Any, cast

import chart
import images
from real_cluster import ROOT

NEW_FIELD, MOST_STEPS = "lookAhead", 50
_OCI = "application/vnd.oci.image"
_SITE = "opt/plaudit/lib/python3.11/site-packages"
_PARTS = {"plaudit_wire": "wire", "plaudit_job": "job", "plaudit_operator": "operator"}
_CHANGES = {
    "plaudit_job/spec/rollout.py": (
        ("max_concurrent_samples: int = Field(default=256,", "max_concurrent_samples: int = Field(default=64,"),
        (
            "    arguments: Opaque = Field(default={})\n",
            '    look_ahead: int = Field(default=4, ge=0)\n    """A new field."""\n'
            "    arguments: Opaque = Field(default={})\n",
        ),
    ),
    "plaudit_job/spec/algorithm.py": (
        ("steps: int = Field(ge=1, le=10_000_000)", f"steps: int = Field(ge=1, le={MOST_STEPS})"),
    ),
    "plaudit_wire/messages.py": (("SCHEMA_VERSION: Final = 1", "SCHEMA_VERSION: Final = 2"),),
}


def build(folder: Path) -> tuple[dict[str, str], Path, list[Path]]:
    """Build the release; return its images by the chart's names, its chart, and archives of the images.

    Args:
        folder: an empty folder for sources, chart and archives.
    """
    sources = folder / "sources"
    for package, part in _PARTS.items():
        shutil.copytree(ROOT / part / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in _CHANGES.items():
        text = (sources / name).read_text()
        for before, after in changes:
            assert before in text, f"{name} has no {before!r}: change the next release"
            text = text.replace(before, after)
        (sources / name).write_text(text)
    built = {image: f"{image}-next" for image in (images.OPERATOR, images.WORKER)}
    archives = [folder / f"{number}.tar" for number in range(len(built))]
    for archive, (image, name) in zip(archives, built.items(), strict=True):
        _write_image(archive, name, image, sources)
    release = {name: built.get(image, image) for name, image in chart.IMAGES.items()}
    return release, _chart(folder, sources), archives


def _write_image(archive: Path, name: str, image: str, sources: Path) -> None:
    """Write the archive of an image with the changed files: of the layers below, which nodes have, their names alone.

    A whole one has hundreds of megabytes, which each node would read again.
    """
    layer = _changed_files(sources)
    with tarfile.open(images.archive_of(image)) as below:
        (told,) = json.load(cast(IO[bytes], below.extractfile("manifest.json")))
        config = json.load(cast(IO[bytes], below.extractfile(told["Config"])))
        sizes = [below.getmember(path).size for path in told["Layers"]]
    config["rootfs"]["diff_ids"].append(_digest(layer))
    config["history"].append({"created_by": "the next release"})
    layers = zip(config["rootfs"]["diff_ids"], [*sizes, len(layer)], strict=True)
    configured = json.dumps(config).encode()
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{_OCI}.manifest.v1+json",
        "config": _described("config.v1+json", _digest(configured), len(configured)),
        "layers": [_described("layer.v1.tar", digest, size) for digest, size in layers],
    }
    described = json.dumps(manifest).encode()
    head = _described("manifest.v1+json", _digest(described), len(described))
    index = {"schemaVersion": 2, "manifests": [{**head, "annotations": {"io.containerd.image.name": name}}]}
    with tarfile.open(archive, "w") as file:
        _add(file, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        for blob in (layer, configured, described):
            _add(file, f"blobs/{_digest(blob).replace(':', '/')}", blob)
        _add(file, "index.json", json.dumps(index).encode())


def _changed_files(sources: Path) -> bytes:
    """Return a layer with the changed files, without their compiled ones, which are never checked against them."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as file:
        for path in map(Path, _CHANGES):
            _add(file, f"{_SITE}/{path}", (sources / path).read_bytes())
            _add(file, f"{_SITE}/{path.parent}/__pycache__/.wh.{path.stem}.cpython-311.pyc", b"")
    return layer.getvalue()


def _add(file: tarfile.TarFile, path: str, content: bytes) -> None:
    member = tarfile.TarInfo(path)
    member.size = len(content)
    file.addfile(member, io.BytesIO(content))


def _described(kind: str, digest: str, size: int) -> dict[str, Any]:
    return {"mediaType": f"{_OCI}.{kind}", "digest": digest, "size": size}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _chart(folder: Path, sources: Path) -> Path:
    """Return a copy of the chart with the definition of the changed sources."""
    copy = folder / "chart"
    shutil.copytree(chart.CHART, copy)
    print_template = "import sys; from plaudit_operator.crd import chart_template; sys.stdout.write(chart_template())"
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    template = subprocess.run(
        [sys.executable, "-c", print_template], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert NEW_FIELD in template
    (copy / "templates" / "crd.yaml").write_text(template)
    return copy
