"""Publish weights: write a folder atomically, or offer them from memory; delete the versions that nobody needs.

See ``weights.published`` for what a folder holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.files import remove, remove_leftovers, whole_folder
from plaudit_workers.training.model.policy_model import PolicyModel
from plaudit_workers.training.model.weight_offer import WeightOffer
from plaudit_workers.weights.deltas import DeltaError, chain_from_whole
from plaudit_workers.weights.published import PROBE_FILE, WEIGHTS_FILE, combined_digest, weights_digest
from plaudit_workers.weights.receive import PartCollector

KEPT_VERSIONS = 2
"""The newest versions are always kept: a rollout whose heartbeat has not arrived yet may be loading one."""
_VERSION_NAME = re.compile(r"(\d+)\.(\d+)")


def write_weights(model: PolicyModel, folder: Path, version: PolicyVersion) -> Announcement:
    """Write the model's weights, each rank its file, and make them the proximal ones of the loss (``correction``).

    After a resume within a step these are the weights from before the step's first update, not the present ones.

    Args:
        version: name of the sub-folder; an existing one (of a trainer that died before announcing it) is replaced.

    Raises:
        ShardError: another rank could not write its file.
    """
    target = folder / str(version)
    with whole_folder(target) as temporary:
        digests = model.write_weights(str(temporary))
        (temporary / PROBE_FILE).write_bytes(msgspec.json.encode(model.probe()))
        for name, content in model.files().items():
            (temporary / name).write_bytes(content)
    model.hold_proximal(version)
    return Announcement(version, str(target), combined_digest(digests))


def offer_weights(model: PolicyModel, version: PolicyVersion, token: str, redis_url: str) -> Announcement:
    """Offer the weights from memory in place of those before; make them the proximal ones. See ``write_weights``."""
    model.files()  # made here once: ``write_offered`` runs beside updates
    transfer = model.offer(WeightOffer(version, token, redis_url, msgspec.json.encode(model.probe())))
    model.hold_proximal(version)
    return Announcement(version, "", "", transfer)


def write_offered(announcement: Announcement, files: Mapping[str, bytes], folder: Path) -> Announcement:
    """Write the offered weights as files too; return the announcement with their folder and digest.

    They are received from the ranks as rollouts receive them, but not into memory.

    Raises:
        TransferError: the version was withdrawn meanwhile, or a rank cannot be reached.
        OSError: the folder cannot be written.
    """
    assert announcement.transfer is not None
    target = folder / str(announcement.version)
    with whole_folder(target) as temporary:
        with (temporary / WEIGHTS_FILE).open("wb") as file:
            probe = PartCollector(announcement.version, announcement.transfer).collect(file.fileno())
        for name, content in ({**files, PROBE_FILE: probe} if probe else files).items():
            (temporary / name).write_bytes(content)
        digest = weights_digest(temporary)
    return msgspec.structs.replace(announcement, path=str(target), digest=digest)


def prune_weights(folder: Path, keep_versions: Iterable[str] = ()) -> list[PolicyVersion]:
    """Delete published versions that are not in use, and what is left of a trainer that died.

    Args:
        keep_versions: as live workers report them in ``version`` and ``loading`` (text form; empty ones are ignored).

    Returns:
        The versions deleted, oldest first. The newest two are never among them, nor are those on which the deltas of a
        kept version rest.
    """
    remove_leftovers(folder)
    present = published_versions(folder)
    used = {str(version) for version in present[-KEPT_VERSIONS:]} | set(keep_versions)
    needed = used | {base for version in used if version for base in _bases(folder / version)}
    doomed = [version for version in present if str(version) not in needed]
    for version in doomed:
        remove(folder / str(version))
    return doomed


def _bases(folder: Path) -> list[str]:
    """Return the versions without which a version cannot be restored; none if nothing restores it."""
    try:
        chain = chain_from_whole(folder)
    except (DeltaError, OSError):
        return []
    return [chain.start.name, *(delta.name for delta in chain.deltas)]


def published_versions(folder: Path) -> list[PolicyVersion]:
    """Return the versions in the folder, oldest first."""
    names = (_VERSION_NAME.fullmatch(path.name) for path in folder.glob("*.*"))
    return sorted(PolicyVersion(int(name[1]), int(name[2])) for name in names if name)
