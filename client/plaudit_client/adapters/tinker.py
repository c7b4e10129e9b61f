"""Give rewards to tinker-cookbook 0.6: environments of one turn whose reward comes from a Plaudit service.

::

    from plaudit_client.adapters.tinker import TinkerGroup

    TinkerGroup(row, renderer, num_envs=16)  # one of your RLDataset's batch, for each prompt

with ``PLAUDIT_URL`` and ``PLAUDIT_TOKEN`` in the environment. A sample without a score raises: with the cookbook's
``MinViableGroup`` its trajectory is left out of the group, with ``FailFast``, its default, it ends the training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker import ModelInput
from tinker_cookbook.completers import StopCondition
from tinker_cookbook.renderers import Renderer, get_text_content
from tinker_cookbook.rl.types import Action, ActionExtra, Env, EnvGroupBuilder, Observation, StepResult

from plaudit_client.adapters.service import client, extra_info_of, ground_truth_of, note

_OWN_FIELDS = frozenset({"data_source", "prompt", "reward_model", "ground_truth", "extra_info"})


@dataclass(frozen=True)
class TinkerGroup(EnvGroupBuilder):  # type: ignore[misc]
    """Build the environments of one prompt; it can be pickled, as the cookbook's executors ask.

    Args:
        row: ``prompt`` (text or messages), ``data_source``, ``reward_model.ground_truth`` or a column for it,
            ``extra_info``; other columns become ``extra_info``.
        renderer: of the policy's model (``tinker_cookbook.renderers.get_renderer``).
        url: as for ``service.client``, as ``token`` and ``timeout_s``.
    """

    row: Mapping[str, Any]
    renderer: Renderer
    num_envs: int
    url: str = ""
    token: str = ""
    timeout_s: float = 0.0

    async def make_envs(self) -> Sequence[Env]:
        """Return one environment for each sample of the prompt."""
        return [TinkerEnv(self) for _ in range(self.num_envs)]

    def logging_tags(self) -> list[str]:
        """Return the row's data source."""
        return [str(self.row.get("data_source") or "plaudit")]


class TinkerEnv(Env):  # type: ignore[misc]
    """Score the policy's first reply and end the episode."""

    def __init__(self, group: TinkerGroup) -> None:
        self._group = group
        prompt = group.row.get("prompt", "")
        self._prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*map(dict, prompt)]

    async def initial_observation(self) -> tuple[Observation, StopCondition]:
        """Render the prompt."""
        renderer = self._group.renderer
        return renderer.build_generation_prompt(self._prompt), renderer.get_stop_sequences()

    async def step(self, action: Action, *, extra: ActionExtra | None = None) -> StepResult:
        """Score the reply, without its reasoning, as the cookbook's own environments do.

        Raises ``NoScoreError`` for a sample without a score, ``UnavailableError`` without a result in time.
        """
        group, row = self._group, self._group.row
        message, _ = group.renderer.parse_response(action)
        result = await client(group.url, group.token, group.timeout_s).score(
            {
                "data_source": row.get("data_source") or "",
                "prompt": self._prompt,
                "response": get_text_content(message),
                "ground_truth": ground_truth_of(row),
                "extra_info": extra_info_of(row, _OWN_FIELDS),
                "response_tokens": len(action),
                "finish_reason": (extra or {}).get("stop_reason", "stop"),
            }
        )
        return StepResult(
            reward=note(result).require_score(),
            episode_done=True,
            next_observation=ModelInput.empty(),
            next_stop_condition=group.renderer.get_stop_sequences(),
        )
