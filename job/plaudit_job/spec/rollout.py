"""``spec.rollout``: the workers, engine and agent that generate samples. ``spec.data``: prompts."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from plaudit_job.spec.pod import PodSpec
from plaudit_job.spec.section import DNS_LABEL, MUTABLE, PYTHON_NAME, Command, FilePath, Opaque, Section


class EngineSpec(Section):
    """The inference engine of one rollout worker."""

    kind: Literal["vllm", "scripted"] = "vllm"
    """``vllm``, or ``scripted``, which generates scripted answers at a given speed, for tests and load generation.
    Default vllm."""
    tensor_parallel_size: int = Field(default=1, ge=1, le=1024)
    """GPUs that share each layer of one copy of the model. Default 1: as many as the model needs to fit, no more."""
    pipeline_parallel_size: int = Field(default=1, ge=1, le=1024)
    """Parts of the model's layers, each with ``tensorParallelSize`` GPUs of its own; for models that need several
    nodes, one part for each. vLLM's CPU build refuses more than 1, and no test runs it. Default 1."""
    max_model_length: int = Field(default=4096, ge=2, le=10_000_000)
    """Tokens of prompt and response together; bounds the KV cache of one request. Default 4,096."""
    max_concurrent_samples: int = Field(default=256, ge=1, le=100_000)
    """Samples that one worker generates at a time. Default 256: vLLM's own."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    """Share of a GPU's memory that the engine may take. Default 0.85: the rest is for the weights of an update. Ignored
    on a CPU: limit the cache there with ``arguments: {kv_cache_memory_bytes: …}``."""
    arguments: Opaque = Field(default={})
    """Further arguments of the engine under their own names: vLLM's engine arguments, or the scripted engine's
    settings. The engine rejects unknown ones when it starts, and vLLM's those that other fields of the job set."""

    @property
    def gpus(self) -> int:
        """Return the GPUs of one copy of the model; 0 if the engine has no model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size if self.kind == "vllm" else 0


class SamplingSpec(Section):
    """The distribution that training samples are drawn from."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    """Divides the logits; above 0 for training. Default 1: the policy itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this. Default 1: all tokens; the trainer then needs no mask."""
    top_k: int = Field(default=-1, ge=-1)
    """The k likeliest tokens. Default -1: all tokens."""
    max_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """The most tokens of a response; a longer one is cut and ends with ``length``. Default 1,024."""
    stop: list[str] = Field(default=[])
    """Texts that end a response when the model has written one of them, special tokens included; the text stays part of
    the response. Default: none, the model's own end of turn."""
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(default=[], max_length=256)
    """Tokens that end a response, by their ids; the token stays part of the response. Default: none."""
    ignore_eos: bool = False
    """Sample on behind the model's end of turn, up to ``maxTokens`` or a stop; for agent kinds ``singleTurn`` and
    ``custom``. Default false."""

    @property
    def stops(self) -> tuple[str | int, ...]:
        """The texts and the tokens that end a response beside the model's end of turn."""
        return (*self.stop, *self.stop_token_ids)


class McpSpec(Section):
    """An MCP server, all of whose tools the model may call: give ``url`` or ``command``."""

    url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a server that speaks streamable HTTP, such as ``http://search:8000/mcp``."""
    command: list[str] = Field(default=[])
    """Program and arguments of a server that speaks over its standard input and output; each sample that calls it
    starts its own."""
    headers: dict[str, str] = Field(default={}, max_length=32)
    """Headers of every request to ``url``, such as ``Authorization: Bearer ${SEARCH_TOKEN}``: ``${NAME}`` is replaced
    by that environment variable of the rollout and of the trainer, so that no secret is in the job. Default: none."""


class ToolSpec(Section):
    """Tools that the model may call: give ``path`` and ``function``, or ``config``, or ``mcp``, or ``sandbox``."""

    path: FilePath = ""
    """Python file: relative to the job file; on Kubernetes a file of ``spec.files``, or an absolute path on the volume
    or in the image."""
    function: str = Field(default="", pattern=f"^$|{PYTHON_NAME}")
    """The function's name in it; its docstring and type hints describe it to the model."""
    config: FilePath = ""
    """A YAML file in verl's format (``tool_config_path``), which lists tool classes with their configuration."""
    mcp: McpSpec | None = None
    """An MCP server."""
    sandbox: Literal["", "bash", "session", "files"] = ""
    """Tools in the sample's own machine (``spec.sandboxes``). ``bash``: a command of the shell, whose working folder
    the next call keeps. ``session``: the same, and variables, functions and processes in the background stay as well;
    not with ``sandboxes.provider: process``. ``files``: read, write and edit a file. Default empty: none."""
    timeout_seconds: float = Field(default=30.0, gt=0)
    """Seconds after which the process of a call is killed; ``onToolFailure`` says what follows. In a machine the model
    reads that its command was stopped. Default 30."""


class AgentSpec(Section):
    """The steps between the prompt and the finished sample."""

    kind: Literal["singleTurn", "tools", "environment", "endpoint", "custom"] = "singleTurn"
    """``singleTurn``: one generation. ``tools``: runs tool calls and appends their results until the model stops.
    ``environment``: a class of TRL, SkyRL or verl, or a server of OpenEnv, NeMo Gym or the Open Reward Standard.
    ``endpoint``: any program that speaks OpenAI's Chat Completions API. ``custom``: your class. Tools, classes and
    programs run in processes of their own, one for each sample. Default singleTurn."""
    max_concurrent_samples: int = Field(default=256, ge=0, le=100_000)
    """Samples of one worker that may wait for tools while others take their places in the engine
    (``engine.maxConcurrentSamples``). Default 256."""
    timeout_seconds: float = Field(default=1800.0, gt=0, le=86_400)
    """Seconds of one sample, generation included, after which it ends: without a score, or with that of its machine's
    tests. Default 1,800."""
    max_turns: int = Field(default=8, ge=1, le=1000)
    """The most generations of one sample, for ``tools``, ``environment`` and ``endpoint``. Default 8."""
    max_turn_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The most tokens of one turn, for ``tools`` and ``environment``. Default: what ``sampling.maxTokens``, which
    counts all turns and tool results, leaves."""
    max_calls_per_turn: int = Field(default=8, ge=1, le=1000)
    """The most tool calls of one turn, which run at the same time; further ones are answered with an error. Default 8.
    """
    max_calls: int = Field(default=64, ge=1, le=100_000)
    """The most tool calls of one sample; further ones are answered with an error. Default 64."""
    max_tool_response_tokens: int = Field(default=1024, ge=1, le=1_000_000)
    """The most tokens of one tool result; a longer one is cut. Default 1,024."""
    truncate_tool_response: Literal["left", "middle", "right"] = "middle"
    """The part of a long tool result that is left out. Default middle."""
    on_tool_failure: Literal["observe", "fail"] = "observe"
    """What follows when a call passes its time limit or ends its process. ``observe``: the model reads an error.
    ``fail``: the sample ends without a score. A tool that raises is always an error that the model reads. Default
    observe."""
    tool_parser: str = Field(default="hermes", min_length=1)
    """vLLM's parser of the model's tool calls, by name: ``hermes`` (Qwen2.5, Qwen3), ``llama3_json``, ``mistral``, …
    Default hermes."""
    tools: list[ToolSpec] = Field(default=[])
    """The tools that the model may call, for ``tools``; for ``environment`` beside its own."""
    path: FilePath = ""
    """Python file of the agent, for ``custom``, ``environment`` and ``endpoint``: relative to the job file; on
    Kubernetes a file of ``spec.files``, or an absolute path on the volume or in the image."""
    class_name: str = Field(default="", alias="class")
    """The class in it: for ``custom`` with ``async def run(self, prompt, generate) -> Trajectory``; for ``environment``
    in the form of TRL (``reset``, methods as tools, ``get_reward``), of SkyRL's ``BaseTextEnv`` or of verl's
    ``AgentLoopBase``."""
    function: str = Field(default="", pattern=f"^$|{PYTHON_NAME}")
    """The function in it that takes the prompt and may return a reward, for ``endpoint``. Default empty: the file is
    run as a program, by ``command``."""
    command: Command = Field(default=[])
    """The program, by its name or path, and its arguments, for ``endpoint``; ``path`` is appended. It reads its prompt
    as JSON from its standard input, and ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` from its environment. Default empty:
    Python, for ``path``."""
    ground_truth: bool = False
    """For ``endpoint``: the program reads its row's ``ground_truth``. What the policy writes may run beside it, in its
    working folder, and read it as well. Default false."""
    url: str = Field(default="", pattern=r"^(https?://.+)?$")
    """URL of a server of OpenEnv, NeMo Gym (resources) or the Open Reward Standard, for ``environment`` instead of
    ``path`` and ``class``."""
    environment: str = Field(default="", pattern=f"^$|{DNS_LABEL}")
    """Name of an entry of ``spec.environments``, for ``environment`` instead of ``url``. Default empty: ``url``."""
    arguments: Opaque = Field(default={})
    """Arguments of the environment: of TRL's or verl's class, SkyRL's ``env_config``, OpenEnv's ``reset``, further
    columns of NeMo Gym's rows; ``env_name``, ``toolset_name`` and ``secrets`` of the Open Reward Standard (``secrets:
    {name: "${VARIABLE}"}``, from rollouts' and trainer's environment). Default: none."""
    sandbox: bool = False
    """Each sample has a machine (``spec.sandboxes``). For ``environment`` with ``class``, which gets it as its argument
    ``sandbox``; for ``endpoint`` with ``command``, which runs in it, and reaches the policy alone unless the machine
    has a network. ``path`` is copied into it, and the word ``{instruction}`` of the command is replaced by the prompt's
    last message. Default false."""
    environment_timeout_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Seconds after which a call of the environment (reset, step, a method, the reward) is given up and its process
    killed; the sample then ends without a score. Default 60."""


class EngineOverrides(Section):
    """Fields of ``rollout.engine`` that a group has of its own."""

    tensor_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """As in ``rollout.engine``, which is the default."""
    pipeline_parallel_size: int | None = Field(default=None, ge=1, le=1024)
    """As in ``rollout.engine``, which is the default."""
    max_concurrent_samples: int | None = Field(default=None, ge=1, le=100_000)
    """As in ``rollout.engine``, which is the default."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """As in ``rollout.engine``, which is the default."""
    arguments: Opaque = Field(default={})
    """Arguments that replace or extend those of ``rollout.engine``. Default: none."""


class RolloutGroupSpec(Section):
    """Rollout workers that differ from others of the job in their machines: spot nodes, another type of GPU."""

    name: str = Field(max_length=10, pattern=DNS_LABEL)
    """Name of the group, such as ``spot``; part of the names of its pods."""
    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=0, le=10_000)
    """Rollout workers of this group; 0 for none at present. Cannot change under ``scheduling.gang`` or ``queueName``.
    Default 1."""
    pods_per_replica: int | None = Field(default=None, ge=1, le=64)
    """As in ``rollout``, which is the default."""
    engine: EngineOverrides = EngineOverrides()
    """What this group's engines have of their own, such as fewer GPUs of a larger type."""
    pod: PodSpec = PodSpec()
    """Pods of this group: each field that is not empty replaces that field of ``rollout.pod``, such as
    ``priorityClassName``, ``gpuResource``, ``nodeSelector``, ``tolerations``."""


class RolloutSpec(Section):
    """Rollout workers: they take prompts and publish each sample as soon as it is finished."""

    replicas: Annotated[int, MUTABLE] = Field(default=1, ge=1, le=10_000)
    """Rollout workers, each with ``engine.tensorParallelSize`` × ``engine.pipelineParallelSize`` GPUs. Cannot change
    under ``scheduling.gang`` or ``queueName``. Default 1."""
    pods_per_replica: int = Field(default=1, ge=1, le=64)
    """Pods that share one copy of the model and its GPUs evenly, for models beyond one node: they have a leader and are
    restarted together. On Kubernetes only. Default 1."""
    groups: list[RolloutGroupSpec] = Field(default=[], max_length=8)
    """Groups of rollout workers on different machines, instead of ``replicas``. Default none: all workers are alike."""
    in_flight: Literal["continue", "recompute", "drain"] = "continue"
    """How running samples get new weights: ``continue`` keeps the KV cache of the old weights (the version of each
    token is recorded), ``recompute`` computes it again with the new weights, ``drain`` finishes the samples first.
    Default continue: nothing is computed twice and nothing waits."""
    sleep_during_updates: bool = False
    """Free the rollouts' GPUs while the trainer updates, where it shares them: vLLM's sleep mode. Running samples go on
    afterwards, recomputed with the new weights. Default false: rollouts keep their GPUs."""
    engine: EngineSpec = EngineSpec()
    """The inference engine."""
    sampling: SamplingSpec = SamplingSpec()
    """The sampling of training samples."""
    agent: AgentSpec = AgentSpec()
    """A single generation, tools, or your own loop."""
    pod: PodSpec = PodSpec()
    """Pods of the rollout workers."""

    @property
    def by_group(self) -> dict[str, RolloutSpec]:
        """Return what applies to each group, by its name; without groups one entry with an empty name."""
        names = [group.name for group in self.groups] or [""]
        return dict(zip(names, self.by_section.values(), strict=True))

    @property
    def by_section(self) -> dict[str, RolloutSpec]:
        """Return the same by the section of the job that describes it: ``spec.rollout.groups[0]``."""
        groups = {f"spec.rollout.groups[{n}]": _of_group(self, group) for n, group in enumerate(self.groups)}
        return groups or {"spec.rollout": self}

    @property
    def pods(self) -> int:
        """Return the number of pods of all groups."""
        return sum(each.replicas * each.pods_per_replica for each in self.by_group.values())

    @property
    def spans_pods(self) -> bool:
        """Return True if a replica of any group has several pods."""
        return any(each.pods_per_replica > 1 for each in self.by_group.values())

    @property
    def gpus_per_pod(self) -> int:
        """Return the GPUs of one pod."""
        return self.engine.gpus // self.pods_per_replica


def _of_group(rollout: RolloutSpec, group: RolloutGroupSpec) -> RolloutSpec:
    engine = {name: value for name, value in group.engine if value is not None}
    engine["arguments"] = {**rollout.engine.arguments, **group.engine.arguments}
    # A field at its (empty) default is not given: whether it was written is lost in a resolved job file.
    pod = {name: value for name, value in group.pod if value != PodSpec.model_fields[name].default}
    return rollout.model_copy(
        update={
            "groups": [],
            "replicas": group.replicas,
            "pods_per_replica": group.pods_per_replica or rollout.pods_per_replica,
            "engine": rollout.engine.model_copy(update=engine),
            "pod": rollout.pod.model_copy(update=pod),
        }
    )


class PassRateSpec(Section):
    """Leave out prompts that a model always or never solved, by a share that was measured before the run."""

    field: str = Field(default="pass_rate", min_length=1)
    """The number in ``extra_info`` of each row, from 0 to 1. Default pass_rate."""
    min: float = Field(default=0.0, ge=0, le=1)
    """Rows below it are left out. Default 0: none."""
    max: float = Field(default=1.0, ge=0, le=1)
    """Rows above it are left out. Default 1: none."""

    @model_validator(mode="after")
    def _some_range(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min {self.min:g} is above max {self.max:g}, so no prompt is left; exchange them")
        return self


class SkipSolvedSpec(Section):
    """Skip prompts that this run has always solved."""

    threshold: float = 1.0
    """A group solves its prompt if its mean reward is at least this. Default 1: all samples have the full reward."""
    min_visits: int = Field(default=2, ge=1, le=1000)
    """A prompt is skipped once so many groups have solved it and none has not. Default 2: one may be luck."""


class WeightedDataSpec(Section):
    """Rows that are mixed with those of others."""

    path: FilePath = Field(min_length=1)
    """As ``data.train.path``."""
    weight: float = Field(gt=0, le=1_000_000)
    """The share of these rows among an epoch's prompts, relative to the other weights. An epoch has as many prompts as
    there are rows in all: rows of a high share repeat within it; of rows of a low share it has a part, and the next
    epoch the next part."""


class TrainDataSpec(Section):
    """The prompts of training."""

    path: FilePath = ""
    """A file, a pattern such as ``shards/*.parquet``, or a folder of files, in verl's columns: ``data_source``,
    ``prompt`` (messages or text), ``reward_model.ground_truth``, ``extra_info``; with ``data.images`` also ``images``.
    Files end with .parquet, .jsonl (also .jsonl.gz, .jsonl.zst), .json (an array of rows) or .arrow; a folder may be
    one that ``save_to_disk`` of ``datasets`` wrote. Give exactly one of ``path``, ``mixture``, ``tasks`` and
    ``split``."""
    mixture: list[WeightedDataSpec] = Field(default=[])
    """In place of ``path``: several files, patterns or folders, and their shares. Default: ``path`` alone."""
    tasks: FilePath = ""
    """In place of ``path``: a folder of Harbor tasks, or one task. Each is a row, its instruction the prompt. Rollouts
    and reward workers read it as well; on Kubernetes an absolute path on the volume."""
    split: str = ""
    """In place of ``path``: a split of tasks, such as ``train``, that the agent's environment server (Open Reward
    Standard) has. Each is a row whose prompt the server gives."""
    shuffle: bool = True
    """Shuffle for every epoch, from ``spec.seed``. Default true: files are often sorted by source or difficulty."""
    max_prompt_length: int = Field(default=1024, ge=1, le=1_000_000)
    """Tokens; longer prompts (chat template applied) are left out and counted. Default 1,024, as in verl; with
    ``rollout.sampling.maxTokens`` it must fit into ``rollout.engine.maxModelLength``."""
    pass_rate: PassRateSpec | None = None
    """Train only prompts of a measured difficulty. Default: all."""
    skip_solved: SkipSolvedSpec | None = None
    """Skip prompts that this run has always solved. Default: none is skipped."""

    @property
    def source(self) -> str:
        """Return the file or folder that has the rows."""
        return self.path or self.tasks


class ValidationSamplingSpec(Section):
    """The sampling of validation samples."""

    temperature: float = Field(default=0.0, ge=0, le=2)
    """0 takes the likeliest token. Default 0: repeated validations give the same answers."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this. Default 1: all."""
    top_k: int = Field(default=-1, ge=-1)
    """The k likeliest tokens. Default -1: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leaves out tokens below this share of the likeliest one's probability. Default 0: none."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=2)
    """Above 1 lowers the logits of tokens that were written before. Default 1: none."""
    min_tokens: int = Field(default=0, ge=0, le=1_000_000)
    """The least tokens of a response: the model cannot end it before. Default 0."""
    ignore_eos: bool = False
    """As in ``rollout.sampling``, whose ``stop`` and ``stopTokenIds`` apply here too. Default false."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_000_000)
    """The most tokens of a response. Default: ``rollout.sampling.maxTokens``."""


class ValidationDataSpec(Section):
    """Prompts that are scored at intervals and never trained."""

    path: FilePath = ""
    """A file, a pattern or a folder in the same columns as the training data. Give exactly one of ``path``, ``tasks``
    and ``split``."""
    tasks: FilePath = ""
    """A folder of Harbor tasks, or one task, as in ``train``."""
    split: str = ""
    """A split of the environment server's tasks, as in ``train``."""
    every_steps: int = Field(default=20, ge=1)
    """Steps between two validations; the first is before step 1, the last after the last step. Default 20: a few per
    cent of the work with usual data sizes."""
    before_training: bool = True
    """Validate the first policy before step 1. Default true: without it, nothing shows what training changed."""
    samples_per_prompt: int = Field(default=1, ge=1, le=1024)
    """Samples of each prompt. Default 1: enough at temperature 0."""
    sampling: ValidationSamplingSpec = ValidationSamplingSpec()
    """Their sampling."""

    @property
    def source(self) -> str:
        """Return the file or folder that has the rows."""
        return self.path or self.tasks


class ImagesSpec(Section):
    """Images in prompts, for a model with a vision tower such as Qwen2.5-VL."""

    max_per_prompt: int = Field(default=4, ge=1, le=64)
    """The most images of a prompt; a row with more is refused. Default 4. Rollouts are built for as many."""
    max_pixels: int | None = Field(default=None, ge=3136, le=67_108_864)
    """The model's processor scales larger images down to so many pixels; each takes fewer tokens then. Default: the
    limit in the processor's own configuration."""


class ColumnsSpec(Section):
    """The columns of data that is not in verl's form, such as TRL's, OpenAI's and that of ``datasets``."""

    prompt: str = Field(default="prompt", min_length=1)
    """Messages or text. Default prompt; OpenAI's files have messages."""
    ground_truth: str = ""
    """What scorers compare a response with, such as answer, solution or completion. Of a completion in messages it is
    their text. The same column as ``prompt`` takes the last message of the assistant out of it. Default empty:
    ``reward_model.ground_truth`` if the file has it, else none."""
    data_source: str = Field(default="data_source", min_length=1)
    """The origin of a row, by which figures are kept apart and rules are chosen. Default data_source; without such a
    column, the name of the file or folder."""
    extra_info: list[str] = Field(default=[])
    """Columns that scorers get by name. Default empty: all others."""


class DataSpec(Section):
    """Training prompts and, optionally, validation prompts."""

    train: TrainDataSpec
    """The training data."""
    columns: ColumnsSpec | None = None
    """Read other columns than verl's, in all files of the job. Default: verl's."""
    images: ImagesSpec | None = None
    """Read verl's column ``images``, and train a model with a vision tower. Default: prompts are text, and files with
    this column are refused."""
    validation: ValidationDataSpec | None = None
    """The validation data. Default: none."""

    @property
    def sections(self) -> dict[str, TrainDataSpec | ValidationDataSpec]:
        """Return ``train`` and, where it is given, ``validation``."""
        return {"train": self.train} | ({} if self.validation is None else {"validation": self.validation})
