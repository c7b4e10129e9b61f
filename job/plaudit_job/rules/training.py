"""Check the fields of a job that trains, where one section depends on another: turns, images, loss, pods, memory."""

from __future__ import annotations

from collections.abc import Iterator

from plaudit_job.problem import Problem, refusals
from plaudit_job.spec.pod import GPU, PodSpec
from plaudit_job.spec.rewards import RewardModelSpec
from plaudit_job.spec.rljob import Spec

_POLICY = "spec.lifecycle.failurePolicy"
_OWN_ROUTES = ("enable_sleep_mode", "middleware")
"""Arguments of vLLM's server by which it sleeps."""
_PER_POD = "tensorParallelSize × pipelineParallelSize ÷ podsPerReplica"


def loss_problems(spec: Spec) -> Iterator[Problem]:
    """Yield settings of the loss, and of what it leaves out, that contradict each other."""
    algorithm, loss = spec.algorithm, spec.algorithm.loss
    return refusals(
        (
            loss.kind == "python" and not (loss.path and loss.function),
            "spec.algorithm.loss.path",
            "or function is missing; kind python requires both",
            "Give path: … and function: …",
        ),
        (
            loss.correction_floor > loss.correction_cap,
            "spec.algorithm.loss.correctionFloor",
            f"{loss.correction_floor:g} is above correctionCap {loss.correction_cap:g}, so no token is left",
            "Give less than correctionCap",
            "spec.algorithm.loss.correctionCap",
        ),
        (
            loss.correction == "tis" and loss.correction_floor > 0,
            "spec.algorithm.loss.correctionFloor",
            f"is {loss.correction_floor:g}, but correction tis truncates weights above the cap only and has no floor",
            "Set correction to decoupled or reject, which leave out what is below the floor, or remove it",
            "spec.algorithm.loss.correction",
        ),
        (
            0 < loss.clip_ratio_c <= 1,
            "spec.algorithm.loss.clipRatioC",
            f"{loss.clip_ratio_c:g} would bound tokens whose probability did not change",
            "Give more than 1, such as 3, or 0 for no bound",
        ),
        (
            algorithm.mask_truncated and algorithm.filter_truncated,
            "spec.algorithm.filterTruncated",
            "and maskTruncated are both set",
            "Remove one: maskTruncated keeps a cut sample's score in its group's advantages, filterTruncated does not",
            "spec.algorithm.maskTruncated",
        ),
    )


def turn_advantage_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what contradicts advantages of turns."""
    algorithm, reward, agent = spec.algorithm, spec.reward, spec.rollout.agent
    if algorithm.advantage_per == "sample":
        return
    field, is_function = "spec.algorithm.advantagePer", reward.combine.kind == "python"
    yield from refusals(
        (
            agent.kind not in ("environment", "custom"),
            field,
            f"is turn, but agent kind {agent.kind} has no rewards of turns",
            "Remove advantagePer, or choose agent kind environment or custom",
            "spec.rollout.agent.kind",
        ),
        (
            not any(reward.environment_weights.values()),
            field,
            "is turn, but no scorer makes the environment's reward a part of the sample's",
            "Add {name: …, kind: environment} with a weight to reward.scorers, or remove advantagePer",
            "spec.reward.scorers",
        ),
        (
            is_function or reward.combine.normalize == "group",
            field,
            "is turn, which subtracts rewards of turns from the sample's, but combine."
            f"{'kind is python' if is_function else 'normalize is group'}: the sample's reward is not their weighted "
            "sum",
            "Use the plain weightedSum, or remove advantagePer",
            "spec.reward.combine",
        ),
        (
            algorithm.loss.penalises_reward,
            field,
            "is turn, but klIn: reward lowers the reward of whole samples: a turn would pay for the turns before it",
            "Choose klIn: loss, or remove advantagePer",
            "spec.algorithm.loss.klIn",
        ),
        (
            algorithm.dynamic_sampling,
            field,
            "is turn, but dynamicSampling drops groups with equal scores, whose turns may differ",
            "Remove dynamicSampling or advantagePer",
            "spec.algorithm.dynamicSampling",
        ),
    )


def data_problems(spec: Spec) -> Iterator[Problem]:
    """Yield data that is named not at all, or in two ways."""
    if "data" not in spec.model_fields_set:
        return
    for name, section in spec.data.sections.items():
        forms = ("path", "mixture", "tasks", "split") if name == "train" else ("path", "tasks", "split")
        given = [form for form in forms if getattr(section, form)]
        remedy = f"Give one of {', '.join(forms[:-1])} and {forms[-1]}"
        if not given:
            yield Problem(f"spec.data.{name}.path", "is missing", f"{remedy}; path is a file, a pattern or a folder")
        elif len(given) > 1:
            also = (f"spec.data.{name}.{given[0]}",)
            yield Problem(f"spec.data.{name}.{given[1]}", f"is set beside {given[0]}", remedy, also=also)
        no_table = next((form for form in ("tasks", "split") if getattr(section, form)), "")
        if no_table and spec.data.columns is not None:
            yield Problem("spec.data.columns", f"is set, but data.{name}.{no_table} is no table", "Remove columns")
        agent = spec.rollout.agent
        if section.split and not (agent.kind == "environment" and (agent.url or agent.environment)):
            yield Problem(
                f"spec.data.{name}.split",
                "is set, but the agent has no environment server that could have tasks",
                "Set rollout.agent: {kind: environment, url: …}, or give path",
                also=("spec.rollout.agent.kind",),
            )


def image_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what cannot work with images in prompts."""
    if spec.data.images is None:
        return
    trainer, rollout = spec.trainer, spec.rollout
    for applies, field, complaint, remedy in (
        (
            rollout.agent.kind != "singleTurn",
            "spec.rollout.agent.kind",
            f"is {rollout.agent.kind}: agents continue prompts of text",
            "Set it to singleTurn",
        ),
        (
            rollout.engine.kind == "scripted",
            "spec.rollout.engine.kind",
            "is scripted, which has no processor of images",
            "Set it to vllm",
        ),
        (
            trainer.lora is not None,
            "spec.trainer.lora",
            "trains adapters, which vLLM does not apply to vision towers",
            "Remove it: all weights are trained",
        ),
        (
            trainer.compile,
            "spec.trainer.compile",
            "compiles layers; those of vision towers depend on each image's size",
            "Remove it",
        ),
        (
            trainer.sequence_parallel_size > 1,
            "spec.trainer.sequenceParallelSize",
            f"is {trainer.sequence_parallel_size}: ranks that share a row cannot share its images",
            "Set it to 1, or lower data.images.maxPixels",
        ),
    ):
        if applies:
            message = f"{complaint}, and data.images is set"
            yield Problem(field, message, f"{remedy}, or remove data.images", also=("spec.data.images",))


def trainer_memory_problems(spec: Spec) -> Iterator[Problem]:
    """Yield combinations that cannot work."""
    trainer = spec.trainer
    checkpointing = trainer.activation_checkpointing
    if trainer.activation_offload and checkpointing in ("none", "selective"):
        kept = "everything" if checkpointing == "none" else "the output of attention, which cannot be offloaded"
        yield Problem(
            "spec.trainer.activationOffload",
            f"offloads the inputs of layers, but activationCheckpointing {checkpointing} keeps {kept}",
            "Set activationCheckpointing to layers or auto, or remove activationOffload",
            also=("spec.trainer.activationCheckpointing",),
        )
    if trainer.cpu_offload and (trainer.strategy != "fsdp2" or trainer.ranks == 1):
        yield Problem(
            "spec.trainer.cpuOffload",
            f"is FSDP2's, which runs with several ranks; strategy is {trainer.strategy} and ranks is {trainer.ranks}",
            "Set strategy to fsdp2 and ranks to at least 2, or remove cpuOffload",
            also=("spec.trainer.strategy", "spec.trainer.ranks"),
        )


def model_turn_problems(spec: Spec) -> Iterator[Problem]:
    """Yield what contradicts served models that sleep."""
    for field, scorer in spec.reward.by_field.items():
        model = scorer.served
        if model is None or not model.sleep_during_updates:
            continue
        section = f"{field}.{scorer.served_field}"
        if not spec.trains:
            yield Problem(
                f"{section}.sleepDuringUpdates",
                "needs a trainer, whose updates the model sleeps through, and this job has none",
                "Remove sleepDuringUpdates",
            )
        own_server = isinstance(model, RewardModelSpec) and model.engine == "plaudit"
        if not own_server and (taken := [name for name in _OWN_ROUTES if name in model.arguments]):
            yield Problem(
                f"{section}.arguments.{taken[0]}",
                "is set by sleepDuringUpdates",
                f"Remove {taken[0]}, or sleepDuringUpdates",
                also=(f"{section}.sleepDuringUpdates",),
            )


def group_problems(spec: Spec) -> Iterator[Problem]:
    """Yield contradictions between rollout groups, and GPUs that the pods of a replica cannot share evenly."""
    rollout, names = spec.rollout, [group.name for group in spec.rollout.groups]
    for section, each in rollout.by_section.items():
        if each.engine.gpus % each.pods_per_replica:
            yield Problem(
                f"{section}.podsPerReplica",
                f"{each.pods_per_replica} pods cannot share {each.engine.gpus} GPUs (tensorParallelSize × "
                "pipelineParallelSize) evenly",
                "Give a number of pods that divides the GPUs",
                also=("spec.rollout.engine.tensorParallelSize",),
            )
    if not names:
        return
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"spec.rollout.groups[{index}].name", f"{name!r} is used twice", "Give each its own name")
    if rollout.replicas != 1:
        yield Problem(
            "spec.rollout.replicas", "counts workers without groups, but groups are given", "Give each group replicas"
        )
    if not rollout.pods:
        yield Problem(
            "spec.rollout.groups", "have no replicas at all", "Give one of them at least 1, or set spec.suspend"
        )


def gpu_problems(spec: Spec) -> Iterator[Problem]:
    """Yield numbers of GPUs that contradict the engine or the ranks."""
    trainer = spec.trainer
    ranks = min(trainer.ranks, trainer.ranks_per_pod)
    yield from _gpu_mismatch("spec.trainer", trainer.pod, ranks, "ranks of a pod", "spec.trainer.ranksPerPod")
    for section, rollout in spec.rollout.by_section.items():
        source = "tensorParallelSize" if rollout.gpus_per_pod == rollout.engine.tensor_parallel_size else _PER_POD
        yield from _gpu_mismatch(
            section, rollout.pod, rollout.gpus_per_pod, source, "spec.rollout.engine.tensorParallelSize"
        )


def _gpu_mismatch(section: str, pod: PodSpec, derived: int, source: str, source_field: str) -> Iterator[Problem]:
    for kind, amounts in (("limits", pod.resources.limits), ("requests", pod.resources.requests)):
        for name in dict.fromkeys((pod.gpu_resource or GPU, GPU)):
            stated = amounts.get(name)
            if stated is not None and str(stated) not in {"0", str(derived)}:
                yield Problem(
                    f"{section}.pod.resources.{kind}",
                    f"{name}: {stated} contradicts {source} {derived}",
                    f"Give {derived} (0 for a CPU), or remove it: the number of GPUs follows from the engine",
                    also=(source_field,),
                )


def pods_of(spec: Spec) -> Iterator[tuple[str, PodSpec]]:
    """Yield every ``pod`` section, with the path under ``spec`` of the section that it belongs to."""
    yield "rollout", spec.rollout.pod
    for index, group in enumerate(spec.rollout.groups):
        yield f"rollout.groups[{index}]", group.pod
    yield "reward.workers", spec.reward.workers.pod
    yield "trainer", spec.trainer.pod
    yield "transport.managed", spec.transport.managed.pod
    yield "metrics", spec.metrics.pod
    for index, server in enumerate(spec.environments):
        yield f"environments[{index}]", server.pod
    for index, scorer in enumerate(spec.reward.scorers):
        if scorer.served:
            yield f"reward.scorers[{index}].{scorer.served_field}", scorer.served.pod


def environment_problems(spec: Spec) -> Iterator[Problem]:
    """Yield variables with no single source of their value."""
    for section, pod in pods_of(spec):
        for index, variable in enumerate(pod.env):
            field, source = f"spec.{section}.pod.env[{index}]", variable.value_from
            if source is None:
                continue
            if variable.value:
                complaint = f"{variable.value!r} is given beside valueFrom"
                yield Problem(f"{field}.value", complaint, "Give one of value and valueFrom")
            given = sorted(type(source).model_fields[name].alias or name for name in source.model_fields_set)
            if len(given) != 1:
                yield Problem(
                    f"{field}.valueFrom",
                    f"has {' and '.join(given) or 'no source'}",
                    "Give exactly one of secretKeyRef, configMapKeyRef, fieldRef and resourceFieldRef",
                )


def failure_policy_problems(spec: Spec) -> Iterator[Problem]:
    """Yield rules that apply to nothing or to two things at once, and pauses that contradict each other."""
    policy = spec.lifecycle.failure_policy
    for number, rule in enumerate(policy.rules):
        if (rule.on_exit_codes is not None) == bool(rule.on_reasons):
            yield Problem(
                f"{_POLICY}.rules[{number}]",
                "has both onExitCodes and onReasons" if rule.on_reasons else "has neither onExitCodes nor onReasons",
                "Give exactly one of onExitCodes and onReasons",
            )
    pauses = policy.backoff
    if pauses.initial_seconds > pauses.max_seconds:
        yield Problem(
            f"{_POLICY}.backoff.initialSeconds",
            f"{pauses.initial_seconds:g} is more than maxSeconds {pauses.max_seconds:g}",
            "Lower initialSeconds, or raise maxSeconds",
            also=(f"{_POLICY}.backoff.maxSeconds",),
        )
