"""Check the fields of a job against each other.

Each rule is a function that yields problems; ``rule_problems`` runs them all. The range of a single field is declared
with the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from urllib.parse import urlsplit

from plaudit_job.problem import Problem, refusals
from plaudit_job.rules.scorers import password_problems, scorer_problems
from plaudit_job.rules.training import (
    data_problems,
    environment_problems,
    failure_policy_problems,
    gpu_problems,
    group_problems,
    image_problems,
    loss_problems,
    model_turn_problems,
    trainer_memory_problems,
    turn_advantage_problems,
)
from plaudit_job.spec.rljob import Spec
from plaudit_job.spec.rollout import AgentSpec, ToolSpec
from plaudit_job.spec.transport import USABLE_SHARE, TlsSpec
from plaudit_wire.records import ADMISSION_MEMORY_SHARE, EVENTS_MEMORY_SHARE, INLINE_LIMIT_BYTES

_BYTES_PER_TOKEN = 9
"""int32 id, float32 log-probability, uint8 loss mask."""
_TEXT_BYTES_PER_TOKEN = 4
_TEXT_COPIES = 2
"""One in the group's hash, one in the entry that scorers read."""
_OVERHEAD_BYTES = 4096
"""Prompt's share, stamps, records, Redis's own."""


def rule_problems(spec: Spec) -> list[Problem]:
    """Return every contradiction between two or more fields of the job."""
    rules = (_ALWAYS + _TRAINING) if spec.trains else (_ALWAYS + _SCORING_ONLY)
    return [problem for rule in rules for problem in rule(spec)]


def _sections_together(spec: Spec) -> Iterator[Problem]:
    for name, remedy in _SECTION_REMEDIES.items():
        if name not in spec.model_fields_set:
            yield Problem(f"spec.{name}", "is missing; a job with rollout or trainer requires it", remedy)


_SECTION_REMEDIES = {
    "model": "Add model: {source: …}",
    "data": "Add data: {train: {path: …}}",
    "algorithm": "Add algorithm: {steps: …}",
    "rollout": "Add rollout: {} for its defaults, or remove trainer for a job that only scores",
    "trainer": "Add trainer: {} for its defaults, or remove rollout for a job that only scores",
}


def _unused_sections(spec: Spec) -> Iterator[Problem]:
    for name in ("model", "data", "algorithm"):
        if name in spec.model_fields_set:
            yield Problem(
                f"spec.{name}",
                "is unused in a job without rollout and trainer",
                "Add rollout: {} and trainer: {} to train, or remove this section for a job that only scores",
            )
    if spec.scheduling.whole:
        yield Problem(
            "spec.scheduling",
            "gang and queueName start trainer and rollouts together, but this job has neither",
            "Remove them: reward workers start one by one",
        )


def _algorithm(spec: Spec) -> Iterator[Problem]:
    algorithm, loss = spec.algorithm, spec.algorithm.loss
    prompts, parts, samples = algorithm.prompts_per_step, algorithm.mini_batches_per_step, algorithm.samples_per_prompt
    in_reward, over_batch = loss.kl_in == "reward", algorithm.advantage == "reinforcePlusPlus"
    yield from refusals(
        (
            prompts % parts,
            "spec.algorithm.promptsPerStep",
            f"{prompts} is not a multiple of miniBatchesPerStep {parts}",
            f"Give a multiple of {parts}, such as {max(parts, prompts - prompts % parts)}",
            "spec.algorithm.miniBatchesPerStep",
        ),
        (
            algorithm.order == "ready" and algorithm.max_staleness == 0,
            "spec.algorithm.order",
            "order ready trains groups across steps, but maxStaleness is 0",
            "Set maxStaleness to 1 or more, or order to step",
            "spec.algorithm.maxStaleness",
        ),
        (
            samples < 2 and not over_batch,
            "spec.algorithm.samplesPerPrompt",
            f"with {samples}, a group has nothing to compare and advantage {algorithm.advantage} is always 0",
            "Give at least 2, or set advantage to reinforcePlusPlus",
            "spec.algorithm.advantage",
        ),
        (
            spec.reward.min_samples_per_group > samples,
            "spec.reward.minSamplesPerGroup",
            f"{spec.reward.min_samples_per_group} is more than samplesPerPrompt {samples}, so every group would be "
            "dropped",
            f"Give at most {samples}",
            "spec.algorithm.samplesPerPrompt",
        ),
        (
            not in_reward and loss.adaptive_kl is not None,
            "spec.algorithm.loss.adaptiveKl",
            "changes the coefficient of a divergence in the reward, but klIn is loss",
            "Set klIn: reward, or remove adaptiveKl",
            "spec.algorithm.loss.klIn",
        ),
        (
            in_reward and loss.kl_coefficient == 0,
            "spec.algorithm.loss.klIn",
            "is reward, but klCoefficient is 0",
            "Set klCoefficient, or remove klIn",
            "spec.algorithm.loss.klCoefficient",
        ),
        (
            in_reward and over_batch,
            "spec.algorithm.loss.klIn",
            "is reward, but under advantage reinforcePlusPlus each token would have an advantage of its own",
            "Choose klIn: loss, or an advantage relative to the group, such as reinforcePlusPlusBaseline",
            "spec.algorithm.advantage",
        ),
        (
            algorithm.dynamic_sampling and over_batch,
            "spec.algorithm.dynamicSampling",
            "drops groups with equal scores, but under advantage reinforcePlusPlus they have a signal",
            "Remove dynamicSampling, or choose a group-relative advantage",
            "spec.algorithm.advantage",
        ),
    )
    if algorithm.dynamic_sampling and not algorithm.max_replaced:
        yield Problem(
            "spec.algorithm.dynamicSampling.maxFactor",
            f"{algorithm.dynamic_sampling.max_factor} allows no further prompt beside {prompts}",
            f"Give at least {1 + 1 / prompts:.3g}",
            also=("spec.algorithm.promptsPerStep",),
        )


def _sampling(spec: Spec) -> Iterator[Problem]:
    prompt, room = spec.data.train.max_prompt_length, spec.rollout.engine.max_model_length
    also: tuple[str, ...] = ("spec.data.train.maxPromptLength", "spec.rollout.sampling.maxTokens")
    limits = [("maxTokens", spec.rollout.sampling.max_tokens, also)]
    if spec.data.validation and (own := spec.data.validation.sampling.max_tokens):
        limits.append(("validation's maxTokens", own, (*also, "spec.data.validation.sampling.maxTokens")))
    for name, response, fields in limits:
        if prompt + response > room:
            yield Problem(
                "spec.rollout.engine.maxModelLength",
                f"{room} is less than maxPromptLength {prompt} + {name} {response} = {prompt + response}",
                f"Give at least {prompt + response}, or lower maxPromptLength or maxTokens",
                also=fields,
            )
    if spec.rollout.sampling.temperature == 0:
        yield Problem(
            "spec.rollout.sampling.temperature",
            "with 0, all samples of a group are the same and nothing is learned",
            "Give a value above 0, such as 1.0",
        )
    ignoring = [("spec.rollout.sampling", spec.rollout.sampling.ignore_eos)]
    if (validation := spec.data.validation) is not None:
        ignoring.append(("spec.data.validation.sampling", validation.sampling.ignore_eos))
    for field, ignores in ignoring:
        if ignores and spec.rollout.agent.kind not in ("singleTurn", "custom"):
            yield Problem(
                f"{field}.ignoreEos",
                f"is set, but agent kind {spec.rollout.agent.kind} has turns, which would all go on to maxTokens",
                "Remove it",
                also=("spec.rollout.agent.kind",),
            )
    if validation is not None:
        sampling, limit = validation.sampling, validation.sampling.max_tokens or spec.rollout.sampling.max_tokens
        if sampling.min_tokens > limit:
            yield Problem(
                "spec.data.validation.sampling.minTokens",
                f"is {sampling.min_tokens}, above the {limit} tokens that a response may have",
                "Lower it, or raise maxTokens",
            )


def _agent(spec: Spec) -> Iterator[Problem]:
    agent = spec.rollout.agent
    names = list(spec.reward.environment_weights)
    if names and (
        agent.kind == "singleTurn"
        or (agent.kind == "tools" and agent.tools and all(tool.sandbox or tool.mcp for tool in agent.tools))
    ):
        giver, remedy = "environment", "Choose agent kind environment, tools, endpoint or custom"
        if agent.kind == "tools":
            giver = "tool of kind sandbox or mcp"
            remedy = "Add a tool that returns a reward, choose scorer kind verifier for tests in the machine"
        yield Problem(
            "spec.rollout.agent.kind",
            f"is {agent.kind}: no {giver} gives the reward that scorer {names[0]!r} (kind environment) passes on, so "
            "it would skip every sample",
            f"{remedy}, or remove the scorer",
            also=("spec.reward.scorers",),
        )
    used = agent.tools or agent.path or agent.url or agent.environment or agent.command
    if used and "kind" not in agent.model_fields_set:
        yield Problem(
            "spec.rollout.agent.kind",
            "is missing, and without it samples have a single turn without tools or environment",
            "Add kind: tools, environment, endpoint or custom",
        )
    if agent.kind == "tools" and not agent.tools:
        yield Problem(
            "spec.rollout.agent.tools", "is empty; kind tools requires it", "List the tools: [{path: …, function: …}]"
        )
    if agent.kind == "custom" and not (agent.path and agent.class_name):
        yield Problem(
            "spec.rollout.agent.path", "or class is missing; kind custom requires both", "Give path: … and class: …"
        )
    if agent.kind == "endpoint":
        yield from _program(agent)
    given = (bool(agent.path and agent.class_name), bool(agent.url), bool(agent.environment))
    if agent.kind == "environment" and sum(given) != 1:
        yield Problem(
            "spec.rollout.agent.path",
            "with class, url or environment is required for kind environment; exactly one of them",
            "Give path: … and class: …, or url: …, or environment: …",
            also=tuple(f"spec.rollout.agent.{name}" for name in ("class", "url", "environment")),
        )
    if agent.sandbox:
        yield from _agent_in_machine(spec, agent)
    known = [server.name for server in spec.environments]
    if agent.environment and agent.environment not in known:
        yield Problem(
            "spec.rollout.agent.environment",
            f"names {agent.environment!r}; spec.environments has {', '.join(known) or 'none'}",
            "Name one of spec.environments",
        )
    for index, tool in enumerate(agent.tools):
        yield from _tool(f"spec.rollout.agent.tools[{index}]", tool)


def _agent_in_machine(spec: Spec, agent: AgentSpec) -> Iterator[Problem]:
    """Yield what keeps an agent with ``sandbox`` from its machine."""
    runs_inside = agent.kind == "endpoint"
    if not (
        bool(agent.command) and not agent.function if runs_inside else agent.kind == "environment" and agent.class_name
    ):
        yield Problem(
            "spec.rollout.agent.sandbox",
            f"is for kind environment with class and kind endpoint with command, and the kind is {agent.kind}",
            "Remove it; tools with sandbox give machines as well: tools: [{sandbox: bash}]",
            also=("spec.rollout.agent.kind", "spec.rollout.agent.command"),
        )
    if runs_inside and (names := list(spec.reward.environment_weights)):
        yield Problem(
            "spec.rollout.agent.sandbox",
            f"is true, and what a program prints in the policy's machine is no reward for scorer {names[0]!r} (kind "
            "environment)",
            "Score by kind verifier instead, or remove the scorer",
            also=("spec.reward.scorers",),
        )


def _program(agent: AgentSpec) -> Iterator[Problem]:
    if not agent.path and (agent.function or not agent.command):
        yield Problem(
            "spec.rollout.agent.path",
            "and command are missing" if not agent.function else "is missing; function names a function in it",
            "Give path: …, path: … with function: …, or command: […]",
        )
    elif agent.function and agent.command:
        yield Problem("spec.rollout.agent.command", "and function are both given", "Give command: […] or function: …")


def _tool(field: str, tool: ToolSpec) -> Iterator[Problem]:
    if bool(tool.path) != bool(tool.function):
        yield Problem(f"{field}.path", "and function belong together; one is missing", "Give path: … and function: …")
    elif sum((bool(tool.path), bool(tool.config), tool.mcp is not None, bool(tool.sandbox))) != 1:
        yield Problem(
            field,
            "needs exactly one of path with function, config, mcp and sandbox",
            "Give {path: …, function: …}, {config: …}, {mcp: {url: …}} or {sandbox: bash}",
        )
    if tool.mcp is not None and bool(tool.mcp.url) == bool(tool.mcp.command):
        yield Problem(f"{field}.mcp", "needs exactly one of url and command", "Give url: … or command: […]")
    if tool.mcp is not None and tool.mcp.headers and not tool.mcp.url:
        yield Problem(f"{field}.mcp.headers", "are for url", "Pass what a command needs in its arguments")


def _sandboxes(spec: Spec) -> Iterator[Problem]:
    """Yield what a provider of machines cannot do."""
    sandboxes, fields = spec.sandboxes, type(spec.sandboxes).model_fields
    provider = sandboxes.provider
    for name, providers in _SANDBOX_FIELDS.items():
        if (value := getattr(sandboxes, name)) == fields[name].get_default() or provider in providers:
            continue
        shown = f"is {value}, which" if isinstance(value, str | int) else "is given, which"
        yield Problem(
            f"spec.sandboxes.{name}",
            f"{shown} is for {_of_providers(providers)}, and the provider is {provider}",
            f"Set sandboxes.provider: {providers[0]}, or remove the field",
            also=("spec.sandboxes.provider",),
        )
    for index, tool in enumerate(spec.rollout.agent.tools):
        if tool.sandbox == "session" and provider == "process":
            yield Problem(
                f"spec.rollout.agent.tools[{index}].sandbox",
                "is session, and no process lives from one command to the next with the provider process",
                "Give {sandbox: bash}, or set sandboxes.provider: container",
                also=("spec.sandboxes.provider",),
            )
    if provider == "container" and sandboxes.keep != "none":
        yield Problem(
            "spec.sandboxes.keep",
            f"is {sandboxes.keep}, but containers are not kept",
            "Set keep: none, or sandboxes.provider: process or pods",
            also=("spec.sandboxes.provider",),
        )


def _of_providers(providers: Sequence[str]) -> str:
    named = {"container": "containers", "pods": "pods", "agentSandbox": "pods"}
    return " and ".join(dict.fromkeys(named[provider] for provider in providers))


_SANDBOX_FIELDS = {
    **dict.fromkeys(("image", "registry", "network"), ("container", "pods", "agentSandbox")),
    **dict.fromkeys(("warm", "pod"), ("pods", "agentSandbox")),
}
"""Providers by the fields that are for them alone."""


def _verifiers(spec: Spec) -> Iterator[Problem]:
    """Yield what scorers of kind verifier miss: the tests of a task, and the machine that an agent has left behind."""
    verifiers = [index for index, scorer in enumerate(spec.reward.scorers) if scorer.kind == "verifier"]
    for index in verifiers:
        field = f"spec.reward.scorers[{index}].kind"
        if index != verifiers[0]:
            yield Problem(
                field,
                f"is verifier, as reward.scorers[{verifiers[0]}].kind is, and a sample's tests run once",
                "Remove one of the two",
            )
        if not spec.uses_sandboxes:
            yield Problem(
                field,
                "is verifier, but no sample of this job has a machine in which tests could run",
                "Set rollout.agent: {kind: tools, tools: [{sandbox: bash}]}, or choose another kind",
                also=("spec.rollout.agent.tools",),
            )
        for name, section in spec.data.sections.items() if spec.trains else ():
            if section.path and not section.tasks:
                yield Problem(
                    field,
                    f"is verifier, but the rows of data.{name}.path have no tests",
                    f"Give a folder of Harbor tasks as data.{name}.tasks, or choose another kind",
                    also=(f"spec.data.{name}.path",),
                )


def _environments(spec: Spec) -> Iterator[Problem]:
    names = [server.name for server in spec.environments]
    for index, server in enumerate(spec.environments):
        field = f"spec.environments[{index}]"
        if not server.image and not server.pod.image and not server.command:
            yield Problem(f"{field}.image", "and command are missing", "Give image: …, command: […] or both")
        if server.name in names[:index]:
            yield Problem(f"{field}.name", f"{server.name!r} is used twice", "Give each environment its own name")


def _ranks(spec: Spec) -> Iterator[Problem]:
    trainer = spec.trainer
    yield from refusals(
        (
            trainer.strategy == "single" and trainer.ranks > 1,
            "spec.trainer.strategy",
            f"strategy single runs one process, but ranks is {trainer.ranks}",
            "Set strategy to fsdp2, or ranks to 1",
            "spec.trainer.ranks",
        ),
        (
            trainer.ranks > trainer.ranks_per_pod and trainer.ranks % trainer.ranks_per_pod,
            "spec.trainer.ranks",
            f"{trainer.ranks} is not a multiple of ranksPerPod {trainer.ranks_per_pod}",
            "Give a multiple, so that every pod has the same number",
            "spec.trainer.ranksPerPod",
        ),
    )
    for name, size in (("fsdpSize", trainer.fsdp_size or 1), ("sequenceParallelSize", trainer.sequence_parallel_size)):
        if trainer.ranks % size:
            yield Problem(
                f"spec.trainer.{name}",
                f"is {size}, which does not divide the number of ranks {trainer.ranks}",
                f"Set ranks to a multiple of {size} with strategy fsdp2, or remove {name}",
                also=("spec.trainer.ranks",),
            )


def _ways_of_weights(spec: Spec) -> Iterator[Problem]:
    """Yield what adapters, replicas of several pods and direct transfer exclude."""
    rollout, weights = spec.rollout, spec.trainer.weights
    lora, pods, direct = spec.trainer.lora is not None, rollout.spans_pods, weights.transfer == "direct"
    every, deltas = weights.full_every, weights.full_every > 1
    return refusals(
        (
            lora and rollout.in_flight == "recompute",
            "spec.rollout.inFlight",
            "is recompute, but with trainer.lora samples finish under the adapter that began them",
            "Set inFlight to continue, or to drain if samples of two versions must not run at once",
            "spec.trainer.lora",
        ),
        (
            lora and rollout.sleep_during_updates,
            "spec.rollout.sleepDuringUpdates",
            "discards the weights of the engine, but with trainer.lora only adapters are published to load again",
            "Remove sleepDuringUpdates, or lora",
            "spec.trainer.lora",
        ),
        (
            lora and direct,
            "spec.trainer.weights.transfer",
            "is direct, but with trainer.lora only adapters of a few megabytes are published, as files",
            "Set transfer to files",
            "spec.trainer.lora",
        ),
        (
            lora and deltas,
            "spec.trainer.weights.fullEvery",
            f"is {every}, but with trainer.lora only adapters of a few megabytes are published, always whole",
            "Leave out fullEvery",
            "spec.trainer.lora",
        ),
        (
            pods and rollout.sleep_during_updates,
            "spec.rollout.sleepDuringUpdates",
            "is not supported for replicas of several pods",
            "Remove sleepDuringUpdates, or set podsPerReplica to 1",
            "spec.rollout.podsPerReplica",
        ),
        (
            pods and direct,
            "spec.trainer.weights.transfer",
            "is direct, but a rollout replica of several pods reads its weights from files",
            "Set transfer to files, or podsPerReplica to 1",
            "spec.rollout.podsPerReplica",
        ),
        (
            pods and deltas,
            "spec.trainer.weights.fullEvery",
            f"is {every}, but the pods of a rollout replica read whole weights from the run's folder",
            "Leave out fullEvery, or set podsPerReplica to 1",
            "spec.rollout.podsPerReplica",
        ),
        (
            direct and deltas,
            "spec.trainer.weights.fullEvery",
            f"is {every}, but with transfer: direct rollouts receive every version whole, and no files",
            "Set transfer to files, or leave out fullEvery",
            "spec.trainer.weights.transfer",
        ),
    )


def _redis_memory(spec: Spec) -> Iterator[Problem]:
    if spec.transport.url:
        return
    algorithm, tokens = spec.algorithm, spec.rollout.sampling.max_tokens
    tensors, text = (min(tokens * each, INLINE_LIMIT_BYTES) for each in (_BYTES_PER_TOKEN, _TEXT_BYTES_PER_TOKEN))
    sample = tensors + _TEXT_COPIES * text + _OVERHEAD_BYTES
    samples = algorithm.prompts_per_step * (1 + algorithm.max_staleness) * algorithm.samples_per_prompt
    share = ADMISSION_MEMORY_SHARE - EVENTS_MEMORY_SHARE
    room = spec.transport.managed.max_memory_bytes * share
    if samples * sample > room:
        needed_gib = samples * sample / 2**30
        yield Problem(
            "spec.transport.managed.memory",
            f"{spec.transport.managed.memory} is too little for {samples} samples in flight ({needed_gib:.2f} GiB)",
            f"Give at least {math.ceil(needed_gib / USABLE_SHARE / share)}Gi (Redis may use 60 % "
            "of it and admits up to 70 % of that, a tenth of it for the metrics' events), or lower promptsPerStep, "
            "samplesPerPrompt, maxStaleness or maxTokens",
            also=(
                "spec.algorithm.promptsPerStep",
                "spec.algorithm.samplesPerPrompt",
                "spec.algorithm.maxStaleness",
                "spec.rollout.sampling.maxTokens",
            ),
        )


def _transport(spec: Spec) -> Iterator[Problem]:
    transport = spec.transport
    if transport.url and "@" in urlsplit(transport.url).netloc:
        yield Problem(
            "spec.transport.url",
            "contains a user or a password, which would end up in the run's folder and in logs",
            "Name the password's Secret in passwordSecret instead",
        )
    elif transport.url and transport.password_secret:
        yield from password_problems("spec.transport.url", transport.url)
    for name, given, own in (
        ("username", transport.username, "has users and passwords already"),
        ("passwordSecret", transport.password_secret, "has users and passwords already"),
        ("tls", transport.tls, "does not speak TLS (docs/kubernetes/security.md)"),
    ):
        if given and not transport.url:
            yield Problem(
                f"spec.transport.{name}",
                "applies to an external Redis only, but url is empty",
                f"Give url, or remove this: the job's own Redis {own}",
                also=("spec.transport.url",),
            )
    if transport.username and not transport.password_secret:
        yield Problem(
            "spec.transport.username",
            f"{transport.username!r} has no password",
            "Name the Secret of its password in passwordSecret",
            also=("spec.transport.passwordSecret",),
        )
    if transport.tls and transport.url:
        yield from _tls(transport.tls, transport.url)


def _tls(tls: TlsSpec, url: str) -> Iterator[Problem]:
    field = "spec.transport.tls"
    if not url.startswith("rediss://"):
        yield Problem(field, f"applies to rediss:// only, but url is {url!r}", "Use rediss:// in url, or remove tls")
    authorities = {"caSecret": tls.ca_secret, "caConfigMap": tls.ca_config_map, "caFile": tls.ca_file}
    given = [name for name, value in authorities.items() if value]
    if len(given) > 1:
        yield Problem(f"{field}.{given[1]}", f"is given together with {given[0]}", "Keep one of them")
    pairs = (
        ("certificateSecret", tls.certificate_secret, "keySecret", tls.key_secret),
        ("certificateFile", tls.certificate_file, "keyFile", tls.key_file),
    )
    for certificate_name, certificate, key_name, key in pairs:
        if bool(certificate) != bool(key):
            missing, present = (key_name, certificate_name) if certificate else (certificate_name, key_name)
            yield Problem(f"{field}.{missing}", f"is missing, but {present} is given", "A certificate needs its key")
    if tls.certificate_secret and tls.certificate_file:
        yield Problem(f"{field}.certificateFile", "is given together with certificateSecret", "Keep one of them")


def _autoscaling(spec: Spec) -> Iterator[Problem]:
    scaling = spec.reward.workers.autoscaling
    if scaling and scaling.min_replicas > scaling.max_replicas:
        yield Problem(
            "spec.reward.workers.autoscaling.minReplicas",
            f"{scaling.min_replicas} is more than maxReplicas {scaling.max_replicas}",
            "Lower it, or raise maxReplicas",
            also=("spec.reward.workers.autoscaling.maxReplicas",),
        )


def _files(spec: Spec) -> Iterator[Problem]:
    if spec.files.items and not spec.files.config_map:
        yield Problem("spec.files.configMap", "is empty, but items are listed", "Name their ConfigMap")
    paths = [item.path for item in spec.files.items]
    for index, path in enumerate(paths):
        if path in paths[:index]:
            yield Problem(f"spec.files.items[{index}].path", f"{path!r} is used twice", "Give each file its own path")


def _queue(spec: Spec) -> Iterator[Problem]:
    scheduling = spec.scheduling
    return refusals(
        (
            scheduling.gang != "none" and scheduling.queue_name,
            "spec.scheduling.gang",
            f"gang {scheduling.gang} cannot be combined with queueName {scheduling.queue_name!r}",
            "Remove gang: a queue also admits trainer, rollouts, reward models and Redis together",
            "spec.scheduling.queueName",
        ),
        (
            scheduling.queue_name and spec.lifecycle.cleanup == "KeepTransport",
            "spec.lifecycle.cleanup",
            "is KeepTransport: a queue frees the quota of a job as a whole, so Redis alone would hold all of its GPUs",
            "Set cleanup to All, or remove scheduling.queueName",
            "spec.scheduling.queueName",
        ),
    )


FieldRule = Callable[[Spec], Iterator[Problem]]
_ALWAYS: tuple[FieldRule, ...] = (
    scorer_problems,
    model_turn_problems,
    environment_problems,
    failure_policy_problems,
    _transport,
    _autoscaling,
    _files,
    _environments,
    _sandboxes,
    _verifiers,
)
_SCORING_ONLY: tuple[FieldRule, ...] = (_unused_sections,)
_TRAINING: tuple[FieldRule, ...] = (
    _sections_together,
    _algorithm,
    loss_problems,
    turn_advantage_problems,
    _sampling,
    _agent,
    _ranks,
    trainer_memory_problems,
    data_problems,
    image_problems,
    _ways_of_weights,
    group_problems,
    gpu_problems,
    _redis_memory,
    _queue,
)
