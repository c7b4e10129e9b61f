"""``kind: judge``: render the prompt → wait for the limits → ask the endpoint → parse its answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from plaudit_reward.endpoint.access import EndpointAccess
from plaudit_reward.endpoint.limiter import Limiter
from plaudit_reward.endpoint.usage import UsageReport
from plaudit_reward.functions.result import extra_of
from plaudit_reward.judge.client import JudgeAnswer, JudgeClient
from plaudit_reward.judge.estimate import TokenEstimate
from plaudit_reward.judge.parse import Parser
from plaudit_reward.judge.prompt import PromptTemplate
from plaudit_reward.score import Score
from plaudit_reward.scorer import Attempt
from plaudit_wire.sample import Sample

_LEAST_PARSE_S = 1.0


class JudgeScorer:
    """Score samples by an endpoint's answers; of sample or group scope as its template and parser are.

    Args:
        client: asks the endpoint; closed here.
        parser: reads the answer; opened and closed here.
        limiter: started and stopped here.
        report: adds the usage to the run's; started and stopped here. None outside of a run.
        traceparent: returns the trace context of a sample, sent as a header (a group's is its first sample's). None
            where nothing is traced.
    """

    def __init__(
        self,
        name: str,
        template: PromptTemplate,
        client: JudgeClient,
        parser: Parser,
        limiter: Limiter,
        estimate: TokenEstimate,
        report: UsageReport | None = None,
        traceparent: Callable[[Sample], str] | None = None,
    ) -> None:
        self.name = name
        self._template = template
        self._client = client
        self._parser = parser
        self._access = EndpointAccess(name, client.base_url, limiter, report)
        self._estimate = estimate
        self._traceparent = traceparent

    async def open(self) -> None:
        """Start the limiter and the parser. The endpoint may come up later: the first sample connects to it.

        Raises:
            ConfigurationError: the parser's function cannot be loaded, or the judge's servers have no address.
        """
        await self._client.open()
        await self._parser.open()
        self._access.start()

    @property
    def circuit_open(self) -> bool:
        """Return True while requests to the endpoint are stopped, or only probes are sent."""
        return self._access.circuit_open

    async def score(self, sample: Sample, attempt: Attempt) -> Score:
        """Score one sample."""
        (score,) = await self.score_group([sample], [], attempt)
        return score

    async def score_group(self, samples: Sequence[Sample], values: Sequence[float], attempt: Attempt) -> list[Score]:
        """Score all samples of a group by one answer."""
        prompt = self._template.render(samples)
        headers = {"traceparent": self._traceparent(samples[0])} if self._traceparent else None
        answer, spent_s = await self._ask(prompt, attempt, headers)
        parsing = Attempt(max(_LEAST_PARSE_S, attempt.limit_s - spent_s))
        scores = await self._parser.scores(answer.text, samples, parsing)
        attempt.queued_s += parsing.queued_s
        items = {
            "answer": answer.text,
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
        }
        # An answer about several samples is recorded once.
        first = msgspec.structs.replace(scores[0], extra={**extra_of(items), **scores[0].extra})
        return [first, *scores[1:]]

    def room(self) -> int:
        """Return how many more samples could begin soon; one, the probe, while the circuit is open.

        None while the job serves the judge and no server is healthy, so that the samples' time stays whole.
        """
        return self._access.room() if self._client.reachable else 0

    async def close(self) -> None:
        """Stop the limiter, the parser and the report, and close the connections."""
        await self._access.stop()
        await self._client.close()
        await self._parser.close()

    async def _ask(self, prompt: str, attempt: Attempt, headers: Mapping[str, str] | None) -> tuple[JudgeAnswer, float]:
        """Return the answer and the seconds of the call."""
        async with self._access.request(self._estimate.tokens(prompt), attempt) as passage:
            began = time.monotonic()
            answer = await self._client.ask(prompt, attempt.limit_s, self._access.on_sent(passage), headers)
            spent_s = time.monotonic() - began
            if answer.prompt_tokens is not None and answer.completion_tokens is not None:
                passage.tokens = answer.prompt_tokens + answer.completion_tokens
                self._estimate.learn(prompt, answer.prompt_tokens, answer.completion_tokens)
        return answer, spent_s
