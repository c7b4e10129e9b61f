"""The end of a server: what it had taken is answered, nothing more is taken; and how it begins."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from plaudit_model_server.__main__ import main
from plaudit_model_server.api import Address, serve
from plaudit_model_server.batcher import BatchLimits, ModelSettings
from plaudit_model_server.model import Classifier
from plaudit_workers.launch.redis import free_port


class Gated(Classifier):
    """A real classifier whose passes wait for a gate."""

    began, gate = threading.Event(), threading.Event()

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.began.set()
        assert self.gate.wait(30)
        return super().logits(sequences)


async def test_a_stop_answers_accepted_requests_and_refuses_the_rest(model_folder: Callable[[str], Path]) -> None:
    classifier = Gated(ModelSettings(str(model_folder("decoder")), dtype="float32"))
    stop, port = asyncio.Event(), free_port()
    serving = asyncio.create_task(serve(classifier, Address("127.0.0.1", port, "tiny"), BatchLimits(), stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        assert (await client.get("/health")).status_code == 200
        taken = [asyncio.create_task(client.post("/classify", json={"input": "a"}))]
        await asyncio.to_thread(classifier.began.wait, 30)
        taken.append(asyncio.create_task(client.post("/classify", json={"input": "ab"})))
        while "queue_sequences 1" not in (await client.get("/metrics")).text:
            await asyncio.sleep(0.01)
        stop.set()
        while (await client.get("/health")).status_code != 503:
            await asyncio.sleep(0.01)
        late = await client.post("/classify", json={"input": "late"})
        assert (late.status_code, late.headers["retry-after"]) == (503, "1")
        classifier.gate.set()
        assert [(await request).status_code for request in taken] == [200, 200]
    await serving


async def test_a_pass_that_fails_is_answered_and_ends_the_server(model_folder: Callable[[str], Path]) -> None:
    class Failing(Classifier):
        def logits(self, sequences: Any) -> list[list[float]]:
            raise RuntimeError("the device is gone")

    classifier = Failing(ModelSettings(str(model_folder("decoder")), dtype="float32"))
    port = free_port()
    serving = asyncio.create_task(serve(classifier, Address("127.0.0.1", port, "tiny"), BatchLimits(), asyncio.Event()))
    async with httpx.AsyncClient(timeout=30) as client:
        await asyncio.sleep(0.05)
        response = await client.post(f"http://127.0.0.1:{port}/classify", json={"input": "a"})
    assert response.status_code == 500
    assert "the device is gone" in response.json()["error"]["message"]
    with pytest.raises(RuntimeError, match="the device is gone"):
        await serving


def test_a_model_that_cannot_be_loaded_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"--model {tmp_path}: no tokenizer could be loaded")


def test_help_and_arguments_need_no_torch() -> None:
    code = "import sys; import plaudit_model_server.__main__ as m; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
