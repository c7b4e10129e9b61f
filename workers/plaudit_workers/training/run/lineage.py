"""Decide which policy versions belong to the surviving line of checkpoints.

Every trainer that takes over is an incarnation that continues from a version of an older one: versions that the older
one published later are a lost future. The lineage is stored beside the checkpoints, because a checkpoint does not
contain its successors.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.stream.trainer.fence import StaleIncarnationError
from plaudit_workers.whole_files import whole_file

FILE_NAME = "incarnations.json"


@dataclass
class Lineage:
    """Map each incarnation to the version it continued from; ``0.<step>`` if it started from the job's own model."""

    parents: dict[int, PolicyVersion] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """Return the highest incarnation so far; 0 before the first."""
        return max(self.parents, default=0)

    def survives(self, version: PolicyVersion, head: PolicyVersion) -> bool:
        """Return True if ``version`` is ``head`` or one of its ancestors.

        An incarnation first publishes the weights that it continued from: the older version under another name.
        """
        parent = self.parents.get(version.incarnation)
        while parent is not None and version.number == parent.number:
            version, parent = parent, self.parents.get(parent.incarnation)
        ancestor: PolicyVersion | None = head
        while ancestor is not None:
            if version.incarnation == ancestor.incarnation:
                return version.number <= ancestor.number
            ancestor = self.parents.get(ancestor.incarnation)
        return False

    def rules_out(self, version: PolicyVersion) -> bool:
        """Return True if a later incarnation continued from an older version, so that ``version`` is a lost future."""
        newest = PolicyVersion(self.newest, sys.maxsize)
        return version.incarnation < self.newest and not self.survives(version, newest)

    @classmethod
    def read(cls, folder: Path) -> Lineage:
        """Read the lineage in a folder of checkpoints; empty if there is none."""
        try:
            stored = json.loads((folder / FILE_NAME).read_text())
        except FileNotFoundError:
            return cls()
        return cls({int(key): PolicyVersion(*parent) for key, parent in stored.items()})

    def write(self, folder: Path) -> None:
        """Write the lineage atomically."""
        stored = {
            str(incarnation): [parent.incarnation, parent.number]
            for incarnation, parent in sorted(self.parents.items())
        }
        with whole_file(folder / FILE_NAME) as temporary:
            temporary.write_text(json.dumps(stored))


def refuse_replaced(folder: Path, incarnation: int) -> None:
    """Check that no later trainer has begun; called again right before a checkpoint gets its name.

    Raises:
        StaleIncarnationError: one has. A late checkpoint could replace one of the successor's, or delete its parent.
    """
    if Lineage.read(folder).newest > incarnation:
        raise StaleIncarnationError(f"a later trainer than incarnation {incarnation} writes checkpoints")
