"""Publish versions as deltas, and every few of them whole. Called by ``torch_backend``.

See ``weight_deltas.folders`` for what a version's folder holds. The announced digest is that of the whole files, so a
rollout checks the same bytes whatever way they took.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.published_weights import PROBE_FILE, combined_digest
from plaudit_workers.training.model.policy_model import PolicyModel
from plaudit_workers.training.shards.weight_image import WeightForm
from plaudit_workers.weight_deltas.folders import DELTA_FILE, DeltaRecord, is_whole
from plaudit_workers.whole_files import whole_folder


class DeltaPublisher:
    """Publish the versions of one trainer; its first one is whole.

    Args:
        full_every: versions from one that is whole to the next.
    """

    def __init__(self, model: PolicyModel, folder: Path, full_every: int) -> None:
        self._model = model
        self._folder = folder
        self._full_every = full_every
        self._last: PolicyVersion | None = None
        self._delta: DeltaRecord | None = None
        """Of the last version; None if it has no delta."""
        self._probe = b""
        self._until_full = 0

    def publish(self, version: PolicyVersion) -> Announcement:
        """Publish the model's weights; see ``publish.write_weights``.

        Raises:
            RefusedError: the disk is full.
            ShardError: another rank could not write its file.
        """
        copied = self._model.copy_weights()
        digest = combined_digest(copied.digests)
        self._delta = DeltaRecord(str(self._last), digest) if copied.has_delta else None
        self._probe = msgspec.json.encode(self._model.probe())
        target = self._folder / str(version)
        self._write(target, whole=self._delta is None or self._until_full == 0)
        self._model.hold_proximal(version)
        self._last = version
        return Announcement(version, str(target), digest)

    def write_whole(self, announcement: Announcement) -> None:
        """Write the announced version again, whole; nothing if it is whole, or no longer the newest.

        Raises:
            RefusedError: the disk is full.
            ShardError: another rank could not write its file.
        """
        target = Path(announcement.path)
        if announcement.version == self._last and not is_whole(target):
            self._write(target, whole=True)

    def _write(self, target: Path, *, whole: bool) -> None:
        with whole_folder(target) as folder:
            self._model.write_copied(WeightForm(str(folder), whole, self._delta is not None))
            (folder / PROBE_FILE).write_bytes(self._probe)
            if self._delta is not None:
                (folder / DELTA_FILE).write_bytes(msgspec.json.encode(self._delta))
            if whole:
                for name, content in self._model.files().items():
                    (folder / name).write_bytes(content)
        self._until_full = self._full_every - 1 if whole else self._until_full - 1
