"""Harbor's own reading of task.toml beside ours: the same values, or a refusal that names the field."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from trainer_environments import CACHE, python

from harbor_tasks import write_sum_task
from plaudit_job.tasks import TaskConfig, TaskError, read_task

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


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return Harbor's reading of every file."""
    interpreter = python("harbor")
    if interpreter is None:
        pytest.skip(f"the environment harbor is not built in {CACHE}: make trainers-build")
    file = tmp_path_factory.mktemp("harbor") / "configs.json"
    file.write_text(json.dumps(READ | {name: config for name, (config, *_) in REFUSED.items()}))
    command = [str(interpreter), str(Path(__file__).parent / "programs" / "harbor_configs.py"), str(file)]
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
