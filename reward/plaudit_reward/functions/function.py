"""Load a user's file, find the function, call it, and type its result or its error.

Runs only in the child processes of ``isolation``; a worker never imports a user's file. The processes get chosen
environment variables, so that no key leaks.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import errno
import faulthandler
import importlib.util
import inspect
import operator
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

from plaudit_reward.functions.forms import (
    ONE_SCORE,
    SERVED_PARAMETERS,
    Caller,
    LoggedResult,
    caller,
    named,
    parameters_of,
    recognise,
    required_columns,
    served_arguments,
    takes_any,
)
from plaudit_reward.functions.result import Description, Target, to_score, to_scores
from plaudit_reward.scorer import Score
from plaudit_wire.errors import ConfigurationError, InfrastructureError, ScoreTimeoutError
from plaudit_wire.plain import error_text, plain_text
from plaudit_wire.records import Sample

USER_MODULE = "plaudit_user_file_"
"""Beginning of the names of users' files as modules."""


def user_files(path: str) -> dict[str, bytes]:
    """Return, by path, the content of a Python file and of the modules beside it that it and they import.

    Imports within functions count, names that only the running program computes do not. What cannot be read is left to
    the import, which says why.
    """
    found: dict[str, bytes] = {}
    waiting = [(Path(path), "")] if Path(path).is_file() else []
    folder = Path(path).resolve().parent if waiting else Path()
    while waiting:
        file, package = waiting.pop()
        if str(file) in found or not file.is_file():
            continue
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            content = found[str(file)] = file.read_bytes()
            for name in _imported(ast.parse(content), package):
                parts = name.split(".")
                for place in range(len(parts)):
                    inside = folder.joinpath(*parts[: place + 1])
                    waiting.append((inside / "__init__.py", ".".join(parts[: place + 1])))
                    waiting.append((Path(f"{inside}.py"), ".".join(parts[:place])))
    return found


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the names that a module of a package imports; some name no module but what one holds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with contextlib.suppress(ImportError):  # of a package that is not this one's
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                yield from (f"{module}.{alias.name}" for alias in node.names)


_kept: dict[str, bytes] = {}


def keep_content(files: Mapping[str, bytes]) -> None:
    """Import files from now on with this content (``user_files``), whatever becomes of them meanwhile."""
    _kept.update(files)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _KeptModules())


class _KeptModules(MetaPathFinder):
    """Find modules as Python does; load those that have changed from the content that was kept."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path)
        kept = _kept.get(spec.origin or "") if spec is not None else None
        if spec is not None and spec.origin is not None and kept is not None and Path(spec.origin).read_bytes() != kept:
            spec.loader = _KeptLoader(spec.origin)
        return spec


class _KeptLoader(SourceLoader):
    def __init__(self, path: str) -> None:
        self._path = path

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str) -> bytes:
        return _kept[path]


def import_user_file(path: str, what: str = "reward file") -> ModuleType:
    """Import a Python file, which may import files beside it; raise ``ConfigurationError`` if that fails."""
    file, source = Path(path), _kept.get(path)
    if source is None and not file.is_file():
        raise ConfigurationError(
            f"{what} {path} does not exist. Paths in a job are relative to the job file; on Kubernetes the file "
            "comes from spec.files, the image or the volume"
        )
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"{USER_MODULE}{file.stem}"
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise ConfigurationError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        if source is not None:
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)  # noqa: S102 (what an import does)
        else:
            specification.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigurationError(f"{path}, line {error.lineno}: {error.msg}") from error
    except BaseException as error:  # the user's module: sys.exit at import included
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f" (line {lines[-1]})" if lines else ""
        remedy = f". Install it for {sys.executable}" if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigurationError(f"{path} cannot be imported: {error_text(error)}{line}{remedy}") from error
    return module


_INFRASTRUCTURE = frozenset(
    {
        "requests.exceptions.ChunkedEncodingError",
        "requests.exceptions.ConnectionError",
        "requests.exceptions.Timeout",
        "urllib3.exceptions.HTTPError",
        "httpx.TransportError",
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "aiohttp.client_exceptions.ServerTimeoutError",
        "openai.APIConnectionError",
        "openai.RateLimitError",
        "openai.InternalServerError",
        "anthropic.APIConnectionError",
        "anthropic.RateLimitError",
        "anthropic.InternalServerError",
        "redis.exceptions.ConnectionError",
        "redis.exceptions.TimeoutError",
        "websockets.exceptions.ConnectionClosed",
        "asyncio.exceptions.IncompleteReadError",
        "http.client.BadStatusLine",
        "http.client.IncompleteRead",
        "socket.gaierror",
        "ssl.SSLError",
        "urllib.error.URLError",
    }
)
_BUILT_IN_INFRASTRUCTURE = (InfrastructureError, ConnectionError, TimeoutError, MemoryError)
_RETRIABLE_STATUS = frozenset({408, 425, 429})
_NO_NETWORK = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})


def is_infrastructure(error: BaseException) -> bool:
    """Return True if a service that the function called failed, False if the sample did.

    Client libraries are recognised by the names of their exception classes, so none of them must be installed. A group
    of exceptions, as ``asyncio.TaskGroup`` raises it, is a service's if each of them is.
    """
    if isinstance(error, BaseExceptionGroup):
        return all(is_infrastructure(each) for each in error.exceptions)
    if isinstance(error, _BUILT_IN_INFRASTRUCTURE) or (isinstance(error, OSError) and error.errno in _NO_NETWORK):
        return True
    status = _status(error)
    if status is not None:
        return status >= 500 or status in _RETRIABLE_STATUS
    return any(_qualified(base) in _INFRASTRUCTURE for base in type(error).__mro__)


def failed_score(error: BaseException, path: str) -> Score:
    """Return the score of a call that raised; the reason names the line in the user's file ``path``. Never raises."""
    reason = error_text(error)
    try:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if frames:
            reason += plain_text(f" ({path}:{frames[-1].lineno} in {frames[-1].name})")
        if isinstance(error, ScoreTimeoutError):
            return Score.failed("timeout", reason)
        return Score.failed("infra_error" if is_infrastructure(error) else "data_error", reason)
    except BaseException:  # the error's own code, such as a property that raises
        return Score.failed("data_error", reason)


def _status(error: Any) -> int | None:
    for holder in (error, getattr(error, "response", None)):
        for field in ("status_code", "status", "code"):
            status = getattr(holder, field, None)
            if isinstance(status, int) and 400 <= status < 600:
                return status
    return None


def _qualified(kind: type) -> str:
    # httpx and openai show their classes under the package's own name, whatever file defines them.
    package = kind.__module__.split(".", 1)[0]
    name = f"{kind.__module__}.{kind.__name__}"
    return name if name in _INFRASTRUCTURE else f"{package}.{kind.__name__}"


POST_PROCESS = "post_process_scores"
"""The method of a stateful class that sees the values of a whole group (verl pull request #2854)."""
_METHODS = ("compute_score", "score", "__call__")


_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


class UserFunction:
    """Load and call a user's function; raise ``ConfigurationError`` if the file cannot be imported or lacks it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._where = f"{target.function} in {target.path}"
        self._found = _find(import_user_file(target.path), target)
        called = _method_of(self._found, self._where) if inspect.isclass(self._found) else self._found
        self.is_async = any(map(inspect.iscoroutinefunction, (called, getattr(called, "__call__", None))))  # noqa: B004
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise ConfigurationError(f"{self._where} yields: it is a generator, which no score comes from. Return it")
        self._call: Caller
        self._post_process: Callable[[list[float]], Any] | None = None
        self._one_score = True
        self._timers: list[int] = []
        self._loops = threading.local()

    def prepare(self) -> Description:
        """Create the class's instance and recognise the signature; an async class needs a running event loop.

        Raises ``ConfigurationError`` if the class cannot be instantiated, or the signature does not fit.
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
        self._timers = [timer for timer in _TIMERS if signal.getitimer(timer)[0] == 0.0]
        return Description(
            form=form,
            is_async=self.is_async,
            isolation=self.target.isolation or ("inline" if self.is_async else "process"),
            post_processes=self._post_process is not None,
        )

    def check(self) -> tuple[str, ...]:
        """Return the columns of the data that the function requires, without making an instance of a class.

        Raises ``ConfigurationError`` if the signature does not fit, or the class's constructor lacks an argument.
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

        ``values`` are those of the samples, see ``forms.Caller``; of the group for ``post_process``.
        """
        if not post_process:
            return self._settled(self._call(samples, values))
        if self._post_process is None:
            raise ConfigurationError(f"{self._where} has no {POST_PROCESS}")
        return self._settled(self._post_process(list(values)))

    def stop_timers(self) -> None:
        """Stop the timers that a call left behind: they would interrupt or end another sample's call.

        Those that already run when the file is loaded, such as a profiler's, go on.
        """
        for timer in self._timers:
            signal.setitimer(timer, 0.0)
        faulthandler.cancel_dump_traceback_later()

    def _settled(self, returned: Any) -> Any:
        """Return the result of a coroutine that a plain function returned, where no event loop will await it."""
        if self.is_async or not inspect.isawaitable(returned) or asyncio._get_running_loop() is not None:
            return returned
        if not hasattr(self._loops, "runner"):
            self._loops.runner = asyncio.Runner()  # one for each thread, so that a client keeps its event loop
        return self._loops.runner.run(awaited(returned))

    def scores(self, returned: Any, count: int, *, post_process: bool = False) -> list[Score]:
        """Convert the (awaited) result of ``call``: one score for each sample.

        Raises ``DataError`` if the function logged a column that has not one value for each sample.
        """
        if isinstance(returned, LoggedResult):
            return returned.add_to(to_scores(returned.result, count))
        return [to_score(returned)] if self._one_score and not post_process else to_scores(returned, count)

    def failed(self, error: BaseException, count: int) -> list[Score]:
        """Return the scores of a call that raised."""
        return [failed_score(error, self.target.path)] * count

    def _served_parameters(self) -> list[str]:
        """Return those of verl's parameters for a served model that the function, or its class, accepts.

        Raises ``ConfigurationError`` if the job serves a model for the function, and it accepts none of them.
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
        except BaseException as error:  # the user's code: sys.exit and the like included
            raise ConfigurationError(
                f"{self._where} cannot be instantiated: {error_text(error)}. Its arguments come from "
                "python.arguments in the job"
            ) from error
        return instance, {k: v for k, v in arguments.items() if k not in own}

    def _own_arguments(self, found: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return those arguments that the class's constructor takes; the others go to each call."""
        parameters = parameters_of(found)
        return {k: v for k, v in arguments.items() if k in named(parameters) or takes_any(parameters)}


async def awaited(returned: Any) -> Any:
    """Return what a function returned, awaited where it can be."""
    return await returned if inspect.isawaitable(returned) else returned


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


FURTHER = "PLAUDIT_FUNCTION_ENVIRONMENT"
"""Variable of the worker: names that user functions get besides, separated by commas; ``MY_*`` stands for many."""
_SECRET = ("PLAUDIT_SECRET*", "PLAUDIT_REDIS*")
"""Passwords and keys of the job, and the files that hold them: no name in ``FURTHER`` lets these through."""
_ALLOWED = (
    # the user, the system and Python
    "PATH HOME USER LOGNAME SHELL PWD HOSTNAME TERM LANG LANGUAGE LC_* TZ TMPDIR TMP TEMP XDG_*",
    "VIRTUAL_ENV LD_LIBRARY_PATH LD_PRELOAD PYTHON* MALLOC_*",
    # the network
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy",
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE",
    # threads, devices and caches of numerical libraries
    "OMP_* KMP_* GOMP_* MKL_* OPENBLAS_* NUMEXPR_* CUDA_* NVIDIA_* NCCL_* TORCH* PYTORCH_*",
    "HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_CACHE HF_DATASETS_OFFLINE",
    "TRANSFORMERS_CACHE TRANSFORMERS_OFFLINE TOKENIZERS_PARALLELISM NLTK_DATA MPLCONFIGDIR",
    # what a function may want to write beside its output
    "PLAUDIT_RUN PLAUDIT_WORKER",
    # the URLs of the job's environments
    "PLAUDIT_ENVIRONMENT_*",
)


def function_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that a process that runs user functions gets, by an allow-list.

    ``HF_TOKEN``, ``AWS_…``, ``OPENAI_API_KEY`` and the like are left out unless ``PLAUDIT_FUNCTION_ENVIRONMENT`` among
    them names them.
    """
    further = [name.strip() for name in environment.get(FURTHER, "").split(",") if name.strip()]
    allowed = [*" ".join(_ALLOWED).split(), *further]
    return {
        name: value for name, value in environment.items() if _matches(name, allowed) and not _matches(name, _SECRET)
    }


def _matches(name: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
