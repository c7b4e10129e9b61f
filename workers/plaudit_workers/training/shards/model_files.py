"""Read rows of tensors from the safetensors files of a model, without loading the files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file


class ModelFiles:
    """Read the tensors of a model's files by name.

    Raises:
        OSError: a file cannot be read.
        SafetensorError: a file is damaged.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    @classmethod
    def find(cls, source: str, revision: str | None) -> Self | None:
        """Return the files of a model; None if it has none in this format, or they cannot be read."""
        try:
            whole = cached_file(
                source, SAFE_WEIGHTS_NAME, revision=revision, _raise_exceptions_for_missing_entries=False
            )
            if whole is not None:
                return cls([Path(whole)])
            index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
            names = sorted(set(json.loads(Path(str(index)).read_text())["weight_map"].values()))
            return cls([Path(str(cached_file(source, name, revision=revision))) for name in names])
        except (OSError, ValueError, KeyError, SafetensorError):
            return None  # loading the model whole reports what is wrong

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; None if the files do not have it."""
        return tuple(self._files[name].get_slice(name).get_shape()) if name in self._files else None

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Read ``count`` rows of a tensor, in the precision in which they are stored."""
        part = self._files[name].get_slice(name)
        rows: Tensor = part[first : first + count] if part.get_shape() else self._files[name].get_tensor(name)
        return rows

    def whole(self, name: str) -> Tensor:
        """Read a tensor, in the precision in which it is stored."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor
