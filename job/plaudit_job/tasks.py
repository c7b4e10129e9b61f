"""Read Harbor tasks: folders with an instruction, an environment and tests, as data rows.

A task is ``instruction.md``, ``task.toml`` (schema 1.0 to 1.4), ``environment/`` and ``tests/test.sh``; perhaps
``solution/solve.sh``. A field that is not known or not supported is refused by its name: a task that is only half
understood would give wrong rewards.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from plaudit_job.fields import field_name, problem_of
from plaudit_wire.plain import plain, plain_text
from plaudit_wire.printable import printable, shown

TASK_FILE = "task.toml"
INSTRUCTION_FILE = "instruction.md"
TESTS_FILE = "tests/test.sh"
PUBLISHED: Final = "/logs/artifacts"
"""Where an agent leaves artifacts that no task has to name."""
_TAG_DIGITS = 24
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([GMK])", re.ASCII | re.IGNORECASE)
_MEBIBYTES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_SCHEMA = re.compile(r"1\.[0-4](\.\d+)?")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL, which no program can be given: remove it")
    return text


def _of_image(name: str) -> str:
    if name.startswith("-") or any(character.isspace() for character in name):
        raise ValueError("is no name of an image: write what docker pull takes")
    return name


_AbsolutePath = Annotated[str, StringConstraints(pattern=r"^/"), AfterValidator(_without_nul)]
_Name = Annotated[str, StringConstraints(pattern=r"^[^=]+$"), AfterValidator(_without_nul)]
_Value = Annotated[str, StringConstraints(max_length=100_000), AfterValidator(_without_nul)]
_Text = dict[_Name, _Value]


class TaskError(ValueError):
    """A task that cannot be used; the text names the task, the field and the remedy."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Healthcheck(_Strict):
    """A command that succeeds when a machine is ready."""

    command: str
    interval_sec: float = Field(default=5.0, gt=0)
    timeout_sec: float = Field(default=30.0, gt=0)
    start_period_sec: float = Field(default=0.0, ge=0)
    retries: int = Field(default=3, ge=1)


class EnvironmentSection(_Strict):
    """``[environment]``: the machine."""

    docker_image: Annotated[str, AfterValidator(_of_image)] = ""
    cpus: float = Field(default=1, gt=0)
    memory_mb: int = Field(default=2048, gt=0)
    storage_mb: int = Field(default=10240, gt=0)
    gpus: int = Field(default=0, ge=0)
    gpu_types: list[str] = []
    env: _Text = {}
    workdir: _AbsolutePath = "/app"
    healthcheck: Healthcheck | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[str] = []
    allow_internet: bool | None = None
    """The older form of ``network_mode``."""
    build_timeout_sec: float = Field(default=600.0, gt=0)
    os: Annotated[Literal["linux"], BeforeValidator(_lower)] = "linux"

    @model_validator(mode="before")
    @classmethod
    def _older_sizes(cls, given: Any) -> Any:
        """Read ``memory = "2G"`` of older tasks as ``memory_mb``, and ``storage`` likewise."""
        if not isinstance(given, dict):
            return given
        read = dict(given)
        for name in ("memory", "storage"):
            if name in read:
                found = _SIZE.fullmatch(text := str(read.pop(name)).strip())
                size = int(float(found[1]) * _MEBIBYTES[found[2].upper()]) if found else 0
                if read.setdefault(f"{name}_mb", size) != size or not size:
                    raise ValueError(f"{name} is {text!r}: write one size, as {name}_mb")
        return read

    @model_validator(mode="after")
    def _hosts_need_their_mode(self) -> Self:
        if self.allowed_hosts and self.network != "allowlist":
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        return self

    @property
    def network(self) -> Literal["public", "no-network", "allowlist"]:
        """Return the mode in either form; public is Harbor's default."""
        if self.network_mode is not None:
            return self.network_mode
        return "no-network" if self.allow_internet is False else "public"


class AgentSection(_Strict):
    """``[agent]``."""

    timeout_sec: float = Field(default=600.0, gt=0)
    user: str | int | None = None


class VerifierSection(_Strict):
    """``[verifier]``: the tests."""

    timeout_sec: float = Field(default=600.0, gt=0)
    env: _Text = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    """None: separate exactly where ``environment`` is given."""
    environment: EnvironmentSection | None = None
    """The machine of separate tests; None: one as the agent's."""

    @property
    def is_separate(self) -> bool:
        """Tell whether the tests run in a machine of their own, with the artifacts alone."""
        return self.environment is not None or self.environment_mode == "separate"

    @model_validator(mode="after")
    def _one_mode(self) -> VerifierSection:
        if self.environment is not None and self.environment_mode == "shared":
            raise ValueError("environment_mode is shared, so there must be no verifier.environment")
        return self


def _of_artifact(path: str) -> str:
    """Return the normal form of an artifact's path; refuse what the tests' machine has to keep for itself."""
    found = PurePosixPath("/", path.lstrip("/"))
    if not path.startswith("/") or ".." in found.parts or "\0" in path:
        raise ValueError("is no absolute path without '..'")
    is_kept = str(found) in _KEPT_FOLDERS or any(found.is_relative_to(above) for above in _KEPT_TREES)
    if is_kept:
        raise ValueError("would replace tests, programs or what belongs to the machine: name what the agent makes")
    return str(found)


_KEPT_FOLDERS = (
    *("/", "/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/logs", "/sbin"),
    *("/usr", "/usr/bin", "/usr/lib", "/usr/local", "/usr/local/bin", "/usr/local/lib", "/usr/local/sbin", "/usr/sbin"),
)
_KEPT_TREES = ("/dev", "/logs/verifier", "/plaudit", "/proc", "/run", "/solution", "/sys", "/tests")


class Artifact(_Strict):
    """A file or folder that the agent leaves for separate tests."""

    source: Annotated[str, AfterValidator(_of_artifact)]
    destination: str = ""
    """Where Harbor keeps it on the host; it has no effect here."""
    service: Literal["main"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_path(cls, given: Any) -> Any:
        return {"source": given} if isinstance(given, str) else given


class TaskConfig(_Strict):
    """The whole ``task.toml``; ``metadata`` and its kin describe the task for people."""

    schema_version: str = "1.0"
    version: str = ""
    name: str = ""
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    source: str = ""
    environment: EnvironmentSection = EnvironmentSection()
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    solution: dict[str, Any] = {}
    artifacts: list[Artifact] = []


@dataclass(frozen=True)
class Task:
    """One task."""

    folder: Path
    instruction: str
    config: TaskConfig
    digest: str
    """SHA-256 over the names and contents of its files, as hexadecimal digits."""

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return self.folder.name

    @property
    def has_dockerfile(self) -> bool:
        """Tell whether its image is to be built from ``environment/Dockerfile``."""
        return (self.folder / "environment" / "Dockerfile").exists()

    @property
    def needed_image(self) -> str:
        """Return in words the image that it cannot run without; empty for a task that needs none."""
        if image := self.config.environment.docker_image:
            return f"the image {image}"
        return "an image of its environment/Dockerfile" if self.has_dockerfile else ""

    @property
    def given_files(self) -> Path | None:
        """Return the folder whose files its machine begins with; None where an image built from it has them."""
        given = self.folder / "environment"
        return given if given.is_dir() and not self.has_dockerfile else None

    def image(self, registry: str = "localhost") -> str:
        """Return the image that it names or, for one to build, a tag that changes with ``environment/``; else empty."""
        if self.config.environment.docker_image or not self.has_dockerfile:
            return self.config.environment.docker_image
        return self._built(registry, "environment")

    @property
    def agent_limit_s(self) -> float:
        """Return the seconds that it gives its agent; infinite where it names none."""
        agent = self.config.agent
        return agent.timeout_sec if "timeout_sec" in agent.model_fields_set else math.inf

    @property
    def tests_environment(self) -> EnvironmentSection | None:
        """Return what the machine of separate tests is like; None for tests in the agent's machine."""
        verifier = self.config.verifier
        return (verifier.environment or self.config.environment) if verifier.is_separate else None

    def tests_image(self, registry: str = "localhost") -> str:
        """Return the image that separate tests have for themselves, as ``image`` does; empty: the agent's."""
        named = self.config.verifier.environment.docker_image if self.config.verifier.environment else ""
        if named or self.tests_environment is None or not (self.folder / "tests" / "Dockerfile").exists():
            return named
        return self._built(registry, "tests")

    def images_to_build(self, registry: str) -> dict[str, Path]:
        """Return the folder of each image that is to be built before the task can run."""
        built = {self.image(registry): "environment", self.tests_image(registry): "tests"}
        return {image: self.folder / part for image, part in built.items() if image == self._built(registry, part)}

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Return the absolute paths of what separate tests get of the agent's machine."""
        return tuple(dict.fromkeys([PUBLISHED, *(artifact.source for artifact in self.config.artifacts)]))

    def _built(self, registry: str, part: str) -> str:
        return f"{registry}/plaudit-task:{_digest(self.folder / part)[:_TAG_DIGITS]}"

    def row(self) -> dict[str, Any]:
        """Return the task as a data row in verl's columns."""
        return {
            "data_source": str(self.config.metadata.get("category") or "harbor"),
            "prompt": [{"role": "user", "content": self.instruction}],
            "reward_model": {"ground_truth": None},
            "extra_info": {"task": str(self.folder), "digest": self.digest},
        }


def read_tasks(folder: Path) -> Iterator[Task]:
    """Yield the tasks of a folder by name, or the folder itself if it is one; raise ``TaskError``."""
    if not folder.is_dir():
        raise TaskError(f"there is no folder {folder}. Give a Harbor task or a folder of them")
    if (folder / TASK_FILE).is_file():
        yield read_task(folder)
        return
    found = sorted(path.parent for path in folder.glob(f"*/{TASK_FILE}"))
    deeper = {path.parent.parent for path in folder.glob(f"*/*/{TASK_FILE}")}.difference(found)
    if deeper:
        where = min(deeper).name
        raise TaskError(f"{folder} holds tasks one level deeper, in {where}: move them up, or give that folder")
    if not found:
        raise TaskError(f"{folder} holds no Harbor task: none of its folders has a {TASK_FILE}")
    yield from map(read_task, found)


def read_task(folder: Path) -> Task:
    """Read one task; raise ``TaskError``."""
    name = folder.name
    if plain_text(str(folder)) != str(folder):
        raise TaskError(f"task {printable(name)}: its path is no UTF-8. Rename it")
    for needed in (INSTRUCTION_FILE, TASK_FILE, TESTS_FILE):
        if not (folder / needed).is_file():
            raise TaskError(f"task {name}: there is no {needed}. A task needs one")
    for part in (INSTRUCTION_FILE, TASK_FILE, "tests", TESTS_FILE, "environment", "solution"):
        if not Path(os.path.realpath(folder / part)).is_relative_to(os.path.realpath(folder)):
            raise TaskError(f"task {name}: {part} is a link out of the task's folder. Copy what it points to")
    reading = INSTRUCTION_FILE
    try:
        instruction = (folder / reading).read_text(encoding="utf-8-sig").strip()
        reading = TASK_FILE
        raw = plain(tomllib.loads((folder / reading).read_text(encoding="utf-8-sig")), reading)
    except RecursionError as error:
        raise TaskError(f"task {name}: {TASK_FILE} is nested too deeply: make it flatter") from error
    except (OSError, ValueError) as error:  # also integers of more than 4300 digits
        raise TaskError(f"task {name}: {reading} cannot be read: {error}") from error
    if not instruction:
        raise TaskError(f"task {name}: {INSTRUCTION_FILE} is empty. Write what the agent has to do")
    config = _config(name, raw)
    _refuse_unsupported(name, folder)
    return Task(folder.resolve(), instruction, config, _digest(folder))


def expand(values: Mapping[str, str], environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables with ``${NAME}`` and ``${NAME:-default}`` filled in; raise ``TaskError`` if one is unset."""

    def filled(match: re.Match[str]) -> str:
        value = environment.get(match[1], match[2])
        if value is None:
            raise TaskError(f"the variable {match[1]} is not set: set it, or write ${{{match[1]}:-default}}")
        return value

    return {name: _VARIABLE.sub(filled, value) for name, value in values.items()}


_UNSUPPORTED = {
    ("steps",): "tasks of several steps are not supported: split it into one task a step",
    ("environment", "tpu"): "TPUs are not supported: remove it",
    ("environment", "mcp_servers"): "MCP servers of a task are not supported: give them to the job as tools",
    ("verifier", "collect"): "commands before artifacts are collected are not supported: let the agent write the files",
    ("verifier", "environment", "mcp_servers"): "MCP servers of tests are not supported: remove them",
    ("verifier", "environment", "tpu"): "TPUs are not supported: remove it",
}


def _config(name: str, raw: dict[str, Any]) -> TaskConfig:
    for path, remedy in _UNSUPPORTED.items():
        part: Any = raw
        for key in path:
            part = part.get(key) if isinstance(part, dict) else None
        if part:
            raise TaskError(f"task {name}: {TASK_FILE}: {'.'.join(path)}: {remedy}")
    version = str(raw.get("schema_version", "1.0"))
    if not _SCHEMA.fullmatch(version):
        raise TaskError(f"task {name}: {TASK_FILE}: schema_version {shown(version)} is unknown. Known are 1.0 to 1.4")
    try:
        return TaskConfig.model_validate(raw)
    except ValidationError as error:
        raise TaskError(f"task {name}: {TASK_FILE}: {_problem(error.errors()[0])}") from error


def _problem(error: ErrorDetails) -> str:
    """Describe an error of a field as those of a job's file."""
    location = tuple(part for part in error["loc"] if part != "[key]")
    if error["type"] == "extra_forbidden":
        return f"{field_name(location)}: is unknown: remove it"
    if error["type"] == "value_error":  # of the functions above
        return f"{field_name(location)}: {error['ctx']['error']} ({shown(error['input'])})"
    return str(problem_of([error], TaskConfig, location))


def _refuse_unsupported(name: str, folder: Path) -> None:
    for file in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml"):
        if (folder / "environment" / file).exists():
            raise TaskError(f"task {name}: environment/{file}: several containers are not supported. Use one image")


def _digest(folder: Path) -> str:
    """Return the digest of all files and links, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink() or path.is_file()):
        is_link = path.is_symlink()
        content = os.fsencode(os.readlink(path)) if is_link else path.read_bytes()
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0%d\0" % len(content) + b"->" * is_link + content)
    return digest.hexdigest()
