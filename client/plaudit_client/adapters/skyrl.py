"""Give rewards to SkyRL: an environment of one turn whose reward comes from a Plaudit service.

::

    from plaudit_client.adapters.skyrl import register

    service = json.loads(Path("runs/<run>/service.json").read_text())
    register(url=service["url"], token=service["token"])  # in the trainer's Ray task; environment.env_class=plaudit

SkyRL accepts numbers only: a sample without a score raises, unless ``on_failure`` names a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym import register as register_environment
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

from plaudit_client.adapters.service import blocking_client, extra_info_of, ground_truth_of, number

NAME = "plaudit"
_OWN_FIELDS = frozenset({"data_source", "reward_spec", "reward_model", "ground_truth", "extra_info", "max_turns"})


def register(
    name: str = NAME, *, url: str = "", token: str = "", timeout_s: float = 0.0, on_failure: float | str = "raise"
) -> None:
    """Register the environment with SkyRL-Gym under a name, in this process.

    SkyRL's configuration has no place for these settings: it refuses sections of environments that it does not know.

    ``url``, ``token`` and ``timeout_s`` are as for ``service.client``; ``on_failure`` is ``raise``, or the number for a
    sample without a score.
    """
    settings = {"url": url, "token": token, "timeout_s": timeout_s, "on_failure": on_failure}
    register_environment(
        id=name, entry_point=f"{PlauditEnv.__module__}:{PlauditEnv.__name__}", kwargs={"settings": settings}
    )


class PlauditEnv(BaseTextEnv):  # type: ignore[misc]
    """Score the policy's first reply and end the episode.

    Args:
        env_config: settings of programs that make environments themselves, before those of ``register`` (``settings``).
        extras: the row: ``data_source``, ``reward_spec`` with ``ground_truth``, ``extra_info``.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        settings = {**(settings or {}), **(env_config or {})}
        self._client = blocking_client(
            settings.get("url", ""), settings.get("token", ""), settings.get("timeout_s", 0.0)
        )
        self._on_failure = settings.get("on_failure", "raise")
        self._row = extras or {}
        self._prompt: ConversationType = []

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        """Keep the prompt for the scorers."""
        self._prompt = prompt
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Score the reply; raise ``NoScoreError`` as ``on_failure`` says, ``UnavailableError`` without a result."""
        self.turns += 1
        result = self._client.score(
            {
                "data_source": self._row.get("data_source") or "",
                "prompt": self._prompt,
                "response": action,
                "ground_truth": ground_truth_of(self._row),
                "extra_info": extra_info_of(self._row, _OWN_FIELDS),
            }
        )
        return BaseTextEnvStepOutput(
            observations=[],
            reward=number(result, self._on_failure),
            done=True,
            metadata={"outcome": result.outcome, "scored": result.score is not None},
        )
