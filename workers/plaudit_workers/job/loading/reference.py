"""Write the reference of the RLJob into ``docs/rljob.md``.

Run as ``python -m plaudit_workers.job.loading.reference [--check]``.

The page is written by hand but for the part between two markers, which follows from the models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit_workers.job.loading.schema import job_schema

PAGE = Path(__file__).parents[4] / "docs" / "rljob.md"
BEGIN = "<!-- begin: written by python -m plaudit_workers.job.loading.reference -->"
END = "<!-- end -->"

_RANGE_SIGNS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
_NOT_SHOWN: tuple[Any, ...] = ("", [], {})


def main() -> int:
    """Write the page anew, or with ``--check`` report whether it is up to date."""
    parser = argparse.ArgumentParser(prog="python -m plaudit_workers.job.loading.reference", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the page is out of date")
    parser.add_argument("--file", type=Path, default=PAGE, help="the page (default: docs/rljob.md)")
    arguments = parser.parse_args()
    before = arguments.file.read_text(encoding="utf-8")
    after = updated(before)
    if arguments.check and before != after:
        print(f"{arguments.file} is out of date: run make generate", file=sys.stderr)
        return 1
    if before != after:
        arguments.file.write_text(after, encoding="utf-8")
    return 0


def updated(page: str) -> str:
    """Return the page with the part between the markers written anew.

    Raises:
        ValueError: the page has no markers.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n\n{reference()}\n{END}{tail}"


def reference() -> str:
    """Yield a heading, the docstring and a table of fields for every section, in the order of first use."""
    schema = job_schema()
    sections = schema["$defs"]
    return "\n".join("\n".join(_section(name, part, sections)) for name, part in _sections(schema))


def _sections(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return every section once, under the name of the first field that holds it."""
    seen: set[str] = set()
    waiting = [("", schema)]
    while waiting:
        name, section = waiting.pop(0)
        yield name, section
        inner = []
        for field, described in section["properties"].items():
            reference_, suffix = _reference(described)
            if reference_ and reference_ not in seen:
                seen.add(reference_)
                inner.append((f"{name}.{field}{suffix}".lstrip("."), schema["$defs"][reference_]))
        waiting = inner + waiting


def _reference(described: dict[str, Any]) -> tuple[str, str]:
    """Return the section that a field holds, and ``[]`` when it holds a list of them."""
    if "$ref" in described:
        return described["$ref"].removeprefix("#/$defs/"), ""
    items = described.get("items", {})
    return (items["$ref"].removeprefix("#/$defs/"), "[]") if "$ref" in items else ("", "")


def _section(name: str, section: dict[str, Any], sections: dict[str, Any]) -> Iterator[str]:
    yield f"### {name or 'RLJob'}\n"
    yield f"{section['description']}\n"
    yield "| field | type | default | meaning |"
    yield "| --- | --- | --- | --- |"
    required = section.get("required", [])
    for field, described in section["properties"].items():
        mark = " ✎" if described.get("x-plaudit-mutable") else ""
        default = "required" if field in required else _default(described)
        meaning = described.get("description") or sections[_reference(described)[0]]["description"]
        cell = meaning.replace("|", "\\|")
        yield f"| `{field}`{mark} | {_type(described)} | {default} | {cell} |"
    yield ""


def _default(described: dict[str, Any]) -> str:
    default = described.get("default")
    if default is None or default in _NOT_SHOWN or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _type(described: dict[str, Any]) -> str:
    name, suffix = _reference(described)
    if name:
        return "list of sections" if suffix else "section"
    if "const" in described:
        return f"`{described['const']}`"
    if "enum" in described:
        return " · ".join(f"`{value}`" for value in described["enum"])
    if described.get("type") == "array":
        return f"list of {_type(described['items'])}"
    kind = described.get("type", "integer or string")
    if "minimum" in described and "maximum" in described:
        return f"{kind}, {described['minimum']:,} to {described['maximum']:,}"
    limits = [f"{sign} {described[key]:,}" for key, sign in _RANGE_SIGNS if key in described]
    return " ".join([kind, *limits])


if __name__ == "__main__":
    raise SystemExit(main())
