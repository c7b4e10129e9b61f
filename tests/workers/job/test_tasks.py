"""Harbor tasks: what is read of a folder, and what is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harbor_tasks import write_files
from plaudit_job.tasks import TaskError, expand, read_task, read_tasks

EVERY_FIELD = """
schema_version = "1.4"
name = "org/fix-it"
[task]
name = "org/fix-it"
[metadata]
author = "somebody"
category = "debugging"
tags = ["a"]
[environment]
docker_image = "example.org/task:1"
cpus = 2
memory_mb = 512
storage_mb = 1024
gpus = 0
workdir = "/workspace"
network_mode = "allowlist"
allowed_hosts = ["example.org"]
build_timeout_sec = 30
[environment.env]
KEY = "${KEY:-none}"
[environment.healthcheck]
command = "true"
interval_sec = 1
[agent]
timeout_sec = 120
user = "agent"
[verifier]
timeout_sec = 900.5
user = 0
[verifier.env]
TOKEN = "${TOKEN}"
"""


def write_task(folder: Path, config: str = "", **files: str) -> Path:
    written = {"instruction.md": "Fix it.\n", "task.toml": config, "tests/test.sh": "exit 0", **files}
    return write_files(folder, written)


def test_every_field_of_a_task_is_read(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "fix", EVERY_FIELD))
    environment = task.config.environment
    assert (task.name, task.instruction) == ("fix", "Fix it.")
    assert (environment.docker_image, environment.workdir, environment.network) == (
        "example.org/task:1", "/workspace", "allowlist",
    )  # fmt: skip
    assert (task.config.agent.user, task.config.verifier.timeout_sec) == ("agent", 900.5)
    assert environment.healthcheck is not None
    assert expand(environment.env, {}) == {"KEY": "none"}
    assert expand(task.config.verifier.env, {"TOKEN": "t"}) == {"TOKEN": "t"}
    with pytest.raises(TaskError, match=r"the variable TOKEN is not set: set it, or write \$\{TOKEN:-default\}"):
        expand(task.config.verifier.env, {})
    assert task.row() == {
        "data_source": "debugging",
        "prompt": [{"role": "user", "content": "Fix it."}],
        "reward_model": {"ground_truth": None},
        "extra_info": {"task": str(tmp_path / "fix"), "digest": task.digest},
    }


@pytest.mark.parametrize(
    ("config", "is_separate"),
    [
        ("", False),
        ("[verifier]\nenvironment_mode = 'shared'", False),
        ("[verifier]\nenvironment_mode = 'separate'", True),
        ("[verifier.environment]\ndocker_image = 'example.org/tests:1'", True),
    ],
)
def test_tests_have_a_machine_of_their_own_where_the_task_says_so(
    tmp_path: Path, config: str, is_separate: bool
) -> None:
    task = read_task(write_task(tmp_path, "artifacts = ['/app/out/', {source = '/srv/x'}]\n" + config))
    assert (task.tests_environment is not None) == is_separate
    assert task.artifacts == ("/logs/artifacts", "/app/out", "/srv/x")
    assert task.tests_image() == ("example.org/tests:1" if "docker_image" in config else "")


def test_images_are_built_of_the_environment_and_of_separate_tests(tmp_path: Path) -> None:
    files = {"environment/Dockerfile": "FROM a", "tests/Dockerfile": "FROM b"}
    shared = read_task(write_task(tmp_path / "shared", **files))
    assert set(shared.images_to_build("here").values()) == {tmp_path / "shared" / "environment"}
    assert shared.given_files is None
    separate = read_task(write_task(tmp_path / "own", "[verifier]\nenvironment_mode = 'separate'", **files))
    assert separate.images_to_build("here") == {
        separate.image("here"): tmp_path / "own" / "environment",
        separate.tests_image("here"): tmp_path / "own" / "tests",
    }


@pytest.mark.parametrize(
    ("config", "network"),
    [
        ("", "public"),
        ("[environment]\nallow_internet = false", "no-network"),
        ("[environment]\nnetwork_mode = 'public'\nallow_internet = false", "public"),
    ],
)
def test_an_old_task_says_by_another_field_whether_it_has_a_network(tmp_path: Path, config: str, network: str) -> None:
    assert read_task(write_task(tmp_path, config)).config.environment.network == network


def test_sizes_of_an_old_task_have_units(tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "t", "[environment]\nmemory = '1.5G'\nstorage = '512m'"))
    assert (task.config.environment.memory_mb, task.config.environment.storage_mb) == (1536, 512)


def test_the_digest_follows_the_files(tmp_path: Path) -> None:
    first = read_task(write_task(tmp_path / "a"))
    assert read_task(write_task(tmp_path / "b")).digest == first.digest
    assert read_task(write_task(tmp_path / "b", **{"tests/test.sh": "exit 1"})).digest != first.digest
    assert read_task(write_task(tmp_path / "c", **{"tests/more": ""})).digest != first.digest
    (link := write_task(tmp_path / "d") / "link").symlink_to("task.toml")
    digests = {first.digest, read_task(link.parent).digest}
    link.unlink()
    link.symlink_to("instruction.md")
    assert len(digests | {read_task(link.parent).digest}) == 3


def test_names_that_are_no_utf_8_are_refused_where_they_would_be_rows(tmp_path: Path) -> None:
    task = write_task(tmp_path / "t")
    (task / os.fsdecode(b"tests/\xff")).write_text("of the tests alone")
    assert read_task(task).name == "t"
    with pytest.raises(TaskError, match="its path is no UTF-8"):
        read_task(task.rename(tmp_path / os.fsdecode(b"t\xff")))


def test_tasks_of_a_folder_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_task(tmp_path / name)
    (tmp_path / "notes").mkdir()
    assert [task.name for task in read_tasks(tmp_path)] == ["a", "b", "c"]
    assert [task.name for task in read_tasks(tmp_path / "b")] == ["b"]


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("[environment]\nmemroy_mb = 3", "task t: task.toml: environment.memroy_mb: is unknown: remove it"),
        ("[environment]\ncpus = 0", "task t: task.toml: environment.cpus: 0 is not above 0.0. Give a number above 0.0"),
        (
            "[environment]\nos = 'windows'",
            "task t: task.toml: environment.os: 'windows' is not supported. Give 'linux'",
        ),
        ("[environment]\ndocker_image = '--privileged'", "environment.docker_image: is no name of an image: write"),
        ("[environment]\nworkdir = 'app'", "environment.workdir: 'app' is not an absolute path. Start it with /"),
        ("[environment.tpu]\ntype = 'v5'", "environment.tpu: TPUs are not supported"),
        ("[[steps]]\nname = 'one'", "steps: tasks of several steps are not supported"),
        ("[environment]\nallowed_hosts = ['a.org']", "allowed_hosts needs network_mode = 'allowlist'"),
        ("[environment]\nmemory = '2G'\nmemory_mb = 512", "memory is '2G': write one size, as memory_mb"),
        ("[environment]\nstorage = '2 apples'", "storage is '2 apples': write one size, as storage_mb"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 2", "environment_mode is shared"),
        ("[[verifier.collect]]\ncommand = 'x'", "verifier.collect: commands before artifacts are collected"),
        ("artifacts = ['app/out']", "artifacts[0].source: is no absolute path without '..' ('app/out')"),
        ("artifacts = ['/app/../tests']", "artifacts[0].source: is no absolute path"),
        ("artifacts = ['/tests/helper.sh']", "artifacts[0].source: would replace tests, programs"),
        ("artifacts = ['/app', '//usr/bin/']", "artifacts[1].source: would replace tests, programs"),
        ("artifacts = [{source = '/logs'}]", "artifacts[0].source: would replace tests, programs"),
        ("artifacts = [{source = '/app', service = 'db'}]", "artifacts[0].service: 'db' is not supported. Give 'main'"),
        ("artifacts = [{source = '/app', exclude = ['x']}]", "artifacts[0].exclude: is unknown: remove it"),
        ("schema_version = '2.0'", "schema_version '2.0' is unknown. Known are 1.0 to 1.4"),
        ("[environment", "task t: task.toml cannot be read"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, config: str, error: str) -> None:
    with pytest.raises(TaskError) as refused:
        read_task(write_task(tmp_path / "t", config))
    assert error in str(refused.value)


@pytest.mark.parametrize("file", ["instruction.md", "task.toml", "tests/test.sh"])
def test_a_folder_that_lacks_a_file_is_no_task(tmp_path: Path, file: str) -> None:
    folder = write_task(tmp_path / "t")
    (folder / file).unlink()
    os.mkfifo(folder / file)  # at which whoever opens it would wait for ever
    with pytest.raises(TaskError, match=f"task t: there is no {file}"):
        read_task(folder)


def test_folders_without_tasks_are_refused(tmp_path: Path) -> None:
    for folder, error in ((tmp_path, "holds no Harbor task"), (tmp_path / "none", "there is no folder")):
        with pytest.raises(TaskError, match=error):
            list(read_tasks(folder))
    write_task(tmp_path / "of" / "many" / "sets" / "easy" / "t", **{"environment/task.toml": ""})
    write_task(tmp_path / "of" / "many" / "sets" / "other", **{"environment/task.toml": ""})
    with pytest.raises(TaskError, match="sets holds tasks one level deeper, in easy: move them up, or give that"):
        list(read_tasks(tmp_path / "of" / "many" / "sets"))
    (tmp_path / "of" / "many" / "sets" / "easy").rename(tmp_path / "of" / "easy")
    assert [task.name for task in read_tasks(tmp_path / "of" / "many" / "sets")] == ["other"]
    write_task(tmp_path / "t", **{"environment/docker-compose.yaml": ""})
    with pytest.raises(TaskError, match="several containers are not supported"):
        list(read_tasks(tmp_path))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("x = " + "[" * 5000, "task.toml is nested too deeply"),
        ("[environment]\ncpus = " + "9" * 5000, "cannot be read: Exceeds the limit"),
        ("[environment]\nmemory_mb = 0x" + "f" * 9000, "task.toml.environment.memory_mb: is an integer beyond 64 bits"),
        ("schema_version = 0x" + "f" * 9000, "task.toml.schema_version: is an integer beyond 64 bits"),
        ("[verifier]\ntimeout_sec = inf", "task.toml.verifier.timeout_sec: is inf"),
        ("[environment]\nworkdir = '/app/\\u0000'".replace("'", '"'), "environment.workdir"),
        ('[environment]\nenv = {A = "a\\u0000"}', "environment.env.A"),
        ('[environment]\nenv = {"A=B" = ""}', "environment.env.A=B"),
        (f'[environment]\nenv = {{A = "{"x" * 200_000}"}}', "has 200000 characters. Give at most 100000"),
    ],
)
def test_what_no_machine_can_hold_is_refused_by_name(tmp_path: Path, config: str, error: str) -> None:
    with pytest.raises(TaskError) as raised:
        read_task(write_task(tmp_path / "t", config))
    assert error in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("part", ["instruction.md", "task.toml", "tests", "environment", "solution"])
def test_a_link_out_of_a_task_is_refused(tmp_path: Path, part: str) -> None:
    whole = {"environment/a": "", "solution/solve.sh": ""}
    other, task = write_task(tmp_path / "other", **whole), write_task(tmp_path / "t", **whole)
    (task / part).rename(tmp_path / "moved")
    (task / part).symlink_to(other / part)
    with pytest.raises(TaskError, match=rf"task t: {part} is a link out of the task's folder"):
        read_task(task)


def test_a_byte_order_mark_is_no_part_of_a_task(tmp_path: Path) -> None:
    mark = "\N{ZERO WIDTH NO-BREAK SPACE}"
    task = read_task(write_task(tmp_path / "t", mark + "[environment]\ncpus = 2", **{"instruction.md": mark + "Fix."}))
    assert (task.instruction, task.config.environment.cpus) == ("Fix.", 2)
