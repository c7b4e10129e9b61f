"""Roll out 50 groups of four by tinker-cookbook's own loop, with a policy that writes fixed replies."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from report import progress, report
from tinker import ModelInput
from tinker_cookbook.completers import TokenCompleter, TokensWithLogprobs
from tinker_cookbook.exceptions import AllTrajectoriesFailedError
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollout_strategy import MinViableGroup
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.tokenizer_utils import get_tokenizer, register_tokenizer

from plaudit_client.adapters.tinker import TinkerGroup

GROUPS, SAMPLES = 50, 4
END = "\n\nUser:"


class Characters:
    """A tokenizer with a token for each character, for the cookbook's ``role_colon`` renderer."""

    name_or_path = "characters"
    bos_token = ""
    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join(map(chr, [tokens] if isinstance(tokens, int) else tokens))


class Policy(TokenCompleter):  # type: ignore[misc]
    """Answers each prompt ``row N`` with ``answer N`` and keeps what it was asked."""

    async def __call__(self, model_input: ModelInput, stop: Any, **limits: Any) -> TokensWithLogprobs:
        prompt = Characters().decode(model_input.to_ints())
        reply = Characters().encode(f" answer {prompt.split('row ')[1].split()[0]}{END}")
        return TokensWithLogprobs(reply, [0.0] * len(reply))


async def group(row: int) -> list[tuple[str, int, float | None]]:
    """Run one group as the cookbook does; return response, row and reward of each sample."""
    data = {"prompt": f"row {row}", "data_source": "numbers", "ground_truth": row}
    renderer = get_renderer("role_colon", get_tokenizer(Characters.name_or_path))
    builder = pickle.loads(pickle.dumps(TinkerGroup(data, renderer, SAMPLES)))
    try:
        done = await do_group_rollout(builder, Policy(), MinViableGroup(min_successful=1, max_retries=0))
        rewards: list[float | None] = [*done.get_total_rewards()]
    except AllTrajectoriesFailedError:  # each of them by NoScoreError
        rewards = [None] * SAMPLES
    progress(row)
    assert builder.logging_tags() == ["numbers"]
    return [(f"answer {row}", row, reward) for reward in rewards]


async def main() -> None:
    """Run all groups, eight at a time."""
    places = asyncio.Semaphore(8)

    async def placed(row: int) -> list[tuple[str, int, float | None]]:
        async with places:
            return await group(row)

    report(sample for samples in await asyncio.gather(*map(placed, range(GROUPS))) for sample in samples)


if __name__ == "__main__":
    register_tokenizer(Characters.name_or_path, Characters)  # a renderer is pickled as its tokenizer's name
    asyncio.run(main())
