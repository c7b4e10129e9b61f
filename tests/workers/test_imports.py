"""What a process must not import: each package costs every start its time, and every process its memory."""

import subprocess
import sys

import pytest

HEAVY = {"accelerate", "kubernetes", "peft", "sympy", "torch", "transformers", "vllm"}
UNUSED_BY_CHILDREN = {"aiohttp", "numpy", "pydantic", "ray", "redis", "rich", "structlog"}
UNUSED = {
    "plaudit_workers.cli": HEAVY | {"aiohttp", "httpx", "numpy", "pyarrow", "pydantic", "ray", "redis", "rich"},
    "plaudit_workers.launch.run": HEAVY,
    "plaudit_workers.service.worker": HEAVY
    | {"httpx", "jinja2", "mpmath", "numpy", "pyarrow", "ray", "starlette", "uvicorn"},
    "plaudit_workers.service.gateway": HEAVY
    | {"httpx", "jinja2", "mpmath", "numpy", "plaudit_sandbox", "pyarrow", "ray"},
    "plaudit_workers.rollout.worker": HEAVY | {"httpx", "mpmath", "pyarrow", "ray", "starlette", "uvicorn"},
    "plaudit_workers.training.worker": HEAVY | {"httpx", "mpmath", "ray", "uvicorn"},
    "plaudit_metrics.service.serve": HEAVY | {"aiohttp", "httpx", "mpmath", "pydantic", "ray"},
    "plaudit_reward.isolation.child": HEAVY | UNUSED_BY_CHILDREN,
    "plaudit_sandbox.server": HEAVY | UNUSED_BY_CHILDREN,
    "plaudit_workers.agents.template": HEAVY | UNUSED_BY_CHILDREN,
    "plaudit_workers.training.model.policy_model": {"kubernetes", "peft", "pyarrow", "ray", "vllm"},
}
"""By the module that a process imports first; the trainer and rollouts import torch and vLLM when the job is read."""


@pytest.mark.long
@pytest.mark.parametrize("module", UNUSED)
def test_a_process_imports_no_package_that_it_does_not_use(module: str) -> None:
    code = f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not UNUSED[module] & {*loaded}
