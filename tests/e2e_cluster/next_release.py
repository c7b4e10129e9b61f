"""A later release of Plaudit, made from this commit: what an upgrade has to bear.

It differs as releases do: a changed default, a new field with a default, a tightened bound, another version of the
records on the wire; and in the chart another definition of RLJob. Its images are those of this commit with the changed
files on top, so that they cost seconds.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import chart
import images
from real_cluster import ROOT

NEW_FIELD, MOST_STEPS = "lookAhead", 30
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
    built = {image: _image(image, sources) for image in (images.OPERATOR, images.WORKER)}
    archives = []
    for image in built.values():
        archives.append(folder / f"{image.rpartition('/')[2].replace(':', '-')}.tar")
        _run("buildah", "push", "-q", image, f"docker-archive:{archives[-1]}:{image}")
        _run("buildah", "rmi", image)
    release = {name: built.get(image, image) for name, image in chart.IMAGES.items()}
    return release, _chart(folder, sources), archives


def _image(image: str, sources: Path) -> str:
    """Build the image with the changed files, without their compiled ones, which are never checked against them.

    Its name is of this call alone, so that no other checkout's tests overwrite or remove it.
    """
    name = f"{image}-next-{secrets.token_hex(4)}"
    container = _run("buildah", "from", "--pull-never", image)
    root = Path(_run("buildah", "mount", container))
    for path in _CHANGES:
        shutil.copyfile(sources / path, root / _SITE / path)
        for compiled in (root / _SITE / path).parent.glob(f"__pycache__/{Path(path).stem}.*.pyc"):
            compiled.unlink()
    _run("buildah", "umount", container)
    _run("buildah", "commit", "-q", container, name)
    _run("buildah", "rm", container)
    return name


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


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
    return done.stdout.strip()
