"""Run 50 groups of four episodes by AReaL's own workflows, with an engine that writes fixed responses."""

from __future__ import annotations

import asyncio
from typing import Any

from areal.api import ModelResponse
from areal.api.cli_args import GenerationHyperparameters
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.utils import logging
from areal.utils.dynamic_import import import_from_string
from report import progress, report

GROUPS, SAMPLES = 50, 4


class Characters:
    """A tokenizer with a token for each character."""

    eos_token_id = pad_token_id = 0

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for message in messages for character in message["content"]]}


class Engine:
    """Answers each prompt ``row N`` with ``answer N``."""

    async def agenerate(self, request: Any) -> ModelResponse:
        row = Characters().decode(request.input_ids).split("row ")[1]
        reply = [ord(character) for character in f"answer {row}"]
        return ModelResponse(request.input_ids, reply, [0.0] * len(reply), [0] * len(reply))


async def group(row: int) -> list[tuple[str, int, float | None]]:
    """Run one group as AReaL does; return response, row and reward of each sample."""
    workflow = import_from_string("plaudit_client.adapters.areal.AReaLWorkflow")
    one = workflow(gconfig=GenerationHyperparameters(), tokenizer=Characters())
    data = {"messages": [{"role": "user", "content": f"row {row}"}], "data_source": "numbers", "answer": row}
    trained = await GroupedRolloutWorkflow(one, SAMPLES, logging.getLogger("groups")).arun_episode(Engine(), data)
    progress(row)
    rewards = [None] * SAMPLES if trained is None else trained["rewards"].tolist()
    return [(f"answer {row}", row, reward) for reward in rewards]


async def main() -> None:
    """Run all groups, eight at a time."""
    places = asyncio.Semaphore(8)

    async def placed(row: int) -> list[tuple[str, int, float | None]]:
        async with places:
            return await group(row)

    report(sample for samples in await asyncio.gather(*map(placed, range(GROUPS))) for sample in samples)


if __name__ == "__main__":
    asyncio.run(main())
