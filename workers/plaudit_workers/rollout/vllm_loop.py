"""Drive vLLM's engine from one thread: commands → switch weights → admit → step → answer. Imports vLLM.

A switch of weights happens between two steps of this loop: running requests stay, and the label of the weights
(``set_weight_version``) changes between the same two steps, so vLLM's own spans separate the tokens of the old weights
from those of the new ones.

New requests carry the number of the load as ``cache_salt``; without it, vLLM's prefix cache would serve them key-value
blocks of the old weights. Requests that have not sampled a token when the weights change are submitted again for the
same reason. A sleeping engine has neither weights nor cache: it gets their memory back around the next load, and
computes the cache of running requests again. Adapters (``trainer.lora``) are not switched: a request finishes with the
adapter that began it.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.agents.messages import FinishedSample
from plaudit_workers.rollout.engine import (
    EngineFailedError,
    RequestRefusedError,
    SampleRequest,
    WeightsUnreadableError,
    check_readable,
)
from plaudit_workers.rollout.vllm_arguments import PROBE_PLACES
from plaudit_workers.rollout.vllm_engine import FutureResult, Generation, Sleep, WeightLoad

if TYPE_CHECKING:
    from torch import Tensor

_SEED_BITS = (1 << 63) - 1
_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_REFUSALS = (VLLMClientError, ValueError)
"""Exceptions of vLLM for a request that can never be generated."""
_DISCARD = 2
"""vLLM's level of sleep that keeps no copy of the weights: new ones are loaded before anything is generated."""


def _sampling_parameters(request: SampleRequest) -> SamplingParams:
    """Return vLLM's parameters of a response whose log-probabilities and policy versions are published."""
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        seed=request.seed & _SEED_BITS,
        logprobs=0,
        flat_logprobs=True,
        stop=sampling.stop or None,
        stop_token_ids=sampling.stop_token_ids or None,
        ignore_eos=sampling.ignore_eos,
        detokenize=bool(sampling.stop),  # vLLM looks for stop texts in the text
        skip_special_tokens=False,  # one of them may be a stop text; nobody reads vLLM's text
        spaces_between_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


@dataclass(frozen=True)
class UntiedWeights:
    """Yield the tensors of a folder of weights with a head of their own; each iteration reads the files.

    vLLM's CPU backend packs the matrix of a head tied to its embedding when it builds the model; a reload replaces the
    embedding and leaves the packed head at the old weights, without an error (log-probabilities off by 0.5 and more).
    So on a CPU the model is built untied and the head is loaded as a matrix of its own.

    With tensor parallelism vLLM sends it to its worker processes, which a generator cannot be.
    """

    folder: Path

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all ``*.safetensors``; if they have no head, the embedding again as the head."""
        has_head, embedding = False, None
        for file in sorted(self.folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping: it cannot be iterated)
                    tensor = tensors.get_tensor(name)
                    has_head = has_head or name == _HEAD
                    embedding = tensor if name.endswith(_EMBEDDING) else embedding
                    yield name, tensor
        if not has_head and embedding is not None:
            yield _HEAD, embedding


class VllmLoop:
    """Own an ``LLMEngine``. Every method but ``call`` runs in the loop's thread.

    Args:
        engine: vLLM's engine, its core in this process.
        report: called once a round with the answers of that round.
        untied: the model was built with an output head of its own; see ``UntiedWeights``.
        adapters: weights are LoRA adapters, and the engine, built with ``enable_lora``, keeps its own.
    """

    def __init__(
        self,
        engine: LLMEngine,
        report: Callable[[list[FutureResult]], None],
        *,
        untied: bool = False,
        adapters: bool = False,
        images: bool = False,
    ) -> None:
        self._engine = engine
        self._report = report
        self._untied = untied
        self._adapters = adapters
        self._adapter: LoRARequest | None = None
        """For new requests; None before the first load, and without adapters."""
        self._images = images
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._line: deque[Generation] = deque()
        self._running: dict[str, Generation] = {}
        self._probes: dict[str, asyncio.Future[list[float]]] = {}
        self._loads: deque[WeightLoad | Sleep] = deque()
        self._answers: list[FutureResult] = []
        self._version: PolicyVersion | None = None
        self._num_loads = 0
        self._places = engine.vllm_config.scheduler_config.max_num_seqs - PROBE_PLACES
        self._closing = False
        # It was built without reading weights; from now on it reads those that it is given.
        engine.collective_rpc("update_config", kwargs={"overrides": {"load_config": {"load_format": "auto"}}})

    @property
    def num_queued(self) -> int:
        """Return the requests that wait for a place, outside of vLLM. From any thread."""
        return len(self._line)

    def call(self, command: Callable[[], None]) -> None:
        """Run ``command`` before the next step. From any thread."""
        self._commands.put(command)

    def run(self) -> None:
        """Work until ``close``; raise what vLLM raises in a step, ``EngineFailedError`` in a load of weights."""
        while not self._closing:
            self._run_commands()
            self._switch_weights()
            self._admit()
            self._step()
            self._send_answers()

    def close(self) -> None:
        """End ``run`` after this round."""
        self._closing = True

    def shut_down(self) -> None:
        """Free the engine; call this after ``run`` has returned or raised."""
        self._engine.engine_core.shutdown()

    def submit(self, generation: Generation) -> None:
        """Queue a request."""
        self._line.append(generation)

    def cancel(self, request_id: str) -> None:
        """Drop a request, queued or running; ignore one that is unknown."""
        if self._running.pop(request_id, None):
            self._engine.abort_request([request_id])
        else:
            self._line = deque(generation for generation in self._line if generation.id != request_id)

    def switch(self, load: WeightLoad | Sleep) -> None:
        """Switch the weights, or free the GPUs, as soon as ``load.switch`` allows."""
        self._loads.append(load)

    def probe(self, ids: Sequence[int], future: asyncio.Future[list[float]]) -> None:
        """Compute the log-probabilities of ``ids[1:]``; [L] in, [L - 1] out."""
        probe_id = f"probe-{time.monotonic_ns()}"
        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        try:
            self._engine.add_request(probe_id, tokens_input(list(ids)), parameters, lora_request=self._adapter)
        except _REFUSALS as error:
            self._answers.append((future, EngineFailedError(f"the probe does not fit this model: {error}")))
        else:
            self._probes[probe_id] = future

    def _run_commands(self) -> None:
        idle = not (self._loads or self._can_step() or (self._line and self._version is not None))
        if idle:
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get_nowait()()

    def _can_step(self) -> bool:
        return self._version is not None and self._engine.has_unfinished_requests()

    def _switch_weights(self) -> None:
        while self._loads and not (self._loads[0].switch == "drain" and self._can_step()):
            load = self._loads.popleft()
            if isinstance(load, Sleep):
                self._sleep()
                self._answers.append((load.future, None))
                continue
            try:
                check_readable(self._engine, load.path, adapter=self._adapters)
            except WeightsUnreadableError as error:
                self._version = None
                self._answers.append((load.future, error))
            else:
                self._load(load)
                self._answers.append((load.future, None))

    def _settle(self) -> None:
        """Finish the batches that pipeline parallelism keeps in flight: the old weights sample their tokens."""
        core = self._engine.engine_core.engine_core
        if not core.batch_queue:
            return
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while core.batch_queue:
                for output in self._engine.step():
                    self._finish(output)
        finally:
            core.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _sleep(self) -> None:
        if self._engine.is_sleeping():  # no weights could be read since
            return
        self._settle()
        self._version = None
        self._engine.sleep(_DISCARD, "keep")
        for generation in self._running.values():
            generation.recomputed += 1

    def _load(self, load: WeightLoad) -> None:
        self._settle()
        self._num_loads += 1
        try:
            if self._adapters:
                self._add_adapter(load)
            else:
                self._replace_weights(load)
        except Exception as error:
            raise EngineFailedError(
                f"vLLM failed while it loaded the weights {load.version} from {load.path}. The engine may now hold a "
                f"mixture of versions: {error!r}. If this repeats after a restart, they are of another model than "
                "spec.model.source, or of one that vLLM cannot load"
            ) from error
        self._version = load.version
        self._requeue_unbegun()
        if load.switch == "recompute" and self._running:
            self._engine.reset_prefix_cache(reset_running_requests=True)
            for generation in self._running.values():
                generation.recomputed += 1

    def _add_adapter(self, load: WeightLoad) -> None:
        """Add an adapter beside the old ones; the engine computes requests of several versions in one step.

        One that no running request uses any more is the first that vLLM drops.
        """
        # A repeated load of the same version is a new adapter to vLLM: the files may have changed.
        name = f"{load.version}-{self._num_loads}"
        adapter = LoRARequest(lora_name=name, lora_int_id=self._num_loads, lora_path=str(load.path))
        self._engine.add_lora(adapter)
        self._adapter = adapter

    def _replace_weights(self, load: WeightLoad) -> None:
        weights = {"weights_iterator": UntiedWeights(load.path)} if self._untied else {"weights_path": str(load.path)}
        sleeping = self._engine.is_sleeping()
        if sleeping:
            self._engine.wake_up(["weights"])
        config = self._engine.model_config
        source = config.model, config.revision
        self._engine.collective_rpc("reload_weights", kwargs=weights)
        if self._images:
            # From a path vLLM also takes the processor of images, which need not be there.
            config.model, config.revision = source
            # The workers have discarded what the old vision tower made of images; the scheduler still counts on it.
            self._engine.reset_encoder_cache()
        if sleeping:
            self._engine.wake_up(["kv_cache"])
        self._engine.set_weight_version(str(load.version))

    def _requeue_unbegun(self) -> None:
        states = self._engine.output_processor.request_states
        unbegun = [each for each in self._running.values() if states[each.internal_id].is_prefilling]
        if unbegun:
            self._engine.abort_request([generation.id for generation in unbegun])
        for generation in reversed(unbegun):
            del self._running[generation.id]
            self._line.appendleft(generation)

    def _admit(self) -> None:
        if self._version is None or self._loads:
            return
        while self._line and len(self._running) < self._places:
            generation = self._line.popleft()
            try:
                generation.internal_id = self._engine.add_request(
                    generation.id,
                    self._input(generation),
                    _sampling_parameters(generation.request),
                    arrival_time=time.time() - (time.monotonic() - generation.submitted),
                    lora_request=self._adapter,
                )
            except _REFUSALS as error:
                self._answers.append((generation.future, RequestRefusedError(str(error))))
            else:
                generation.version = self._version if self._adapters else None
                self._running[generation.id] = generation

    def _input(self, generation: Generation) -> Any:
        """Return a request's prompt as the engine takes it; vLLM's processor repeats the tokens of its images."""
        ids, salt = list(generation.request.prompt_ids), str(self._num_loads)
        size, longest = self._engine.model_config.get_vocab_size(), self._engine.model_config.max_model_len
        if len(ids) >= longest:  # of an agent or an environment: prompts of rows are shorter
            raise ValueError(
                f"the prompt has {len(ids):,} tokens, and a prompt and its response together may have {longest:,}: "
                "raise rollout.engine.maxModelLength, or let the agent or environment write less"
            )
        if ids and not 0 <= min(ids) <= max(ids) < size:  # from a user's agent: the embedding would end the engine
            raise ValueError(f"the prompt has token ids from {min(ids)} to {max(ids)}; the vocabulary has {size}")
        if not generation.images:
            return tokens_input(ids, cache_salt=salt)
        prompt = {
            "prompt_token_ids": ids,
            "multi_modal_data": {"image": list(generation.images)},
            "multi_modal_uuids": {"image": list(generation.request.images)},
            "cache_salt": salt,
        }
        return self._engine.renderer.render_cmpl([prompt])[0]

    def _step(self) -> None:
        if self._can_step():
            for output in self._engine.step():
                self._finish(output)

    def _finish(self, output: RequestOutput) -> None:
        probe = self._probes.pop(output.request_id, None)
        if probe is not None:
            pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
            self._answers.append((probe, [position[token].logprob for token, position in pairs]))
        generation = self._running.pop(output.request_id, None)
        if generation is not None:
            self._answers.append((generation.future, _finished(generation, output)))

    def _send_answers(self) -> None:
        if self._answers:
            self._report(self._answers)
            self._answers = []


def _finished(generation: Generation, output: RequestOutput) -> FinishedSample | RequestRefusedError:
    completion, metrics = output.outputs[0], output.metrics
    if completion.finish_reason not in ("stop", "length"):
        return RequestRefusedError(f"the engine ended it with {completion.finish_reason!r}")
    if generation.version is not None:
        versions = [(0, generation.version)]
    else:
        versions = [(span.start, PolicyVersion.parse(span.version)) for span in completion.weight_versions]
    return FinishedSample(
        response_ids=list(completion.token_ids),
        # With logprobs=0 there is exactly the sampled token's at each position.
        logprobs=completion.logprobs.logprobs,
        version_spans=[(first, version.incarnation, version.number) for first, version in versions],
        finish_reason=completion.finish_reason,
        generate_s=time.monotonic() - generation.submitted,
        engine_queue_s=max(0.0, metrics.scheduled_ts - generation.submitted),
        num_preempted=max(0, metrics.num_preemptions - generation.recomputed),
        prompt_ids=list(output.prompt_token_ids) if generation.images else [],
    )
