"""vLLM's engine and the one thread that touches it: commands → switch weights → admit → step → report.

Because the loop is ours, a switch of weights simply happens between two steps: requests that run stay, and the label
of the weights (``set_weight_version``) changes between the same two steps, so vLLM's own spans say which tokens the
old weights sampled.

New requests carry the policy version as ``cache_salt``: without it vLLM's prefix cache would serve key-value blocks
of the old weights to them. Requests that have not sampled a token when the weights change are put in again for the
same reason.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.rollout.engines.protocol import (
    FinishedSample,
    InFlight,
    Outcome,
    RefusedSample,
    SampleRequest,
    WeightsUnreadableError,
)
from plaudit_workers.rollout.engines.resolve_future import settle
from plaudit_workers.rollout.engines.tied_weights import untied_weights

_REFUSALS = (VLLMClientError, ValueError)
"""What vLLM raises when a request can never be generated."""
_SEED_BITS = (1 << 63) - 1


@dataclass(slots=True)
class _Entry:
    """A request inside vLLM."""

    request: SampleRequest
    submitted: float
    internal_id: str
    recomputed: int = 0
    """Preemptions that a switch of weights caused: not the engine's lack of memory."""


@dataclass(frozen=True, slots=True)
class _Load:
    path: Path
    version: PolicyVersion
    in_flight: InFlight
    done: Future[None]


class VllmLoop:
    """Owns an ``LLMEngine``. Every method but ``call`` runs in the loop's thread.

    Args:
        engine: vLLM's engine, its core in this process.
        report: called with what finished in a step.
        untied: the model was built with a head of its own; see ``tied_weights``.
    """

    def __init__(self, engine: LLMEngine, report: Callable[[list[Outcome]], None], *, untied: bool = False) -> None:
        self._engine = engine
        self._report = report
        self._untied = untied
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._line: deque[tuple[SampleRequest, float]] = deque()
        self._entries: dict[str, _Entry] = {}
        self._probes: dict[str, Future[list[float]]] = {}
        self._loads: deque[_Load] = deque()
        self._version: PolicyVersion | None = None
        self._closing = False
        # It was built without reading weights; from now on it reads those it is pointed to.
        engine.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "auto"}}})

    def call(self, command: Callable[[], None]) -> None:
        """Has the loop run ``command`` before its next step. From any thread."""
        self._commands.put(command)

    def run(self) -> None:
        """Works until ``close``; raises what vLLM raises in a step."""
        while not self._closing:
            self._run_commands()
            self._switch_weights()
            self._admit()
            self._step()

    def close(self) -> None:
        """Ends ``run`` after this round."""
        self._closing = True

    def shut_down(self) -> None:
        """Frees the engine; call when ``run`` has returned or raised."""
        self._engine.engine_core.shutdown()

    def submit(self, request: SampleRequest, submitted: float) -> None:
        """Lines a request up."""
        self._line.append((request, submitted))

    def cancel(self, ids: Sequence[str]) -> None:
        """Forgets requests, running or in line."""
        unwanted = set(ids)
        self._line = deque(item for item in self._line if item[0].id not in unwanted)
        running = [sample_id for sample_id in unwanted if self._entries.pop(sample_id, None)]
        if running:
            self._engine.abort_request(running)

    def load(self, path: Path, version: PolicyVersion, in_flight: InFlight, done: Future[None]) -> None:
        """Switches the weights as soon as ``in_flight`` allows."""
        self._loads.append(_Load(path, version, in_flight, done))

    def probe(self, ids: Sequence[int], done: Future[list[float]]) -> None:
        """Asks for the log-probabilities of ``ids[1:]``; [L] in, [L - 1] out."""
        probe_id = f"probe-{time.monotonic_ns()}"
        self._probes[probe_id] = done
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        try:
            self._engine.add_request(probe_id, tokens_input(list(ids)), parameters)
        except _REFUSALS as error:
            del self._probes[probe_id]
            settle(done, error=WeightsUnreadableError(f"the probe does not fit this model: {error}"))

    def _run_commands(self) -> None:
        idle = not (self._loads or self._can_step() or (self._line and self._version is not None))
        if idle:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get_nowait()()

    def _can_step(self) -> bool:
        # After a load that failed half-way the weights are neither old nor new: nothing is sampled from them.
        return self._version is not None and self._engine.has_unfinished_requests()

    def _switch_weights(self) -> None:
        while self._loads and not (self._loads[0].in_flight == "drain" and self._can_step()):
            load = self._loads.popleft()
            try:
                self._load(load)
            except Exception as error:
                # Missing or torn files surface as many types; the caller reads the announcement again.
                self._version = None
                settle(load.done, error=WeightsUnreadableError(f"{load.path}: {error!r}"))
            else:
                settle(load.done)

    def _load(self, load: _Load) -> None:
        weights = {"weights_iterator": untied_weights(load.path)} if self._untied else {"weights_path": str(load.path)}
        self._engine.collective_rpc("reload_weights", kwargs=weights)
        self._engine.set_weight_version(str(load.version))
        self._version = load.version
        self._resubmit_unbegun()
        if load.in_flight == "recompute" and self._entries:
            self._engine.reset_prefix_cache(reset_running_requests=True)
            for entry in self._entries.values():
                entry.recomputed += 1

    def _resubmit_unbegun(self) -> None:
        states = self._engine.output_processor.request_states
        unbegun = [entry for entry in self._entries.values() if states[entry.internal_id].is_prefilling]
        if unbegun:
            self._engine.abort_request([entry.request.id for entry in unbegun])
        for entry in reversed(unbegun):
            del self._entries[entry.request.id]
            self._line.appendleft((entry.request, entry.submitted))

    def _admit(self) -> None:
        if self._version is None or self._loads:
            return
        refused: list[Outcome] = []
        while self._line:
            request, submitted = self._line.popleft()
            try:
                internal_id = self._engine.add_request(
                    request.id,
                    tokens_input(list(request.prompt_ids), cache_salt=str(self._version)),
                    _sampling_parameters(request),
                )
            except _REFUSALS as error:
                refused.append(RefusedSample(request.id, str(error)))
            else:
                self._entries[request.id] = _Entry(request, submitted, internal_id)
        if refused:
            self._report(refused)

    def _step(self) -> None:
        if not self._can_step():
            return
        outputs = self._engine.step()
        outcomes = [outcome for output in outputs if (outcome := self._outcome(output)) is not None]
        if outcomes:
            self._report(outcomes)

    def _outcome(self, output: RequestOutput) -> Outcome | None:
        probe = self._probes.pop(output.request_id, None)
        if probe is not None:
            settle(probe, _prompt_logprobs(output))
            return None
        entry = self._entries.pop(output.request_id, None)
        return None if entry is None else _finished(entry, output)


def _sampling_parameters(request: SampleRequest) -> SamplingParams:
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed & _SEED_BITS,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _finished(entry: _Entry, output: RequestOutput) -> Outcome:
    completion, metrics = output.outputs[0], output.metrics
    if completion.finish_reason not in ("stop", "length"):
        return RefusedSample(entry.request.id, f"the engine ended it with {completion.finish_reason!r}")
    spans = [_version_span(span.version, span.start) for span in completion.weight_versions]
    return FinishedSample(
        id=entry.request.id,
        response_ids=list(completion.token_ids),
        # With logprobs=0 there is exactly the sampled token's at each position.
        logprobs=completion.logprobs.logprobs,
        version_spans=spans,
        finish_reason=completion.finish_reason,
        generate_s=time.monotonic() - entry.submitted,
        engine_queue_s=max(0.0, metrics.scheduled_ts - entry.submitted),
        num_preempted=max(0, metrics.num_preemptions - entry.recomputed),
    )


def _version_span(version: str, first: int) -> tuple[int, int, int]:
    incarnation, number = version.split(".")
    return first, int(incarnation), int(number)


def _prompt_logprobs(output: RequestOutput) -> list[float]:
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [position[token].logprob for token, position in pairs]
