"""Publishes weights: a folder that is there as a whole or not at all, and its announcement. Called by the conductor.

``weights/<incarnation>.<number>/`` holds ``model.safetensors``, the configuration and tokenizer files and
``probe.json``: ``{"ids": [L], "logprobs": [L - 1]}``, a fixed sequence and the trainer's log-probability of each of its
tokens after the first, given all before it, at temperature 1. A rollout computes them again after loading.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import msgspec
from safetensors.torch import save_file

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.training.backend.policy import Policy
from plaudit_workers.weights_digest import weights_digest
from plaudit_workers.whole_files import remove, remove_leftovers, whole_folder

KEPT_VERSIONS = 2
"""The newest versions always stay: one may be being loaded by a rollout whose heartbeat is not yet here."""

_VERSION_NAME = re.compile(r"(\d+)\.(\d+)")


def write_weights(policy: Policy, folder: Path, version: PolicyVersion) -> Announcement:
    """Writes the policy's present weights and makes them the proximal ones of the loss (``correction``).

    Args:
        policy: whose weights.
        folder: ``weights`` of the run's folder.
        version: names the sub-folder; one that exists (from a trainer that died before announcing it) is replaced.

    Returns:
        What to announce.

    Raises:
        RefusedError: the disk is full.
    """
    target = folder / str(version)
    with whole_folder(target) as temporary:
        save_file(policy.full_state(), temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "probe.json").write_bytes(msgspec.json.encode(asdict(policy.probe())))
        for name, content in policy.files().items():
            (temporary / name).write_bytes(content)
        digest = weights_digest(temporary)
    policy.hold_proximal(version)
    return Announcement(version, str(target), digest)


def prune_weights(folder: Path, keep_versions: Iterable[str] = ()) -> list[PolicyVersion]:
    """Deletes published versions that nobody needs, and leftovers of a trainer that died.

    Args:
        folder: ``weights`` of the run's folder.
        keep_versions: what live workers report as ``version`` and ``loading`` (text form; empty texts are ignored).

    Returns:
        The versions deleted, oldest first. The newest two are never among them.
    """
    remove_leftovers(folder)
    in_use = set(keep_versions)
    doomed = [version for version in published_versions(folder)[:-KEPT_VERSIONS] if str(version) not in in_use]
    for version in doomed:
        remove(folder / str(version))
    return doomed


def published_versions(folder: Path) -> list[PolicyVersion]:
    """The versions that lie in the folder, oldest first."""
    names = (_VERSION_NAME.fullmatch(path.name) for path in folder.glob("*.*"))
    return sorted(PolicyVersion(int(name[1]), int(name[2])) for name in names if name)
