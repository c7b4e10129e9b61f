"""Give rewards to NeMo Gym: a resources server whose ``/verify`` asks a Plaudit service.

::

    from plaudit_client.adapters.nemo_gym import PlauditResourcesServer

    if __name__ == "__main__":
        PlauditResourcesServer.run_webserver()

as ``app.py`` of a resources server. A sample without a score is an HTTP error, which fails its rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)

from plaudit_client.adapters.service import client, ground_truth_of, note, text_of


class PlauditServerConfig(BaseResourcesServerConfig):  # type: ignore[misc]
    """The server's section in a NeMo Gym configuration.

    Attributes:
        plaudit_url: as ``url`` for ``service.client``, as ``plaudit_token`` and ``timeout_s``.
    """

    plaudit_url: str = ""
    plaudit_token: str = ""
    timeout_s: float = 0.0


class PlauditVerifyRequest(BaseVerifyRequest, extra="allow"):  # type: ignore[misc, call-arg]
    """A row with the policy's response."""


class PlauditVerifyResponse(PlauditVerifyRequest, BaseVerifyResponse):  # type: ignore[misc]
    """The row with its reward."""


class PlauditResourcesServer(SimpleResourcesServer):  # type: ignore[misc]
    """Serve rewards from a Plaudit service, and no tools."""

    config: PlauditServerConfig

    async def verify(self, body: PlauditVerifyRequest) -> PlauditVerifyResponse:
        """Score the policy's response; without a score, raise ``HTTPException`` (502) or ``UnavailableError``."""
        row: Mapping[str, Any] = body.model_extra or {}
        result = await client(self.config.plaudit_url, self.config.plaudit_token, self.config.timeout_s).score(
            {
                "data_source": row.get("data_source") or "",
                "prompt": _prompt(body.responses_create_params.model_dump(mode="json").get("input")),
                "response": body.response.output_text,
                "ground_truth": ground_truth_of(row),
                "extra_info": {**row, **(row.get("verifier_metadata") or {})},
            }
        )
        if note(result).score is None:
            raise HTTPException(502, f"no score: {result.outcome}: {result.reason}")
        values = {name: scorer.value for name, scorer in result.scorers.items() if scorer.value is not None}
        return PlauditVerifyResponse(**body.model_dump(), reward=result.score, reward_components=values)


def _prompt(items: Any) -> Any:
    """Return the input as text or chat messages."""
    if not isinstance(items, list):
        return items or ""
    return [
        {"role": item["role"], "content": text_of(item.get("content"))}
        for item in items
        if item.get("role") is not None
    ]
