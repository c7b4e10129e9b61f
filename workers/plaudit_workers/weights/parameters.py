"""Read rows of a model's parameters from its files, renamed and converted as transformers does.

Files of mixtures of experts have a tensor for each expert, the model one for all. Its rows are whole experts, so a rank
reads the tensors of its own. Other conversions (a transposed, split or fused tensor) are made of the whole parameter,
whose rows are then taken: at most one such parameter exists at a time. The mapping and its operations are transformers'
(``conversion_mapping``, ``core_model_loading``).
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

if TYPE_CHECKING:
    from plaudit_workers.weights.send import TensorParts


class ModelFiles:
    """Read the tensors of a model's files by name."""

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


@dataclass(frozen=True)
class _Conversion:
    """Hold tensors of the files that are converted together."""

    converter: WeightConverter
    """transformers' operations."""
    target: str
    """Name of the parameter, of several the first."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Pattern of the converter → names in the files, in their order."""

    @property
    def by_rows(self) -> bool:
        """Return True if row i of the parameter consists of tensor i of each pattern, one behind the other."""
        first, *further = self.converter.operations
        stacked = isinstance(first, MergeModulelist) and first.dim == 0
        return stacked and len(further) < 2 and all(isinstance(each, Concatenate) and each.dim == 1 for each in further)

    @property
    def names_by_row(self) -> list[str]:
        """Return the names in the files in the order of the parameter's bytes, if it is stored by rows."""
        patterns = [each for each in self.converter.source_patterns if each in self.sources]
        return [name for row in zip(*(self.sources[each] for each in patterns), strict=True) for name in row]

    def convert(
        self, model: PreTrainedModel, sources: Mapping[str, list[str]], read: Callable[[str], Tensor]
    ) -> dict[str, Tensor]:
        """Return the converted tensors by the names of their parameters."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, partial(read, name))  # type: ignore[arg-type]
        found: dict[str, Any] = converter.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in found.items()}


class StoredParameters:
    """Read the parameters and stored buffers of a model from its files.

    Args:
        model: whose configuration and shapes the conversions read.
        plain: name of each parameter that is stored as it is → name in the files.
        converted: name of each other parameter → its conversion.
        names: every name of a parameter, tied ones have several → the one of ``plain`` or ``converted``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        files: ModelFiles,
        plain: Mapping[str, str],
        converted: Mapping[str, _Conversion],
        names: Mapping[str, str],
    ) -> None:
        self._model = model
        self._files = files
        self._plain = plain
        self._converted = converted
        self._names = names

    @classmethod
    def find(cls, model: PreTrainedModel, files: ModelFiles) -> Self | None:
        """Find every parameter and stored buffer, a tied one under any of its names.

        Args:
            model: as transformers builds it, its parameters on the meta device.

        Returns:
            None if one is missing, or has another shape.
        """
        tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
        plain, conversions = _sources(model, files.names, tensors)
        shapes = {name: files.shape(own) for name, own in plain.items()}
        converted: dict[str, _Conversion] = {}
        for conversion in conversions:
            made = _shapes(conversion, model, files)
            shapes |= made
            converted |= dict.fromkeys(made, conversion)
        fitting = {name: tensor for name, tensor in tensors.items() if shapes.get(name) == tuple(tensor.shape)}
        known = {id(tensor): name for name, tensor in fitting.items()}
        if any(id(tensor) not in known for tensor in tensors.values()):
            return None
        names = {name: name if name in fitting else known[id(tensor)] for name, tensor in tensors.items()}
        return cls(model, files, plain, converted, names)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Read ``count`` rows of a parameter, in the precision in which they are stored, or in float32."""
        own = self._names[name]
        if own not in self._converted:
            return self._files.rows(self._plain[own], first, count)
        conversion = self._converted[own]
        if conversion.by_rows:
            sources = {pattern: names[first : first + count] for pattern, names in conversion.sources.items()}
            return conversion.convert(self._model, sources, self._files.whole)[own]
        # In float32 before the operations, as transformers does: they may compute.
        whole = conversion.convert(self._model, conversion.sources, lambda name: self._files.whole(name).float())[own]
        return whole[first : first + count] if whole.dim() else whole

    def published(self) -> dict[str, TensorParts]:
        """Return the names and shapes of each parameter in the files, where it has others in the model.

        An engine that reads the files of the model reads its new weights under the same names; some know no others.
        Left out are tied parameters that the files hold under another of their names, and those whose tensors in the
        files do not consist of the parameter's bytes.
        """
        own = [name for name, known in self._names.items() if name == known]
        stored = {name: names for name in own if (names := self._stored_names(name)) not in ([], [name])}
        return {name: tuple((each, self._files.shape(each) or ()) for each in names) for name, names in stored.items()}

    def _stored_names(self, name: str) -> list[str]:
        if name not in self._converted:
            return [self._plain[name]]
        return self._converted[name].names_by_row if self._converted[name].by_rows else []


def _shapes(conversion: _Conversion, model: PreTrainedModel, files: ModelFiles) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the converted tensors by name, without reading any; empty if they do not fit together."""
    try:
        converted = conversion.convert(
            model, conversion.sources, lambda name: torch.empty(files.shape(name) or (), device="meta")
        )
    except Exception:  # an operation of transformers; loading the model whole reports what is wrong
        return {}
    return {name: tuple(tensor.shape) for name, tensor in converted.items()}


def _sources(
    model: PreTrainedModel, names: Iterable[str], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], list[_Conversion]]:
    """Assign the tensors of the files to parameters, as ``convert_and_load_state_dict_in_model`` does."""
    transforms = get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    plain: dict[str, str] = {}
    conversions: dict[str, _Conversion] = {}
    rename = partial(rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=dict(tensors))
    for stored in sorted(names, key=dot_natural_key):
        name, pattern = rename(stored, renamings, converters)
        if name not in tensors and stored in tensors:
            name, pattern = rename(stored, [], [])
        if name not in tensors:
            continue
        if pattern is None:
            plain.setdefault(name, stored)
            continue
        conversion = conversions.setdefault(name, _Conversion(by_pattern[pattern], name))
        conversion.sources.setdefault(pattern, []).append(stored)
    return plain, list(conversions.values())
