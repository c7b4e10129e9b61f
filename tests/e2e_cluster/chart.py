"""The chart with the images of the tests: ``helm install``, and what it would install."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import images
from real_cluster import ROOT, Cluster
from ruamel.yaml import YAML

CHART = ROOT / "charts" / "plaudit"
IMAGES = {"operator": images.OPERATOR, "worker": images.WORKER, "gpu": images.WORKER, "redis": images.REDIS}


def values() -> dict[str, Any]:
    """The chart's values, of ``PLAUDIT_E2E_VALUES`` or with the images that are built here."""
    given = os.environ.get("PLAUDIT_E2E_VALUES")
    found: dict[str, Any] = (
        YAML(typ="safe").load(Path(given)) if given else {"images": IMAGES, "sandboxes": {"pods": True}}
    )
    return found


def install(cluster: Cluster, **more: Any) -> subprocess.CompletedProcess[str]:
    """Installs the chart as release ``plaudit`` in namespace ``plaudit``, or upgrades it; ``more`` replaces values.

    The definition of RLJob may be there already, from ``kubectl apply``: Helm takes it over.
    """
    command = ["helm", "upgrade", "--install", "plaudit", str(CHART), "--namespace", "plaudit", "--take-ownership"]
    return cluster.run(*command, "--wait", "--values", "-", text=json.dumps(values() | more))


def template(cluster: Cluster, *names: str, release: str = "plaudit", namespace: str = "plaudit", **more: Any) -> str:
    """The manifests of these templates (default: all), rendered with the chart's own values and ``more``."""
    shown = [word for name in names for word in ("-s", f"templates/{name}.yaml")]
    command = ["helm", "template", release, str(CHART), "--namespace", namespace, *shown, "--values", "-"]
    return cluster.run(*command, text=json.dumps(more)).stdout
