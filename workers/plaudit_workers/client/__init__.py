"""The client of a scoring service (an RLJob without rollout and trainer): submit samples, take their scores.

::

    async with RewardClient("redis://host:6379/0", run="math-rewards-1f3a9c") as client:
        await client.submit([{"data_source": "openai/gsm8k", "response": "#### 4", "ground_truth": "4"}])
        async for result in client.results():
            print(result.id, result.score, result.outcome)

``SyncRewardClient`` is the same for programs without an event loop. docs/reward-service.md says what holds when a
client, a worker or Redis dies.
"""

from plaudit_workers.client.blocking import SyncRewardClient
from plaudit_workers.client.client import RewardClient
from plaudit_workers.client.connect import ServiceError
from plaudit_workers.client.result import Result
from plaudit_workers.scoring.offline.lines import SampleInput

__all__ = ["Result", "RewardClient", "SampleInput", "ServiceError", "SyncRewardClient"]
