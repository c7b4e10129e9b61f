"""Load a user's file, find the function, recognise its signature, call it, and type its result.

Runs only in the child processes of ``isolation``; a worker never imports a user's file.
"""

from __future__ import annotations

import ast
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from plaudit_reward.functions.failure import failed_score
from plaudit_reward.functions.forms import ONE_SCORE, Caller, caller, required_columns
from plaudit_reward.functions.logged import LoggedResult
from plaudit_reward.functions.result import to_score, to_scores
from plaudit_reward.functions.served_model import SERVED_PARAMETERS, served_arguments
from plaudit_reward.functions.signature import named, parameters_of, recognise, takes_any
from plaudit_reward.functions.target import Description, Target
from plaudit_reward.functions.user_file import import_user_file
from plaudit_reward.score import Score
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.sample import Sample

POST_PROCESS = "post_process_scores"
"""The method of a stateful class that sees the values of a whole group (verl pull request #2854)."""

_METHODS = ("compute_score", "score", "__call__")


class UserFunction:
    """Load and call a user's function.

    Raises:
        ConfigurationError: the file cannot be imported or has no such function.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._where = f"{target.function} in {target.path}"
        self._found = _find(import_user_file(target.path), target)
        self.is_async = _is_async(_method_of(self._found, self._where) if inspect.isclass(self._found) else self._found)
        self._call: Caller
        self._post_process: Callable[[list[float]], Any] | None = None
        self._one_score = True

    def prepare(self) -> Description:
        """Create the class's instance and recognise the signature; an async class needs a running event loop.

        Raises:
            ConfigurationError: the class cannot be instantiated, or the signature does not fit.
        """
        function = self._found
        accepted = self._served_parameters()
        given = served_arguments(self.target.served, accepted) if self.target.served else {}
        arguments = {**self.target.arguments, **given}
        if inspect.isclass(function):
            instance, arguments = self._instance(function, arguments)
            function = getattr(instance, _method_of(instance, self._where).__name__)
            if self.target.scope == "sample":
                self._post_process = getattr(instance, POST_PROCESS, None)
        form = recognise(function, self.target.scope, arguments, self._where)
        self._call = caller(form, function, arguments)
        self._one_score = form in ONE_SCORE
        return Description(
            form=form,
            is_async=self.is_async,
            isolation=self.target.isolation or ("inline" if self.is_async else "process"),
            post_processes=self._post_process is not None,
        )

    def check(self) -> tuple[str, ...]:
        """Recognise the signature as ``prepare`` does, without making an instance of a class.

        Returns:
            The columns of the data that the function requires.

        Raises:
            ConfigurationError: the signature does not fit, or the class's constructor lacks an argument.
        """
        function = self._found
        arguments = {**self.target.arguments, **dict.fromkeys(self._served_parameters())}
        if inspect.isclass(function):
            own = self._own_arguments(function, arguments)
            for name, parameter in named(parameters_of(function)).items():
                if parameter.default is parameter.empty and name not in own:
                    raise ConfigurationError(
                        f"{self._where}: nothing gives its constructor's parameter {name!r} a value: set "
                        f"python.arguments.{name} in the job, or give it a default"
                    )
            method = _method_of(function, self._where)
            static = isinstance(inspect.getattr_static(function, method.__name__), staticmethod | classmethod)
            arguments = {name: value for name, value in arguments.items() if name not in own}
            function = method if static else MethodType(method, object())
        form = recognise(function, self.target.scope, arguments, self._where)
        return required_columns(function, arguments) if form == "trl" else ()

    def call(self, samples: Sequence[Sample], values: Any, *, post_process: bool = False) -> Any:
        """Call the function, or the class's ``post_process_scores``; an async one returns its coroutine.

        Args:
            values: of the samples, see ``forms.Caller``; of the group for ``post_process``.
        """
        if not post_process:
            return self._call(samples, values)
        if self._post_process is None:
            raise ConfigurationError(f"{self._where} has no {POST_PROCESS}")
        return self._post_process(list(values))

    def scores(self, returned: Any, count: int, *, post_process: bool = False) -> list[Score]:
        """Convert the (awaited) result of ``call``: one score for each sample.

        Raises:
            DataError: the function logged a column that has not one value for each sample.
        """
        if isinstance(returned, LoggedResult):
            return returned.add_to(to_scores(returned.result, count))
        return [to_score(returned)] if self._one_score and not post_process else to_scores(returned, count)

    def failed(self, error: BaseException, count: int) -> list[Score]:
        """Return the scores of a call that raised."""
        return [failed_score(error, self.target.path)] * count

    def _served_parameters(self) -> list[str]:
        """Return those of verl's parameters for a served model that the function, or its class, accepts.

        Raises:
            ConfigurationError: the job serves a model for the function, and it accepts none of them.
        """
        if self.target.served is None:
            return []
        places = [self._found]
        if inspect.isclass(self._found):
            places.append(_method_of(self._found, self._where))
        read = [parameters_of(place) for place in places]
        accepted = [name for name in SERVED_PARAMETERS if any(name in each or takes_any(each) for each in read)]
        if not accepted:
            raise ConfigurationError(
                f"{self._where} has neither {' nor '.join(SERVED_PARAMETERS)}: add the parameter, or remove "
                "python.serve, whose model it would not ask"
            )
        return accepted

    def _instance(self, found: type, arguments: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        own = self._own_arguments(found, arguments)
        try:
            instance = found(**own)
        except Exception as error:  # the user's code may raise anything
            raise ConfigurationError(
                f"{self._where} cannot be instantiated: {type(error).__name__}: {error}. Its arguments come from "
                "python.arguments in the job"
            ) from error
        return instance, {k: v for k, v in arguments.items() if k not in own}

    def _own_arguments(self, found: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those arguments that the class's constructor takes; the others go to each call."""
        parameters = parameters_of(found)
        return {k: v for k, v in arguments.items() if k in named(parameters) or takes_any(parameters)}


def declares_post_process(path: str, function: str) -> bool:
    """Return True if ``function`` is a class that defines ``post_process_scores``, without running the file.

    Base classes in the same file count. False for a file that cannot be read; loading it reports the error.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return _declares(function, classes)


def _declares(name: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    node = classes.get(name)
    if node is None:
        return False
    methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return POST_PROCESS in methods or any(
        _declares(base.id, classes) for base in node.bases if isinstance(base, ast.Name) and base.id != name
    )


def _find(module: ModuleType, target: Target) -> Any:
    try:
        found = operator.attrgetter(target.function)(module)
    except AttributeError:
        found = None
    if callable(found):
        return found
    there = sorted(
        name
        for name, item in vars(module).items()
        if not name.startswith("_") and callable(item) and getattr(item, "__module__", None) == module.__name__
    )
    what = "does not exist" if found is None else "is no function"
    raise ConfigurationError(
        f"{target.function} {what} in {target.path}. The file defines {', '.join(there) or 'no function'}: "
        "name one of them in python.function"
    )


def _method_of(found: Any, where: str) -> Callable[..., Any]:
    for name in _METHODS:
        method = getattr(found, name, None)
        if inspect.isfunction(method) or inspect.ismethod(method):
            return method
    raise ConfigurationError(f"class {where} has no method {' or '.join(_METHODS[:2])}: add one")


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
