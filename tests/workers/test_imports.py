"""What a process must not import: each package costs every start its time, and every process its memory."""

import subprocess
import sys

import pytest

HEAVY = {"accelerate", "kubernetes", "peft", "sympy", "torch", "transformers", "vllm"}
UNUSED_BY_CHILDREN = {"aiohttp", "numpy", "pydantic", "ray", "redis", "rich"}
UNUSED = {
    "plaudit_workers.cli": HEAVY | {"aiohttp", "httpx", "numpy", "pyarrow", "pydantic", "ray", "redis", "rich"},
    "plaudit_workers.launch.run": HEAVY
    | {"httpx", "jinja2", "mpmath", "numpy", "prometheus_client", "pyarrow", "ray", "uvicorn"},
    "plaudit_workers.service.worker": HEAVY
    | {"httpx", "jinja2", "mpmath", "numpy", "pyarrow", "ray", "rich", "starlette", "uvicorn"},
    "plaudit_workers.service.gateway": HEAVY
    | {"httpx", "jinja2", "mpmath", "numpy", "plaudit_sandbox", "pyarrow", "ray", "rich"},
    "plaudit_workers.rollout.worker": HEAVY | {"httpx", "mpmath", "pyarrow", "ray", "starlette", "uvicorn"},
    "plaudit_workers.training.worker": HEAVY | {"httpx", "mpmath", "ray", "uvicorn"},
    "plaudit_metrics.service.serve": HEAVY | {"aiohttp", "httpx", "mpmath", "pydantic", "ray", "rich"},
    "plaudit_reward.isolation.child": HEAVY | UNUSED_BY_CHILDREN,
    "plaudit_sandbox.server": HEAVY | UNUSED_BY_CHILDREN,
    "plaudit_workers.agents.template": HEAVY | UNUSED_BY_CHILDREN,
    "plaudit_workers.training.model.policy_model": {"kubernetes", "peft", "pyarrow", "ray", "vllm"},
}
"""By the module that a process imports first; the trainer and rollouts import torch and vLLM when the job is read."""
BUDGETS = {
    "plaudit_workers.cli": 180,
    "plaudit_workers.launch.run": 830,
    "plaudit_workers.service.worker": 720,
    "plaudit_workers.service.gateway": 790,
    "plaudit_metrics.service.serve": 710,
    "plaudit_operator.operator": 930,
    "plaudit_reward.isolation.child": 230,
}
"""Modules that a process may have imported before it reads a job, those of Python included: a thing to look at when it
grows, since each takes 0.5-1 ms of every start."""


@pytest.mark.long
@pytest.mark.parametrize("module", UNUSED)
def test_a_process_imports_no_package_that_it_does_not_use(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not UNUSED[module] & {*loaded}


@pytest.mark.long
@pytest.mark.alike
@pytest.mark.parametrize("module", BUDGETS)
def test_a_process_imports_no_more_modules_than_its_budget(module: str) -> None:
    timed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"], capture_output=True, check=True
    )
    assert timed.stderr.count(b"import time:") <= BUDGETS[module]


@pytest.mark.long
def test_what_the_processes_of_a_run_share_starts_no_thread_and_loads_nothing_heavy() -> None:
    code = (
        "import importlib, os, sys\nfrom plaudit_workers.launch.role_process import SHARED\n"
        "for module in SHARED: importlib.import_module(module)\n"
        "print(len(os.listdir('/proc/self/task')), *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, *loaded = done.stdout.split()
    assert threads == "1"
    assert not {*loaded} & (HEAVY | {"numpy", "pyarrow", "ray"})
