"""A verifiers harness that asks the model once, in its own process: the built-in ones install packages."""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["NumbersHarness"]


class NumbersHarness(vf.Harness[vf.HarnessConfig]):
    """Sends the prompt as one chat completion."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> vf.ProgramResult:
        """Run one turn."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions", json=body, headers={"Authorization": f"Bearer {secret}"}
            )
        return vf.ProgramResult(exit_code=0 if answer.status_code == 200 else 1, stdout="", stderr=answer.text)
