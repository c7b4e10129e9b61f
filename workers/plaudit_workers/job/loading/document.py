"""Parse a YAML document into plain data and keep the line of each part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from plaudit_workers.job.problem import JobError, Problem

Location = Sequence[str | int]
"""Keys and indices from the root to a part."""


class Document:
    """Hold one YAML document; ``path`` is for the messages.

    Raises:
        JobError: the text is not YAML, or not one mapping.
    """

    def __init__(self, text: str, path: Path | str = "") -> None:
        self._tree = _parse(text, path)
        self.data: dict[str, Any] = _plain(self._tree)

    def line(self, location: Location) -> int | None:
        """Return the line of a part (from 1), or of the nearest enclosing part; None for the root."""
        node: object = self._tree
        line: int | None = None
        for key in location:
            if isinstance(node, CommentedMap) and key in node:
                line = _line_of_key(node, key) or line
                node = node[key]
            elif isinstance(node, CommentedSeq) and isinstance(key, int) and key < len(node):
                line = node.lc.item(key)[0] + 1
                node = node[key]
            else:
                break
        return line


def _line_of_key(node: CommentedMap, key: str | int) -> int | None:
    """Return the line of a key; merged keys (``<<``) have none."""
    try:
        return int(node.lc.key(key)[0]) + 1
    except KeyError:
        return None


def _parse(text: str, path: Path | str) -> CommentedMap:
    try:
        tree = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        message = " ".join(part for part in (error.context, error.problem) if part)
        raise JobError([_syntax(message, mark.line + 1 if mark else None)], path) from error
    except (ReaderError, YAMLError, ValueError) as error:
        raise JobError([_syntax(str(error).splitlines()[0], None)], path) from error
    except RecursionError as error:
        raise JobError([_syntax("nested too deeply", None)], path) from error
    if not isinstance(tree, CommentedMap):
        kind = "a list" if isinstance(tree, CommentedSeq) else "a single value"
        found = "is empty" if tree is None else f"contains {kind} instead of a mapping"
        raise JobError([Problem("", f"the file {found}", "Start it with apiVersion: and kind: RLJob")], path)
    return tree


def _syntax(message: str, line: int | None) -> Problem:
    return Problem("", f"not valid YAML: {message}", "Fix the syntax (indentation, quotes, brackets)", line)


def _plain(node: Any) -> Any:
    """Return dictionaries, lists and scalars without the attributes of the round-trip loader."""
    if isinstance(node, CommentedMap):
        return {_scalar(key): _plain(value) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [_plain(value) for value in node]
    return _scalar(node)


def _scalar(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value
