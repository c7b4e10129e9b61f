"""``plaudit tasks``: tests of Harbor tasks after nothing and after the solution."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from container_images import IMAGE, why_none
from harbor_tasks import TEST, write_sum_task
from namespaces import HAS_NAMESPACES
from plaudit_sandbox.container_engine import find_engine
from plaudit_workers.cli import main

pytestmark = pytest.mark.skipif(not HAS_NAMESPACES, reason="this kernel makes no namespaces for us")
SOLVE = "echo $(($(cat a) + $(cat b))) > sum"


def write_task(folder: Path, test: str = TEST, solve: str = SOLVE, config: str = "", **files: str) -> None:
    write_sum_task(folder, test, config, **{"solution/solve.sh": solve, **files})


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["tasks", str(folder), "--json"])
    return code, {check["task"]: check for check in json.loads(capsys.readouterr().out)}


def test_a_good_task_is_told_from_broken_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "good")
    write_task(tmp_path / "elsewhere", config="[environment]\nworkdir = '/workspace/src'")
    write_task(tmp_path / "given-away", test="echo 1 > /logs/verifier/reward.txt")
    write_task(tmp_path / "unsolvable", solve="echo cannot do it; exit 4")
    write_task(tmp_path / "silent", test="echo no verdict; exit 1")
    write_task(tmp_path / "slow", test="sleep 60", config="[verifier]\ntimeout_sec = 0.3")
    write_task(tmp_path / "read-only", config="[environment]\nworkdir = '/etc'")
    write_task(tmp_path / "a\nb")
    os.mkfifo(tmp_path / "a\nb" / "environment" / "pipe")
    write_task(tmp_path / "unset", config="[verifier.env]\nTOKEN = '${PLAUDIT_TEST_UNSET}'")
    code, checks = checked(tmp_path, capsys)
    assert code == 3
    for name in ("good", "elsewhere", "a\nb"):
        assert (checks[name]["nothing"], checks[name]["solution"], checks[name]["problems"]) == (0.0, 1.0, [])
    assert checks["given-away"]["problems"] == ["an agent that does nothing earns 1"]
    assert checks["unsolvable"]["problems"] == ["the solution earns 0 (solve.sh ended with exit code 4)"]
    assert checks["unsolvable"]["output"] == "cannot do it"
    assert "after an agent that does nothing: the tests wrote neither" in checks["silent"]["problems"][0]
    assert checks["silent"]["output"] == "no verdict"
    assert checks["slow"]["problems"][0] == "after an agent that does nothing: the tests did not end within 0.3 s"
    assert "/etc is no folder that a machine can write to" in checks["read-only"]["problems"][0]
    assert "the variable PLAUDIT_TEST_UNSET is not set" in checks["unset"]["problems"][0]


def test_the_table_ends_with_the_number_of_good_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "good")
    assert main(["tasks", str(tmp_path / "good")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == ["good", "0", "1"]
    assert lines[-1] == "1 of 1 tasks can be trained on"
    (tmp_path / "good" / "solution" / "solve.sh").unlink()
    assert main(["tasks", str(tmp_path / "good")]) == 3
    assert "there is no solution/solve.sh" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "files", "error"),
    [
        ("[environment]\ndocker_image = 'example.org/a:1'", {}, "task t needs the image example.org/a:1"),
        ("", {"environment/Dockerfile": "FROM a"}, "task t needs an image of its environment/Dockerfile"),
        ("[environment]\nmemroy_mb = 1", {}, "environment.memroy_mb: is unknown"),
    ],
)
def test_what_this_host_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, files: dict[str, str], error: str
) -> None:
    write_task(tmp_path / "t", config=config, **files)
    assert main(["tasks", str(tmp_path)]) == 2
    assert error in capsys.readouterr().err


IN_ITS_WORKDIR = {
    "solution/solve.sh": "pwd > sum",
    "tests/test.sh": 'if [ "$(cat sum)" = /work ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt',
}
IN_CONTAINERS = pytest.mark.skipif(bool(why_none()), reason=why_none())


@pytest.mark.containers
@IN_CONTAINERS
def test_tasks_with_an_image_run_in_containers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(
        tmp_path / "named", config=f"[environment]\ndocker_image = '{IMAGE}'\nworkdir = '/work'", **IN_ITS_WORKDIR
    )
    write_task(tmp_path / "tampers", solve="cp /bin/true /usr/bin/cat; " + SOLVE)
    code = main(["tasks", str(tmp_path), "--provider", "container", "--image", IMAGE, "--json"])
    checks = {check["task"]: check for check in json.loads(capsys.readouterr().out)}
    assert code == 3
    assert (checks["named"]["nothing"], checks["named"]["solution"], checks["named"]["problems"]) == (0.0, 1.0, [])
    assert any(
        "changed programs that the tests could use: /usr/bin/cat" in each for each in checks["tampers"]["problems"]
    )


@pytest.mark.containers
@IN_CONTAINERS
def test_an_image_is_built_once_for_equal_environments_and_then_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = secrets.token_hex(8)
    dockerfile = f"FROM {IMAGE}\nWORKDIR /built\nRUN echo {content} > given\n"
    test = f'if [ "$(cat /built/out)" = {content} ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'
    for name in ("one", "two"):
        write_task(tmp_path / name, test, "cp given out", **{"environment/Dockerfile": dockerfile})
    assert main(["tasks", str(tmp_path), "--provider", "container"]) == 2
    assert "build it with plaudit images-of" in capsys.readouterr().err
    assert main(["images-of", str(tmp_path), "--json"]) == 0
    images = {each["image"] for each in json.loads(capsys.readouterr().out)}
    (image,) = images
    try:
        code, checks = (
            main(["tasks", str(tmp_path / "one"), "--provider", "container", "--json"]),
            json.loads(capsys.readouterr().out),
        )
        assert (code, checks[0]["nothing"], checks[0]["solution"]) == (0, 0.0, 1.0), checks
    finally:
        find_engine().remove_images(image)


@pytest.mark.containers
@IN_CONTAINERS
def test_an_image_that_cannot_be_built_is_shown_with_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(tmp_path / "t", **{"environment/Dockerfile": f"FROM {IMAGE}\nRUN echo the reason; false\n"})
    assert main(["images-of", str(tmp_path)]) == 3
    assert "the reason" in capsys.readouterr().out


def test_what_a_provider_cannot_give_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(tmp_path / "t", config="[environment]\ngpus = 2")
    assert main(["tasks", str(tmp_path)]) == 2
    assert "task t needs 2 GPUs, which no provider gives" in capsys.readouterr().err
