"""Render the judge's prompt: a sandboxed Jinja template over one sample, or over the samples of a group."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from plaudit_wire.errors import ConfigurationError, DataError
from plaudit_wire.sample import Sample

_SHARED = ("prompt", "messages", "ground_truth", "data_source", "extra_info")


class PromptTemplate:
    """Render a template file, read and checked once.

    Its variables are the sample's ``prompt``, ``messages``, ``ground_truth``, ``data_source``, ``extra_info`` and
    ``response``; with ``scope: group`` the list ``responses`` replaces ``response``.

    Raises:
        ConfigurationError: the file cannot be read, is not a template, or names an unknown variable. The message names
            file and line.
    """

    def __init__(self, path: str, *, group: bool = False) -> None:
        self._path = path
        self._group = group
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=False, trim_blocks=True, lstrip_blocks=True
        )
        try:
            source = Path(path).read_text(encoding="utf-8")
            tree = environment.parse(source, filename=path)
            self._check(tree)
            code = environment.compile(source, filename=path)
        except OSError as error:
            raise ConfigurationError(f"prompt template {path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"prompt template {path} is not UTF-8: {error.reason}") from error
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"{path}, line {error.lineno}: {error.message}") from error
        self._template = environment.template_class.from_code(environment, code, environment.globals)

    def render(self, samples: Sequence[Sample]) -> str:
        """Render the prompt for one sample, or for the samples of a group.

        Raises:
            DataError: the template fails on this sample, for instance on a missing item of ``extra_info``.
        """
        first = samples[0]
        shown = {name: getattr(first, name) for name in _SHARED}
        if self._group:
            shown["responses"] = [sample.response for sample in samples]
        else:
            shown["response"] = first.response
        try:
            return self._template.render(shown)
        except Exception as error:  # the user's template: filters and operators raise any exception
            raise DataError(f"{self._path}{self._line(error)}: {_reason(error)}") from error

    def _check(self, tree: nodes.Template) -> None:
        if any(name is not None for name in meta.find_referenced_templates(tree)):
            raise ConfigurationError(
                f"{self._path} includes another file. Copy its text into this one: a judge's prompt is one file"
            )
        known = {*_SHARED, "responses" if self._group else "response"}
        unknown = meta.find_undeclared_variables(tree) - known
        if not unknown:
            return
        name = sorted(unknown)[0]
        line = min(node.lineno for node in tree.find_all(nodes.Name) if node.name == name)
        hint = ""
        if name in {"response", "responses"}:
            hint = f" (scope: {'group' if self._group else 'sample'})"
        raise ConfigurationError(
            f"{self._path}, line {line}: unknown variable {name!r}{hint}. The variables are {', '.join(sorted(known))}"
        )

    def _line(self, error: BaseException) -> str:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self._path]
        return f", line {lines[-1]}" if lines else ""


def _reason(error: BaseException) -> str:
    return str(error.message) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
