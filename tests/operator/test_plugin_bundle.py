"""``kubectl plaudit`` as one file."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from plaudit_operator import plugin_bundle

KUBECTL = """\
#!/bin/sh
case "$*" in
*events*) echo '{"items": []}' ;;
*) echo '{"metadata": {"name": "gsm8k", "uid": "u"}, "spec": {}, "status": {"phase": "Running"}}' ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the bundle and a kubectl that knows of one job."""
    command = [sys.executable, "-m", "plaudit_operator.plugin_bundle", str(tmp_path), "--version", "1.2.3"]
    subprocess.run([*command, "--url", "https://example.com/plugin.tar.gz"], check=True, capture_output=True)
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    return tmp_path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the program with an interpreter that sees no installed packages."""
    command = [sys.executable, "-I", "-S", str(folder / "kubectl-plaudit"), *words]
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_it_runs_without_any_package(folder: Path):
    done = run(folder, "status", "gsm8k")
    assert done.stderr == ""
    assert done.stdout.startswith("gsm8k   Running")


def test_krews_manifest_describes_the_archive(folder: Path):
    packed = (folder / "kubectl-plaudit-1.2.3.tar.gz").read_bytes()
    [platform] = json.loads((folder / "krew.yaml").read_text())["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256(packed).hexdigest()
    assert platform["uri"] == "https://example.com/plugin.tar.gz"
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        [entry] = files.getmembers()
        content = files.extractfile(entry)
        assert content is not None
        assert content.read() == (folder / "kubectl-plaudit").read_bytes()
    assert (entry.name, entry.mode) == (platform["bin"], 0o755)


def test_the_same_sources_give_the_same_archive():
    assert plugin_bundle.archive(plugin_bundle.program()) == plugin_bundle.archive(plugin_bundle.program())
