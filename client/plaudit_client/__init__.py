"""Score samples with a Plaudit reward service, over HTTP, from any trainer.

::

    service = json.loads(Path("runs/<run>/service.json").read_text())
    async with RewardClient(service["url"], service["token"]) as client:
        result = await client.score({"data_source": "openai/gsm8k", "response": "#### 4", "ground_truth": "4"})
        print(result.score, result.outcome)

``SyncRewardClient`` is the same for programs without an event loop. Both may be called by thousands of tasks or
threads at once: samples that wait at the same time share a request. A lost connection, a busy service and a restart of
the service are retried under the same ids, so no sample is lost or scored twice.
"""

from plaudit_client.blocking import SyncRewardClient
from plaudit_client.client import RewardClient
from plaudit_client.result import (
    AuthenticationError,
    InvalidSampleError,
    NoScoreError,
    ProtocolError,
    Result,
    RewardError,
    ScorerResult,
    UnavailableError,
)

__all__ = [
    "AuthenticationError",
    "InvalidSampleError",
    "NoScoreError",
    "ProtocolError",
    "Result",
    "RewardClient",
    "RewardError",
    "ScorerResult",
    "SyncRewardClient",
    "UnavailableError",
]
