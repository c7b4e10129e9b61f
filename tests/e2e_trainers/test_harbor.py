"""Harbor itself beside ours: the same values of a task.toml, or a refusal that names the field; the same rewards."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from trainer_environments import CACHE, python

from container_images import IMAGE, why_none
from harbor_tasks import TEST, played_sample, write_sum_task
from plaudit_job.spec.rljob import SandboxesSpec
from plaudit_job.tasks import TaskConfig, TaskError, read_task
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.providers import provider_of
from plaudit_reward.scorer import Attempt
from plaudit_reward.verifier import VerifierScorer
from plaudit_sandbox.container_engine import find_engine

READ = {
    "empty": "",
    "terminal-bench": """
version = "1.0"
[metadata]
author_name = "somebody"
difficulty = "hard"
category = "debugging"
tags = ["a", "b"]
[verifier]
timeout_sec = 900.0
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "example.org/task:1"
cpus = 1
memory = "2G"
storage = "10G"
""",
    "sizes": "[environment]\ncpus = 0.5\nmemory_mb = 512\nstorage_mb = 1024\ngpus = 0",
    "older sizes": "[environment]\nmemory = '512m'\nstorage = '1.5G'\nmemory_mb = 512",
    "image": "[environment]\ndocker_image = 'example.org/task@sha256:0'\nworkdir = '/workspace'",
    "variables": "[environment.env]\nKEY = '${KEY:-none}'\n[verifier.env]\nTOKEN = '${TOKEN}'",
    "public": "schema_version = '1.2'\n[environment]\nnetwork_mode = 'public'",
    "no network": "[environment]\nnetwork_mode = 'no-network'",
    "hosts": "[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['example.org', '*.example.net']",
    "internet": "schema_version = '1.1'\n[environment]\nallow_internet = true",
    "no internet": "[environment]\nallow_internet = false",
    "both forms": "[environment]\nallow_internet = false\nnetwork_mode = 'public'",
    "healthcheck": "[environment.healthcheck]\ncommand = 'true'\ninterval_sec = 1\ntimeout_sec = 2.5\nretries = 7",
    "users": "[agent]\nuser = 'agent'\ntimeout_sec = 120\n[verifier]\nuser = 0\ntimeout_sec = 30.5",
    "package": "[task]\nname = 'org/fix-it'\ndescription = 'x'\nkeywords = ['a']\n[[task.authors]]\nname = 'somebody'",
    "artifacts": "artifacts = ['/app/out']\nsource = 'elsewhere'",
    "shared": "schema_version = '1.4'\n[verifier]\nenvironment_mode = 'shared'",
    "linux": "[environment]\nos = 'Linux'\n[solution.env]\nA = 'b'",
}
"""What both read."""
REFUSED = {
    "windows": ("[environment]\nos = 'windows'", "os", False),
    "steps": ("[[steps]]\nname = 'one'", "steps", False),
    "tpu": ("[environment.tpu]\ntype = 'v6e'\ntopology = '2x4'", "environment.tpu", False),
    "servers": (
        "[[environment.mcp_servers]]\nname = 'x'\ntransport = 'sse'\nurl = 'http://x'",
        "environment.mcp_servers",
        False,
    ),
    "skills": ("[environment]\nskills_dir = '/skills'", "environment.skills_dir", False),
    "phases": ("[agent]\nnetwork_mode = 'no-network'", "agent.network_mode", False),
    "hosts alone": ("[environment]\nallowed_hosts = ['example.org']", "allowed_hosts", True),
    "two sizes": ("[environment]\nmemory = '1G'\nmemory_mb = 512", "memory", True),
    "no size": ("[environment]\nmemory = 'much'", "memory", True),
    "mode": ("[environment]\nnetwork_mode = 'some'", "network_mode", True),
    "number": ("[environment]\ncpus = 'many'", "cpus", True),
}
"""What ours refuses, by which field, and whether Harbor does as well."""


PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="module")
def interpreter() -> Path:
    """Return the interpreter of Harbor."""
    found = python("harbor")
    if found is None:
        pytest.skip(f"the environment harbor is not built in {CACHE}: make trainers-build")
    return found


@pytest.fixture(scope="module")
def theirs(interpreter: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return Harbor's reading of every file."""
    file = tmp_path_factory.mktemp("harbor") / "configs.json"
    file.write_text(json.dumps(READ | {name: config for name, (config, *_) in REFUSED.items()}))
    command = [str(interpreter), str(PROGRAMS / "harbor_configs.py"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=file.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    read: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return read


@pytest.mark.parametrize("name", READ)
def test_a_task_has_the_values_that_harbor_reads(name: str, theirs: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    ours, given = read_task(write_sum_task(tmp_path / "task", config=READ[name])).config, theirs[name]
    assert "refused" not in given
    environment, verifier = given["environment"], given["verifier"]
    assert (ours.environment.network, ours.environment.allowed_hosts) == (
        environment["network_mode"],
        environment["allowed_hosts"] or [],
    )
    assert (ours.environment.env, ours.verifier.env) == (environment["env"], verifier["env"])
    assert (ours.verifier.timeout_sec, ours.environment.build_timeout_sec) == (
        verifier["timeout_sec"],
        environment["build_timeout_sec"],
    )
    assert (ours.agent.user, ours.verifier.user) == (given["agent"]["user"], verifier["user"])
    assert (ours.metadata, [each.source for each in ours.artifacts]) == (given["metadata"], given["artifacts"])
    for section, fields in (
        ("environment", ("docker_image", "cpus", "memory_mb", "storage_mb", "gpus", "workdir", "healthcheck")),
        ("agent", ("timeout_sec",)),
    ):
        for field in fields:  # of which Harbor knows no default where ours has one
            value, default = given[section][field], getattr(getattr(TaskConfig(), section), field)
            read = getattr(getattr(ours, section), field)
            if field == "healthcheck" and value is not None:
                read, value = read.model_dump(), {key: value[key] for key in read.model_dump()}
            assert read == (default if value is None else value), field


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_field(
    name: str, theirs: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    config, field, both = REFUSED[name]
    assert ("refused" in theirs[name]) == both
    with pytest.raises(TaskError, match=field):
        read_task(write_sum_task(tmp_path / "task", config=config))


@dataclasses.dataclass(frozen=True)
class Case:
    """A task that Harbor and we run: its tests, and what differs from a task whose agent is wrong."""

    test: str = TEST
    config: str = ""
    """Goes on in ``[environment]``."""
    agent: str = "echo 6 > sum"
    solution: str = "echo 7 > sum"
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/srv"
    top: str = ""
    """Stands before all sections."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a sample earned."""

    outcome: str
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    agent: str = "exited"


def _text(reward: str) -> Case:
    return Case(f"echo {reward} > /logs/verifier/reward.txt")


def _json(rewards: str) -> Case:
    return Case(f"echo 1 > /logs/verifier/reward.txt; echo '{rewards}' > /logs/verifier/reward.json")


def _right_if(condition: str) -> str:
    return f"if {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


CASES = {
    "text": Case(),
    "half": _text("0.5"),
    "negative": _text("-1.5"),
    "nan": _text("nan"),
    "words": _text("good"),
    "json": _json('{"reward": 0.25}'),
    "extras": _json('{"reward": 0.5, "speed": 2.5, "count": 3}'),
    "nested": _json('{"reward": {"a": 1}}'),
    "bare-number": _json("0.5"),
    "no-reward": Case("true", agent="echo 1 > /logs/verifier/reward.txt"),
    "exit-code": Case(TEST + "\nexit 3", agent="echo 7 > sum; exit 3"),
    "slow-tests": Case("echo 1 > /logs/verifier/reward.txt; sleep 60", "[verifier]\ntimeout_sec = 3"),
    "slow-agent": Case(config="[agent]\ntimeout_sec = 12", agent="echo 7 > sum; sleep 60"),
    "variables": Case(
        _right_if('[ "$(cat seen) $MACHINE $TESTS" = "one one two" ]'),
        "[environment.env]\nMACHINE = '${NOT_SET:-one}'\n[verifier.env]\nTESTS = 'two'",
        agent='echo "$MACHINE$TESTS" > seen',
        solution="echo $MACHINE > seen; echo three > /tmp/TESTS; export TESTS=three",
    ),
    "sizes": Case(config="cpus = 0.5\nmemory_mb = 256\nstorage_mb = 512"),
    "files-of-tests": Case(
        "cd /tests && ls | tr '\\n' ' ' > /logs/verifier/listed; cd - && python3 /tests/judge.py",
        files={
            "tests/judge.py": "right = open('/logs/verifier/listed').read() == 'judge.py test.sh '\n"
            "print(int(right and open('sum').read() == '7\\n'), file=open('/logs/verifier/reward.txt', 'w'))"
        },
    ),
    "files-of-machine": Case(
        _right_if('[ "$(cat sum)" = $(($(cat a) + $(cat b))) ]'),
        agent="cat a > sum",
        solution="echo $(($(cat a) + $(cat b))) > sum",
        files={"environment/a": "3", "environment/b": "4"},
    ),
    "workdir": Case(_right_if('[ "$PWD $(cat /opt/sum)" = "/opt 7" ]'), workdir="/opt"),
    "described": Case(
        config="[metadata]\ndifficulty = 'easy'\n[task]\nname = 'org/described'\n[[task.authors]]\nname = 'somebody'",
        top="schema_version = '1.4'\nsource = 'elsewhere'\n",
    ),
    "separate-tests": Case(
        _right_if('[ "$(cat sum)" = 7 ] && [ ! -e other ]'),
        "[verifier]\nenvironment_mode = 'separate'",
        solution="echo 7 > sum; echo 1 > other",
        top="artifacts = ['/srv/sum']\n",
    ),
    "image-of-tests": Case(
        config=f"[verifier.environment]\ndocker_image = '{IMAGE}'\nworkdir = '/srv'", top="artifacts = ['/srv/sum']\n"
    ),
}
DIFFERENT = {
    "image-of-tests": Result("data_error"),  # an image that is of tests alone has to hold them; ours gets them as well
}
"""What Harbor says otherwise."""
AGENTS = ("oracle", "instruction")
KINDS = {
    "RewardFileNotFoundError": "data_error",
    "ValidationError": "data_error",
    "VerifierOutputParseError": "data_error",
    "VerifierTimeoutError": "timeout",
}
"""Our outcome for Harbor's exception."""


def _write(folder: Path, name: str, case: Case) -> Path:
    machine = f"[environment]\ndocker_image = '{IMAGE}'\nworkdir = '{case.workdir}'\n"
    files = {
        "instruction.md": case.agent,
        "tests/test.sh": f"#!/bin/bash\n{case.test}\n",
        "solution/solve.sh": f"#!/bin/bash\n{case.solution}\n",
    }
    return write_sum_task(folder / name, config=f"{case.top}{machine}{case.config}", **files, **case.files)


def _of_harbor(interpreter: Path, tasks: Path, folder: Path) -> dict[tuple[str, str], Result]:
    """Return what ``harbor run`` finds of each task and agent."""
    # It starts containers with the engine's own limits, which a host that gives root less refuses; without a grace
    # period each of them takes ten seconds to end.
    (folder / "containers.conf").write_text(
        '[containers]\ndefault_ulimits = ["nofile=4096:4096", "nproc=16384:16384"]\n'
    )
    (folder / "compose.json").write_text(json.dumps({"services": {"main": {"stop_grace_period": "0s"}}}))
    job = {
        "jobs_dir": str(folder),
        "job_name": "job",
        "n_concurrent_trials": 4,  # some of them wait for a limit of time
        "quiet": True,
        "environment": {"type": "podman", "extra_docker_compose": [str(folder / "compose.json")]},
        "agents": [{"name": AGENTS[0]}, {"import_path": "harbor_agent:InstructionAgent"}],
        "datasets": [{"path": str(tasks)}],
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {
        **os.environ,
        "HOME": str(folder),
        "PATH": os.pathsep.join([str(PROGRAMS), str(interpreter.parent), os.environ["PATH"]]),
        "PODMAN_COMPOSE": str(interpreter.parent / "podman-compose"),
        "PYTHONPATH": str(PROGRAMS),
        "CONTAINERS_CONF": str(folder / "containers.conf"),
        "PYTHONDONTWRITEBYTECODE": "",  # Harbor's modules take seconds to compile
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    command = [str(interpreter.parent / "harbor"), "run", "--config", str(folder / "job.json"), "--yes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return _results(folder)


def _results(folder: Path) -> dict[tuple[str, str], Result]:
    found = {}
    for path in folder.glob("job/*/result.json"):
        read = json.loads(path.read_text())
        failure = (read["exception_info"] or {}).get("exception_type", "")
        agent = "timeout" if failure == "AgentTimeoutError" else "exited"
        outcome = "scored" if agent == "timeout" or not failure else KINDS.get(failure, failure)
        rewards = (read["verifier_result"] or {}).get("rewards") or {}
        found[Path(read["task_id"]["path"]).name, read["agent_info"]["name"]] = Result(outcome, rewards, agent)
    return found


def _of_ours(tasks: Path, folder: Path) -> dict[tuple[str, str], Result]:
    """Return what a run with containers finds of each task and agent."""
    (folder / SANDBOXES).mkdir()
    provider = provider_of(SandboxesSpec(provider="container"), folder)
    machines = RunMachines(folder / SANDBOXES, provider)

    def result(name: str, agent: str) -> Result:
        commands = dict(zip(AGENTS, (CASES[name].solution, CASES[name].agent), strict=True))
        sample, end = played_sample(machines, tasks / name, commands[agent])
        score = asyncio.run(VerifierScorer("tests", machines, 1).score(sample, Attempt(120.0)))
        numbers = {key: value for key, value in score.extra.items() if isinstance(value, float) and key != "verify_s"}
        rewards = numbers if score.value is None else {"reward": score.value, **numbers}
        provider.remove(machines.folder / sample.machine)
        return Result(score.outcome, rewards, end.ending)

    try:
        with ThreadPoolExecutor(2) as pool:
            asked = {(name, agent): pool.submit(result, name, agent) for name in CASES for agent in AGENTS}
            return {key: future.result() for key, future in asked.items()}
    finally:
        provider.end()


@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(why_none()), reason=why_none())
def test_tasks_earn_what_harbor_run_gives_them(interpreter: Path, tmp_path: Path) -> None:
    if find_engine().program != "podman":
        pytest.skip("Harbor's environment of docker needs compose: install podman")
    tasks = tmp_path / "tasks"
    for name, case in CASES.items():
        _write(tasks, name, case)
    (harbor := tmp_path / "harbor").mkdir()
    theirs = _of_harbor(interpreter, tasks, harbor)
    ours = _of_ours(tasks, tmp_path)
    assert theirs.keys() == ours.keys()
    assert {key: found for key, found in theirs.items() if found != ours[key]} == {
        (name, agent): result for name, result in DIFFERENT.items() for agent in AGENTS
    }
    # The tasks tell right from wrong.
    assert [ours["text", agent].rewards for agent in AGENTS] == [{"reward": 1.0}, {"reward": 0.0}]
    assert {found.outcome for found in ours.values()} == {"scored", "data_error", "timeout"}
