"""Verify 100 rows by a NeMo Gym resources server, sent by NeMo Gym's own request types."""

from __future__ import annotations

import asyncio
import socket
from unittest.mock import MagicMock

import httpx
import uvicorn
from nemo_gym.server_utils import ServerClient
from report import progress, report

from plaudit_client.adapters.nemo_gym import PlauditResourcesServer, PlauditServerConfig

ROWS = 100


def row(number: int) -> dict[str, object]:
    """Return a row of a NeMo Gym data set with the policy's response."""
    text = {"type": "output_text", "text": f"answer {number}", "annotations": []}
    message = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    response = {
        "id": "r",
        "object": "response",
        "created_at": 1.0,
        "model": "policy",
        "output": [message],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
    }
    request = {"input": [{"role": "user", "content": f"row {number}"}]}
    return {"responses_create_params": request, "response": response, "expected_answer": number}


async def verify(http: httpx.AsyncClient, number: int) -> tuple[str, int, float | None]:
    """Verify one row; an HTTP error is a missing score."""
    answer = await http.post("/verify", json=row(number))
    progress(number)
    if answer.status_code == 502:
        assert "cannot be scored" in answer.text
        return f"answer {number}", number, None
    assert answer.json()["expected_answer"] == number
    return f"answer {number}", number, answer.json()["reward"]


async def main() -> None:
    """Serve as NeMo Gym does, and verify every row."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    settings = PlauditServerConfig(host="127.0.0.1", port=1, entrypoint="app.py", name="plaudit")
    gym = PlauditResourcesServer(config=settings, server_client=MagicMock(spec=ServerClient))
    server = uvicorn.Server(uvicorn.Config(gym.setup_webserver(), log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        while not server.started:
            await asyncio.sleep(0.05)
        assert (await http.post("/seed_session", json={})).status_code == 200
        samples = await asyncio.gather(*(verify(http, number) for number in range(ROWS)))
    server.should_exit = True
    await serving
    report(samples)


if __name__ == "__main__":
    asyncio.run(main())
