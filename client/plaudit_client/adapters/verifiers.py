"""Give rewards to verifiers 0.4 and prime-rl: a reward function plugged into a task by name.

::

    [env.taskset.task.rewards.plaudit]
    fn = "plaudit_client.adapters.verifiers:score"

with ``PLAUDIT_URL`` and ``PLAUDIT_TOKEN`` in the environment. A sample without a score raises: the trace fails, and is
not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plaudit_client.adapters.service import client, ground_truth_of, note, plain_messages

_OF_THE_RUNNER = frozenset(
    {"data_source", "prompt", "system_prompt", "image", "workdir", "agent_user", "skills", "network_allow"}
    | {"network_block", "artifacts", "artifact_max_bytes", "timeout", "resources"}
)
"""Fields of ``TaskData`` that describe how a task runs, not what is asked."""


async def score(task: Any, trace: Any) -> float:
    """Score the last reply of a trace.

    The sample's ``data_source`` and ``ground_truth`` (or ``answer``, ``solution``) are fields of the task's data; its
    other fields are ``extra_info``. The prompt is all messages before the reply. Raises ``NoScoreError`` for a sample
    without a score, ``UnavailableError`` without a result in time, ``ValueError`` without ``PLAUDIT_URL``.
    """
    row: Mapping[str, Any] = task.model_dump(mode="json", exclude_none=True)
    messages = plain_messages(trace.messages)
    last = max((i for i, message in enumerate(messages) if message.get("role") == "assistant"), default=len(messages))
    result = await client().score(
        {
            "id": trace.id,
            "data_source": row.get("data_source", ""),
            "prompt": messages[:last],
            "response": trace.last_reply or "",
            "ground_truth": ground_truth_of(row),
            "extra_info": {
                **{name: value for name, value in row.items() if name not in _OF_THE_RUNNER},
                "num_turns": trace.num_turns,
            },
        }
    )
    return note(result).require_score()
