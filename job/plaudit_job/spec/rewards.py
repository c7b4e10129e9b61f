"""``spec.reward``: the rewards of finished samples.

One model describes scorers of every kind; what belongs to a kind has a section of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from plaudit_job.spec.pod import PodSpec
from plaudit_job.spec.section import (
    MUTABLE,
    PYTHON_NAME,
    SCORER_NAME,
    FilePath,
    KeyOf,
    Opaque,
    SecretKey,
    Section,
    SourcePath,
)


@dataclass(frozen=True)
class KindTraits:
    """Describe one kind of scorer. The rules of the job, the CEL rules of the CRD and the reference follow from it."""

    meaning: str
    """The source of its scores, for the reference."""
    fields: tuple[str, ...] = ()
    """Fields, as written in YAML, that only this kind (or another that lists them) reads."""
    example: str = ""
    """A value for the first of ``fields``, where that field is required."""
    scores_groups: bool = False
    """The kind supports scope ``group``."""

    @property
    def section(self) -> str:
        """Return the section that this kind requires; empty for none."""
        return self.fields[0] if self.example else ""


KINDS: dict[str, KindTraits] = {
    "rule": KindTraits("built in, chosen by data source", ("rule", "ruleArguments")),
    "python": KindTraits(
        "your function",
        ("python", "isolation", "cache"),
        "{path: rewards.py, function: compute_score}",
        scores_groups=True,
    ),
    "judge": KindTraits(
        "an OpenAI-compatible endpoint",
        ("judge", "limits", "cache"),
        "{baseUrl: …, model: …, promptTemplate: {path: …}, parse: {regex: …}} (or serve: {source: …} for baseUrl "
        "and model)",
        scores_groups=True,
    ),
    "http": KindTraits(
        "an endpoint that answers with a score", ("http", "limits", "cache"), "{url: …, shape: plaudit}"
    ),
    "service": KindTraits("a reward service that jobs share", ("service", "cache"), "{name: …}"),
    "model": KindTraits("a reward model served for the job", ("model", "cache"), "{source: …}"),
    "environment": KindTraits("the reward that the sample's tools or environment gave"),
    "verifier": KindTraits("the tests of the sample's task, run in the machine that its agent left behind"),
}
"""Every kind of scorer. ``plaudit_workers.service.build`` makes scorers of them."""
ScorerKind = Annotated[str, KeyOf(KINDS)]


def kinds_with(field: str) -> list[str]:
    """Return the kinds that read a field of ``KindTraits.fields``."""
    return [kind for kind, traits in KINDS.items() if field in traits.fields]


class ServedModelSpec(Section):
    """A model that the job serves: its weights, and how many servers of which size."""

    source: SourcePath = Field(min_length=1)
    """Hub id or folder of the model and its tokenizer."""
    revision: str = "main"
    """Branch, tag or commit on the hub. Default ``main``. Ignored for a folder."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Precision of its forward passes. Default bfloat16; use float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python that comes with the model. Default false."""
    max_model_length: int | None = Field(default=None, ge=1, le=10_000_000)
    """Tokens of a whole request, answer included; a longer one is a data error; it is never cut. Default: the model's
    own."""
    arguments: Opaque = Field(default={})
    """Further arguments of the server under their own names, such as vLLM's ``tensor_parallel_size``. The server
    rejects unknown ones when it starts."""
    replicas: int = Field(default=1, ge=1, le=1000)
    """Number of servers, one GPU each; reward workers distribute their calls over them. Default 1."""
    sleep_during_updates: bool = False
    """Free the servers' GPUs while the trainer updates, where it shares them: the weights move to host memory. Calls
    wait meanwhile. Default false: servers keep their GPUs."""
    pod: PodSpec = PodSpec()
    """Pods of the servers. A server gets one GPU if there are any, unless the limits differ."""


class ServedChatModelSpec(ServedModelSpec):
    """A generative model, served by vLLM's chat server for the job."""


class PythonFunctionSpec(Section):
    """A function or class in a file; its signature (verl's, TRL's or Plaudit's) decides how it is called."""

    path: FilePath = Field(min_length=1)
    """Python file: relative to the job file; on Kubernetes a file of ``spec.files``, or an absolute path on the volume
    or in the image."""
    function: str = Field(default="compute_score", min_length=1, pattern=PYTHON_NAME)
    """Function or class in it. Default ``compute_score``: verl's name."""
    arguments: Opaque = Field(default={})
    """Keyword arguments of every call (for a class: of its constructor)."""


class PythonScorerSpec(PythonFunctionSpec):
    """A function or class that scores, perhaps by a model that the job serves for it."""

    serve: ServedChatModelSpec | None = None
    """A model served for the function, as verl serves its reward model: the function gets
    ``reward_router_address`` (``host:port``) and ``reward_model_tokenizer``. Default: none."""


class PromptTemplateSpec(Section):
    """The judge's prompt."""

    path: FilePath = Field(min_length=1)
    """A Jinja file; it sees ``prompt``, ``messages``, ``response`` (``scope: group``: ``responses``), ``ground_truth``,
    ``data_source``, ``extra_info`` and ``fence``, a random word."""


class RangeSpec(Section):
    """The numbers that a rubric allows."""

    min: float
    """The smallest."""
    max: float
    """The largest."""


class ParseSpec(Section):
    """How to parse the judge's answer: give exactly one of ``jsonPath``, ``regex`` and ``python``.

    Its reasoning (``<think>…</think>``) does not count.
    """

    json_path: str = ""
    """Path of the number in the answer's last JSON value that has it, such as ``$.score`` (``scope: group``: a list of
    numbers)."""
    structured: bool = False
    """Ask the endpoint for JSON of the form of ``jsonPath`` and ``range`` (``response_format: json_schema``). An
    endpoint that refuses it is asked without. Default false."""
    regex: str = ""
    """A regular expression; the first group of its last match is the number (``scope: group``: of every match)."""
    python: PythonFunctionSpec | None = None
    """A function ``(answer)`` or ``(answer, sample)`` that returns the number; ``scope: group``: ``(answer, samples)``,
    a list."""
    range: RangeSpec | None = None
    """The rubric's numbers; any other is a data error of its sample. Default: all."""


class JudgeSpec(Section):
    """An OpenAI-compatible endpoint that scores samples: give exactly one of ``baseUrl`` and ``serve``."""

    base_url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL, including ``/v1``."""
    model: str = ""
    """Name of the model at the endpoint. Required with ``baseUrl``."""
    serve: ServedChatModelSpec | None = None
    """A model that the job serves as the judge. Default: none."""
    api_key_secret: SecretKey | None = None
    """The API key, with ``baseUrl``. Default: none."""
    prompt_template: PromptTemplateSpec
    """The prompt."""
    parse: ParseSpec
    """The parser of the answer."""
    arguments: Opaque = Field(default={})
    """Further members of the request, such as ``temperature`` or ``max_tokens``."""


class HttpSpec(Section):
    """An endpoint of somebody else that scores one sample a request."""

    url: str = Field(min_length=1, pattern=r"^https?://")
    """URL, with the route."""
    shape: Literal["plaudit", "slime", "openrlhf", "nemo-gym", "sandbox-fusion"]
    """Its protocol. ``plaudit``: the gateway of a reward service (``/v1/score``); ``slime``: slime's ``remote_rm``;
    ``openrlhf``: OpenRLHF's ``remote_url``; ``nemo-gym``: ``/verify`` of a NeMo Gym resources server;
    ``sandbox-fusion``: ``/submit`` of Sandbox Fusion."""
    api_key_secret: SecretKey | None = None
    """The key, sent as a bearer token. Default: none."""
    arguments: Opaque = Field(default={})
    """Further members of the request; an object is merged into the shape's own."""
    json_path: str = ""
    """Path of the score in the answer, such as ``$.result.score``. Default: the shape's own."""


class ServiceSpec(Section):
    """A reward service that several jobs share: give exactly one of ``name`` and ``url``."""

    name: str = Field(default="", max_length=40)
    """Name of a RewardService in the job's namespace. On Kubernetes only."""
    url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a service elsewhere, without a route."""
    token_secret: SecretKey | None = None
    """The caller's token. Required with ``url``; default with ``name``: that of the service's caller ``client``."""


class SharedLimitsSpec(Section):
    """One budget for several jobs, kept in a Redis that all of them can reach."""

    url: str = Field(min_length=1, pattern=r"^rediss?://")
    """URL of that Redis, without a password."""
    password_secret: SecretKey | None = None
    """Its password. Default: none."""
    key: str = Field(min_length=1)
    """Name of the budget: jobs with the same key share it."""


class LimitsSpec(Section):
    """Limits on the requests of all workers of the job together."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests in any 60 s. Default: no limit."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers in any 60 s. Default: no limit."""
    concurrency: int | None = Field(default=None, ge=1)
    """Concurrent requests. Default: no limit."""
    shared: SharedLimitsSpec | None = None
    """Share the budget with other jobs. Default: the job's own."""


class CacheSpec(Section):
    """Kept scores: an equal sample (prompt, response, ground truth, extra info) is not scored a second time."""

    lifetime_seconds: int = Field(default=86_400, ge=60, le=31_536_000)
    """Seconds after which a kept score is gone; half of it at the earliest. Default 86,400."""
    entries: int = Field(default=100_000, ge=2, le=100_000_000)
    """Scores that are kept at most, about 150 bytes of Redis each. Default 100,000."""


class RewardModelSpec(ServedModelSpec):
    """A model with one output (``num_labels: 1``), served for the job."""

    engine: Literal["vllm", "plaudit"] = "vllm"
    """``vllm``: its pooling server; ``plaudit``: Plaudit's own server, for models that vLLM cannot load. Default vllm.
    """
    input: Literal["chat", "text"] = "chat"
    """Its input. ``chat``: the prompt's messages and the response as the assistant's message, in the chat template of
    the *reward model*; a prompt without messages becomes a user message. ``text``: prompt and response as the policy
    saw them. Default chat."""
    max_batch_tokens: int = Field(default=16_384, ge=1, le=10_000_000)
    """Tokens of one forward pass; bounds the memory of activations. Default 16,384."""


class WhenSpec(Section):
    """Score only samples to which an earlier scorer gave a certain value (to save calls)."""

    scorer: str = Field(min_length=1)
    """Name of an earlier scorer in the list, with scope ``sample``."""
    equals: float
    """The value that selects a sample; all others are ``skipped``."""


class AuditSpec(Section):
    """An audit: a second opinion on some groups, which no policy is trained on."""

    share: float = Field(default=0.05, gt=0, le=1)
    """Share of the groups that it scores, drawn by their ids: a repeated run draws the same. Default 0.05."""
    every_steps: int = Field(default=1, ge=1, le=1_000_000)
    """Only groups of every so many steps; in a job that trains. Default 1."""


class DriftSpec(Section):
    """A watch on a scorer itself: the same samples are scored again and again."""

    samples: int = Field(default=32, ge=2, le=4096)
    """Samples of the first step that are scored again. Default 32."""
    every_steps: int = Field(default=50, ge=1, le=1_000_000)
    """They are scored after every so many steps. Default 50."""


class ScorerSpec(Section):
    """One source of scores."""

    name: str = Field(min_length=1, max_length=20, pattern=SCORER_NAME)
    """Name in metrics, in stored samples and in ``when``, such as ``accuracy_reward``: at most 20 of a-z, 0-9, ``-``
    and ``_``, unique in the job. A scorer whose model the job serves allows no ``_``: its pods have the name."""
    kind: ScorerKind
    weight: float = 1.0
    """Its share in the weighted sum; 0 computes and records it without effect on the reward. Default 1."""
    scope: Literal["sample", "group"] = "sample"
    """``sample``: one sample at a time, as soon as it is finished; ``group``: all samples of a prompt together, when
    they are terminal. Default sample."""
    rule: str | None = Field(default=None, min_length=1)
    """Name of a built-in rule (``gsm8k``), for ``rule``. Default: by each row's ``data_source``."""
    rule_arguments: Opaque = Field(default={})
    """The rule's arguments, for ``rule``. Without ``rule``: by rule name, ``{math_dapo: {strictBoxed: true}}``."""
    python: PythonScorerSpec | None = None
    """The function, for ``python``."""
    judge: JudgeSpec | None = None
    """The endpoint, for ``judge``."""
    http: HttpSpec | None = None
    """The endpoint, for ``http``."""
    service: ServiceSpec | None = None
    """The service, for ``service``."""
    model: RewardModelSpec | None = None
    """The reward model, for ``model``."""
    isolation: Literal["process", "thread", "inline"] | None = None
    """Where a ``python`` scorer runs: ``process`` is killed at its time limit, ``thread`` suits functions that block on
    the network, ``inline`` is the event loop of one child process. Default: process for plain functions, inline for
    async ones."""
    audit: AuditSpec | None = None
    """Make it an auditor: it scores a share of the training groups once their step has closed (in a service, of the
    groups that callers got back), in reward workers with room to spare, and is no part of the reward. Nothing waits for
    it. Default: it scores every sample."""
    drift: DriftSpec | None = None
    """Score some samples of the first step again from time to time, as an auditor does, and compare with their first
    values: a judge or an endpoint may change behind its name. Default: never."""
    when: WhenSpec | None = None
    """Score only some samples. Default: all."""
    limits: Annotated[LimitsSpec | None, MUTABLE] = None
    """Limits on the requests of a ``judge`` or ``http`` scorer. Default: no limit."""
    cache: CacheSpec | None = None
    """Keep the scores of a ``judge``, ``http``, ``service``, ``model`` or ``python`` scorer that gives equal samples
    equal scores (``cache: {}``). Default: every sample is scored."""
    retries: int | None = Field(default=None, ge=0, le=100)
    """Further attempts after an infrastructure failure. Default: ``reward.retries``."""
    timeout_seconds: float | None = Field(default=None, gt=0, le=86_400)
    """Seconds of one attempt. Default: what is left of ``reward.timeoutSeconds``."""
    on_failure: Literal["mask", "zero", "dropGroup", "ignore"] | None = None
    """How a failure of this scorer counts: it raised, did not answer, or answered no number. ``ignore`` leaves it out
    of the sum. Default: ``reward.onFailure``."""
    on_none: Literal["mask", "ignore"] = "mask"
    """How None of this scorer counts: the sample is not one that it scores. ``mask``: the sample has no reward;
    ``ignore``: the scorer is left out of the sum, as in TRL. Default mask."""

    @property
    def url(self) -> str:
        """Return the address of an endpoint elsewhere that scores; empty for none."""
        if self.judge is not None:
            return self.judge.base_url
        section = self.http or self.service
        return section.url if section is not None else ""

    @property
    def served(self) -> ServedModelSpec | None:
        """Return the model that the job serves for this scorer."""
        if self.model is not None:
            return self.model
        section = self.judge or self.python
        return section.serve if section is not None else None

    @property
    def served_field(self) -> str:
        """Return the path of ``served`` within the scorer, as written in YAML."""
        return "model" if self.model is not None else "judge.serve" if self.judge is not None else "python.serve"


class CombineSpec(Section):
    """The combination of a sample's scores into one reward."""

    kind: Literal["weightedSum", "python"] = "weightedSum"
    """``weightedSum``: the sum of weight times value over the scorers that have a value. ``python``: your function,
    from the scores by name to a number. Default weightedSum."""
    normalize: Literal["none", "group"] = "none"
    """``group``: each scorer's values are normalised within their group before they are weighted and summed (GDPO), so
    that a scorer counts by its weight, not by the spread of its values. Requires ``advantage`` reinforcePlusPlus (as in
    GDPO, which normalises over the batch) or drGrpo: neither divides by the group's spread again. Default none."""
    path: FilePath = ""
    """Python file, for ``python``: relative to the job file; on Kubernetes a file of ``spec.files``, or an absolute
    path on the volume or in the image."""
    function: str = ""
    """The function in it, for ``python``: ``(values) -> float``, or ``(values, sample)``; ``values`` are the scorers'
    values by name."""


class AutoscalingSpec(Section):
    """Autoscaling of the reward workers by the queue. ``plaudit run`` ignores it and starts ``workers.replicas``."""

    provider: Literal["keda", "hpa"] = "keda"
    """``keda``: by samples waiting and in work; ``hpa``: by CPU. Default keda: most scorers wait rather than compute.
    """
    min_replicas: int = Field(default=1, ge=0, le=10_000)
    """The fewest. Default 1: with 0, the first samples of a step wait for a pod."""
    max_replicas: int = Field(default=32, ge=1, le=10_000)
    """The most. Default 32."""
    samples_per_replica: int = Field(default=128, ge=1, le=1_000_000)
    """Target of samples, waiting or in work, for each worker. Default 128: half of ``maxConcurrentSamples``."""
    scale_down_after_seconds: int = Field(default=300, ge=0, le=3600)
    """Seconds that fewer workers must have sufficed before some are removed. Default 300: Kubernetes' default, long
    enough for the pause between two steps."""


class WorkersSpec(Section):
    """The processes that run the scorers."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=1, le=10_000)
    """Number of reward workers. Default 1: one worker handles hundreds of slow calls."""
    max_concurrent_samples: int = Field(default=256, ge=1, le=100_000)
    """Samples that one worker scores at a time. Default 256: waiting for a judge needs no thread."""
    processes: int = Field(default=2, ge=1, le=1024)
    """Child processes of one worker, for scorers with ``isolation: process`` or ``thread``. Default 2."""
    autoscaling: Annotated[AutoscalingSpec | None, MUTABLE] = None
    """Scale with the queue. Default: a fixed number."""
    pod: PodSpec = PodSpec()
    """Pods of the reward workers."""


class CanarySpec(Section):
    """Another reward service, such as one with the next version of the scorers, that is compared with this one."""

    service: ServiceSpec
    """The service. It gets copies of samples; its results are compared and counted, never answered."""
    share: float = Field(default=0.1, gt=0, le=1)
    """Share of the samples that are copied; groups are not. Default 0.1."""


class GatewaySpec(Section):
    """The HTTP front of a job that only scores; a job with a trainer has none."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=0, le=100)
    """Number of gateways; any of them answers for any sample. 0: clients reach Redis only. ``plaudit run`` starts at
    most one. Default 1."""
    token_secret: str = Field(default="", max_length=253)
    """Name of a Secret with a token for each caller, its keys the callers' names; jobs that refer to the service by
    name use the key ``client``. Kubernetes only. Default empty: the operator makes one with the caller ``client``."""
    samples_per_minute: int | None = Field(default=None, ge=1)
    """Samples that each token may submit in a minute, over all gateways; beyond it requests get 429. Default: no limit.
    """
    canary: CanarySpec | None = None
    """Compare this service with another one. Default: none."""
    port: int = Field(default=0, ge=0, le=65_535)
    """TCP port under ``plaudit run``; on Kubernetes it is 8710. Default 0: a free one, kept by ``--resume``."""
    pod: PodSpec = PodSpec()
    """Pods of the gateways."""


class EgressRule(Section):
    """One destination that reward workers may reach: a range of addresses, or pods by their labels."""

    cidr: str = ""
    """Addresses, such as ``10.0.0.0/8``. Default empty: by selectors."""
    namespace_selector: Opaque = Field(default={})
    """Labels of the namespace, in Kubernetes' own form."""
    pod_selector: Opaque = Field(default={})
    """Labels of the pods, in Kubernetes' own form."""
    ports: list[int] = Field(default=[])
    """TCP ports. Default empty: all."""


class NetworkPolicySpec(Section):
    """Destinations of reward workers besides Redis, DNS, metrics and the job's own reward models."""

    egress: list[EgressRule] = Field(default=[])
    """Judges and sandboxes. Default empty: none."""


class RewardSpec(Section):
    """Scorers, how they are combined, and what a failure means."""

    scorers: list[ScorerSpec] = Field(min_length=1, max_length=32)
    """The scorers of each sample. They run concurrently, unless ``when`` makes one wait for another."""
    combine: CombineSpec = CombineSpec()
    """The combination of scores into a reward."""
    on_failure: Literal["mask", "zero", "dropGroup"] = "mask"
    """How a sample without a score is treated: ``mask`` leaves it out of its group's mean, deviation and loss, ``zero``
    counts the scorer that failed as value 0, ``dropGroup`` drops its group. Default mask: a broken judge must never
    look like a bad answer."""
    max_failed_share: float = Field(default=0.5, ge=0, le=1)
    """A step with a larger share of samples without a score is not trained; its groups are admitted again, and after
    three attempts the job fails. Default 0.5."""
    retries: int = Field(default=2, ge=0, le=100)
    """Further attempts after an infrastructure failure, within ``timeoutSeconds``. Default 2. Data errors are never
    retried."""
    timeout_seconds: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds for one sample, all its scorers and retries, waiting for limiters excluded. Default 120."""
    group_deadline_seconds: float = Field(default=900.0, gt=0, le=864_000)
    """Seconds from a group's first published sample to its release: with ``minSamplesPerGroup`` scored samples it is
    trained, else dropped with its reason. Default 900."""
    min_samples_per_group: int = Field(default=2, ge=1, le=4096)
    """Fewest scored samples with which a group is trained. Default 2, or 1 with ``samplesPerPrompt: 1``: a group of one
    has no spread to learn from."""
    workers: WorkersSpec = WorkersSpec()
    """The processes that run the scorers."""
    gateway: GatewaySpec = GatewaySpec()
    """The HTTP front, for a job that only scores."""
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    """Their network access."""

    @property
    def by_field(self) -> dict[str, ScorerSpec]:
        """Return the scorers by the fields of the job that describe them: ``spec.reward.scorers[0]``."""
        return {f"spec.reward.scorers[{index}]": scorer for index, scorer in enumerate(self.scorers)}

    @property
    def model_scorers(self) -> list[ScorerSpec]:
        """Return the scorers whose models the job serves."""
        return [scorer for scorer in self.scorers if scorer.served is not None]

    @property
    def sleeping_models(self) -> bool:
        """Return True if a served model frees its GPUs while the trainer updates."""
        return any(each.served is not None and each.served.sleep_during_updates for each in self.scorers)

    @property
    def environment_weights(self) -> dict[str, float]:
        """Return the weights of the scorers that read the reward of tools or environment, by name."""
        return {scorer.name: scorer.weight for scorer in self.rewarding.scorers if scorer.kind == "environment"}

    @property
    def rewarding(self) -> RewardSpec:
        """Return the section without the scorers that only audit."""
        return self.model_copy(update={"scorers": [scorer for scorer in self.scorers if scorer.audit is None]})

    @property
    def auditors(self) -> dict[str, AuditSpec]:
        """Return the scorers that only audit, by name."""
        return {scorer.name: scorer.audit for scorer in self.scorers if scorer.audit is not None}

    @property
    def watched(self) -> dict[str, DriftSpec]:
        """Return the scorers whose drift is watched, by name."""
        return {scorer.name: scorer.drift for scorer in self.scorers if scorer.drift is not None}

    def alone(self, name: str) -> RewardSpec:
        """Return the section with that scorer as its only one, without a cache: an auditor scores as any other does.

        Nobody waits for it, so each of its attempts has the scorer's own ``timeoutSeconds``, also where a sample of the
        reward has less.
        """
        scorer = next(each for each in self.scorers if each.name == name)
        retries = self.retries if scorer.retries is None else scorer.retries
        timeout_s = max(self.timeout_seconds, (1 + retries) * (scorer.timeout_seconds or 0.0))
        alone = scorer.model_copy(update={"audit": None, "weight": 1.0, "when": None, "cache": None})
        changes = {"scorers": [alone], "combine": CombineSpec(), "on_failure": "mask", "timeout_seconds": timeout_s}
        return self.model_copy(update=changes)
