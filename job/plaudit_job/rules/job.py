"""Check the fields of a job against each other.

Each rule is a function that yields problems; ``rule_problems`` runs them all. The range of a single field is declared
with the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from plaudit_job.problem import Problem
from plaudit_job.rules.scorers import password_problems, scorer_problems
from plaudit_job.rules.training import (
    environment_problems,
    failure_policy_problems,
    gpu_problems,
    group_problems,
    image_problems,
    loss_problems,
    model_turn_problems,
    rollout_turn_problems,
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


def _no_orphans(spec: Spec) -> Iterator[Problem]:
    for name in ("model", "data", "algorithm"):
        if name in spec.model_fields_set:
            yield Problem(
                f"spec.{name}",
                "is unused in a job without rollout and trainer",
                "Add rollout: {} and trainer: {} to train, or remove this section for a job that only scores",
            )


def _mini_batches(spec: Spec) -> Iterator[Problem]:
    prompts, parts = spec.algorithm.prompts_per_step, spec.algorithm.mini_batches_per_step
    if prompts % parts:
        yield Problem(
            "spec.algorithm.promptsPerStep",
            f"{prompts} is not a multiple of miniBatchesPerStep {parts}",
            f"Give a multiple of {parts}, such as {max(parts, prompts - prompts % parts)}",
            also=("spec.algorithm.miniBatchesPerStep",),
        )


def _reward_penalty(spec: Spec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if algorithm.loss.kl_in == "loss":
        if algorithm.loss.adaptive_kl is not None:
            yield Problem(
                "spec.algorithm.loss.adaptiveKl",
                "changes the coefficient of a divergence in the reward, but klIn is loss",
                "Set klIn: reward, or remove adaptiveKl",
                also=("spec.algorithm.loss.klIn",),
            )
        return
    if algorithm.loss.kl_coefficient == 0:
        yield Problem(
            "spec.algorithm.loss.klIn",
            "is reward, but klCoefficient is 0",
            "Set klCoefficient, or remove klIn",
            also=("spec.algorithm.loss.klCoefficient",),
        )
    if algorithm.advantage == "reinforcePlusPlus":
        yield Problem(
            "spec.algorithm.loss.klIn",
            "is reward, but under advantage reinforcePlusPlus each token would have an advantage of its own",
            "Choose klIn: loss, or an advantage relative to the group, such as reinforcePlusPlusBaseline",
            also=("spec.algorithm.advantage",),
        )


def _dynamic_sampling(spec: Spec) -> Iterator[Problem]:
    algorithm = spec.algorithm
    if algorithm.dynamic_sampling and algorithm.advantage == "reinforcePlusPlus":
        yield Problem(
            "spec.algorithm.dynamicSampling",
            "drops groups with equal scores, but under advantage reinforcePlusPlus they have a signal",
            "Remove dynamicSampling, or choose a group-relative advantage",
            also=("spec.algorithm.advantage",),
        )
    if algorithm.dynamic_sampling and not algorithm.max_replaced:
        yield Problem(
            "spec.algorithm.dynamicSampling.maxFactor",
            f"{algorithm.dynamic_sampling.max_factor} allows no further prompt beside {algorithm.prompts_per_step}",
            f"Give at least {1 + 1 / algorithm.prompts_per_step:.3g}",
            also=("spec.algorithm.promptsPerStep",),
        )


def _order(spec: Spec) -> Iterator[Problem]:
    if spec.algorithm.order == "ready" and spec.algorithm.max_staleness == 0:
        yield Problem(
            "spec.algorithm.order",
            "order ready trains groups across steps, but maxStaleness is 0",
            "Set maxStaleness to 1 or more, or order to step",
            also=("spec.algorithm.maxStaleness",),
        )


def _group_size(spec: Spec) -> Iterator[Problem]:
    samples, advantage = spec.algorithm.samples_per_prompt, spec.algorithm.advantage
    if samples < 2 and advantage != "reinforcePlusPlus":
        yield Problem(
            "spec.algorithm.samplesPerPrompt",
            f"with {samples}, a group has nothing to compare and advantage {advantage} is always 0",
            "Give at least 2, or set advantage to reinforcePlusPlus",
            also=("spec.algorithm.advantage",),
        )
    least = spec.reward.min_samples_per_group
    if least > samples:
        yield Problem(
            "spec.reward.minSamplesPerGroup",
            f"{least} is more than samplesPerPrompt {samples}, so every group would be dropped",
            f"Give at most {samples}",
            also=("spec.algorithm.samplesPerPrompt",),
        )


def _lengths(spec: Spec) -> Iterator[Problem]:
    prompt, room = spec.data.train.max_prompt_length, spec.rollout.engine.max_model_length
    response = spec.rollout.sampling.max_tokens
    field = "spec.rollout.engine.maxModelLength"
    parts = ("spec.data.train.maxPromptLength", "spec.rollout.sampling.maxTokens")
    if prompt + response > room:
        yield Problem(
            field,
            f"{room} is less than maxPromptLength {prompt} + maxTokens {response} = {prompt + response}",
            f"Give at least {prompt + response}, or lower maxPromptLength or maxTokens",
            also=parts,
        )
    own = spec.data.validation.sampling.max_tokens if spec.data.validation else None
    if own is not None and prompt + own > room:
        yield Problem(
            field,
            f"{room} is less than maxPromptLength {prompt} + validation's maxTokens {own} = {prompt + own}",
            f"Give at least {prompt + own}, or lower maxPromptLength or maxTokens",
            also=(*parts, "spec.data.validation.sampling.maxTokens"),
        )


def _temperature(spec: Spec) -> Iterator[Problem]:
    if spec.rollout.sampling.temperature == 0:
        yield Problem(
            "spec.rollout.sampling.temperature",
            "with 0, all samples of a group are the same and nothing is learned",
            "Give a value above 0, such as 1.0",
        )


def _agent(spec: Spec) -> Iterator[Problem]:
    agent = spec.rollout.agent
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
        )
    known = [server.name for server in spec.environments]
    if agent.environment and agent.environment not in known:
        yield Problem(
            "spec.rollout.agent.environment",
            f"names {agent.environment!r}; spec.environments has {', '.join(known) or 'none'}",
            "Name one of spec.environments",
        )
    for index, tool in enumerate(agent.tools):
        yield from _tool(f"spec.rollout.agent.tools[{index}]", tool)


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
    elif sum((bool(tool.path), bool(tool.config), tool.mcp is not None)) != 1:
        yield Problem(
            field,
            "needs exactly one of path with function, config and mcp",
            "Give {path: …, function: …}, {config: …} or {mcp: {url: …}}",
        )
    if tool.mcp is not None and bool(tool.mcp.url) == bool(tool.mcp.command):
        yield Problem(f"{field}.mcp", "needs exactly one of url and command", "Give url: … or command: […]")
    if tool.mcp is not None and tool.mcp.headers and not tool.mcp.url:
        yield Problem(f"{field}.mcp.headers", "are for url", "Pass what a command needs in its arguments")


def _environments(spec: Spec) -> Iterator[Problem]:
    names: set[str] = set()
    for index, server in enumerate(spec.environments):
        field = f"spec.environments[{index}]"
        if not server.image and not server.pod.image and not server.command:
            yield Problem(f"{field}.image", "and command are missing", "Give image: …, command: […] or both")
        if server.name in names:
            yield Problem(f"{field}.name", f"{server.name!r} is used twice", "Give each environment its own name")
        names.add(server.name)


def _ranks(spec: Spec) -> Iterator[Problem]:
    trainer = spec.trainer
    if trainer.strategy == "single" and trainer.ranks > 1:
        yield Problem(
            "spec.trainer.strategy",
            f"strategy single runs one process, but ranks is {trainer.ranks}",
            "Set strategy to fsdp2, or ranks to 1",
            also=("spec.trainer.ranks",),
        )
    if trainer.ranks > trainer.ranks_per_pod and trainer.ranks % trainer.ranks_per_pod:
        yield Problem(
            "spec.trainer.ranks",
            f"{trainer.ranks} is not a multiple of ranksPerPod {trainer.ranks_per_pod}",
            "Give a multiple, so that every pod has the same number",
            also=("spec.trainer.ranksPerPod",),
        )
    for name, size in (("fsdpSize", trainer.fsdp_size or 1), ("sequenceParallelSize", trainer.sequence_parallel_size)):
        if trainer.ranks % size:
            yield Problem(
                f"spec.trainer.{name}",
                f"is {size}, which does not divide the number of ranks {trainer.ranks}",
                f"Set ranks to a multiple of {size} with strategy fsdp2, or remove {name}",
                also=("spec.trainer.ranks",),
            )


def _lora(spec: Spec) -> Iterator[Problem]:
    if spec.trainer.lora is None:
        return
    if spec.rollout.in_flight == "recompute":
        yield Problem(
            "spec.rollout.inFlight",
            "is recompute, but with trainer.lora samples finish under the adapter that began them",
            "Set inFlight to continue, or to drain if samples of two versions must not run at once",
            also=("spec.trainer.lora",),
        )


def _direct_transfer(spec: Spec) -> Iterator[Problem]:
    if spec.trainer.weights.transfer == "files":
        return
    if spec.trainer.lora is not None:
        yield Problem(
            "spec.trainer.weights.transfer",
            "is direct, but with trainer.lora only adapters of a few megabytes are published, as files",
            "Set transfer to files",
            also=("spec.trainer.lora",),
        )
    if any(group.pods_per_replica > 1 for group in spec.rollout.by_group.values()):
        yield Problem(
            "spec.trainer.weights.transfer",
            "is direct, but a rollout replica of several pods reads its weights from files",
            "Set transfer to files, or podsPerReplica to 1",
            also=("spec.rollout.podsPerReplica",),
        )


def _deltas(spec: Spec) -> Iterator[Problem]:
    full_every = spec.trainer.weights.full_every
    if full_every == 1:
        return
    if spec.trainer.weights.transfer == "direct":
        yield Problem(
            "spec.trainer.weights.fullEvery",
            f"is {full_every}, but with transfer: direct rollouts receive every version whole, and no files",
            "Set transfer to files, or leave out fullEvery",
            also=("spec.trainer.weights.transfer",),
        )
    if spec.trainer.lora is not None:
        yield Problem(
            "spec.trainer.weights.fullEvery",
            f"is {full_every}, but with trainer.lora only adapters of a few megabytes are published, always whole",
            "Leave out fullEvery",
            also=("spec.trainer.lora",),
        )
    if any(group.pods_per_replica > 1 for group in spec.rollout.by_group.values()):
        yield Problem(
            "spec.trainer.weights.fullEvery",
            f"is {full_every}, but the pods of a rollout replica read whole weights from the run's folder",
            "Leave out fullEvery, or set podsPerReplica to 1",
            also=("spec.rollout.podsPerReplica",),
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


FieldRule = Callable[[Spec], Iterator[Problem]]


def _gang_or_queue(spec: Spec) -> Iterator[Problem]:
    scheduling = spec.scheduling
    if scheduling.gang != "none" and scheduling.queue_name:
        yield Problem(
            "spec.scheduling.gang",
            f"gang {scheduling.gang} cannot be combined with queueName {scheduling.queue_name!r}",
            "Remove gang: a queue also admits trainer, rollouts, reward models and Redis together",
            also=("spec.scheduling.queueName",),
        )


def _quota_after_the_end(spec: Spec) -> Iterator[Problem]:
    if spec.scheduling.queue_name and spec.lifecycle.cleanup == "KeepTransport":
        yield Problem(
            "spec.lifecycle.cleanup",
            "is KeepTransport: a queue frees the quota of a job as a whole, so Redis alone would hold all of its GPUs",
            "Set cleanup to All, or remove scheduling.queueName",
            also=("spec.scheduling.queueName",),
        )


def _gang_without_training(spec: Spec) -> Iterator[Problem]:
    if spec.scheduling.whole:
        yield Problem(
            "spec.scheduling",
            "gang and queueName start trainer and rollouts together, but this job has neither",
            "Remove them: reward workers start one by one",
        )


_ALWAYS: tuple[FieldRule, ...] = (
    scorer_problems,
    model_turn_problems,
    environment_problems,
    failure_policy_problems,
    _transport,
    _autoscaling,
    _files,
    _environments,
)
_SCORING_ONLY: tuple[FieldRule, ...] = (_no_orphans, _gang_without_training)
_TRAINING: tuple[FieldRule, ...] = (
    _sections_together,
    _mini_batches,
    loss_problems,
    _order,
    _dynamic_sampling,
    _reward_penalty,
    turn_advantage_problems,
    _group_size,
    _lengths,
    _temperature,
    _agent,
    _ranks,
    trainer_memory_problems,
    image_problems,
    _lora,
    rollout_turn_problems,
    _direct_transfer,
    _deltas,
    group_problems,
    gpu_problems,
    _redis_memory,
    _gang_or_queue,
    _quota_after_the_end,
)
