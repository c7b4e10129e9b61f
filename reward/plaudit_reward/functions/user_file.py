"""Import Python files of users."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from plaudit_wire.errors import ConfigurationError


def import_user_file(path: str, what: str = "reward file") -> ModuleType:
    """Import a Python file; files beside it can be imported as well.

    Raises:
        ConfigurationError: it is missing, or importing it raises.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigurationError(
            f"{what} {path} does not exist. Paths in a job are relative to the job file; on Kubernetes the file "
            "comes from spec.files, the image or the volume"
        )
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"plaudit_user_file_{file.stem}"
    specification = importlib.util.spec_from_file_location(name, file)
    if specification is None or specification.loader is None:
        raise ConfigurationError(f"{path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigurationError(f"{path}, line {error.lineno}: {error.msg}") from error
    except BaseException as error:  # the user's module: sys.exit at import included
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f" (line {lines[-1]})" if lines else ""
        raise ConfigurationError(f"{path} cannot be imported: {type(error).__name__}: {error}{line}") from error
    return module
