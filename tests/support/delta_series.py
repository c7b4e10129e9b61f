"""Versions of random weights, published as the trainer publishes them: the first one whole, then deltas."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from plaudit_wire.messages import Announcement, PolicyVersion
from plaudit_workers.training.model.weight_offer import shapes_of
from plaudit_workers.weights.deltas import DELTA_FILE, DeltaRecord
from plaudit_workers.weights.files import WeightFiles
from plaudit_workers.weights.image import CopiedWeights, WeightForm, WeightImage
from plaudit_workers.weights.published import combined_digest


class DeltaSeries:
    """Publishes weights of which each version changes a hundredth.

    Args:
        folder: of the versions.
        tensors: the first version; random ones if None.
        num_files: as many as the trainer has ranks.
        dtype: of the published weights.
    """

    def __init__(
        self,
        folder: Path,
        tensors: dict[str, Tensor] | None = None,
        num_files: int = 2,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.folder = folder
        self.tensors = tensors or {f"t{number}": torch.randn(100, 50) for number in range(4)}
        files = WeightFiles.plan(shapes_of(self.tensors, dtype), "model.safetensors", num_files)
        self._order = files.order
        self._images = [WeightImage(files, rank) for rank in range(num_files)]
        self._last = ""

    def publish(self, version: PolicyVersion, *, whole: bool = False) -> Announcement:
        """Write the next version."""
        for tensor in self.tensors.values() if self._last else ():
            tensor[torch.rand(tensor.shape) < 0.01] *= 1.5
        copied = CopiedWeights.of_ranks(image.replace(self._ordered()) for image in self._images)
        (target := self.folder / str(version)).mkdir(parents=True)
        self.write(target, whole=whole or not self._last, delta=bool(self._last))
        digest = combined_digest(copied.digests)
        if self._last:
            (target / DELTA_FILE).write_bytes(msgspec.json.encode(DeltaRecord(self._last, digest)))
        self._last = str(version)
        return Announcement(version, str(target), digest)

    def write(self, folder: Path, *, whole: bool, delta: bool) -> None:
        """Write the newest version as files."""
        for image in self._images:
            image.write(WeightForm(str(folder), whole, delta))

    def _ordered(self) -> Iterable[tuple[str, Tensor]]:
        return [(name, self.tensors[name]) for name in self._order]
