"""``plaudit try JOB`` for a policy that answers: play the first rows of the data with the job's agent.

The agent, its tools, environment, program and machines, the scorers and the limits are those of a run; Redis, Ray and a
trainer are not needed. The policy is one of

- ``--answers FILE``: turns that a user wrote, a line for each row; without a file the row's own;
- ``--url URL --model NAME``: any server that speaks OpenAI's API;
- ``--own-policy``: the job's engine with ``spec.model``, on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from plaudit_job.load import load_job
from plaudit_job.spec.rljob import RLJob
from plaudit_metrics.sources.sample_schema import group_columns, sample_columns, samples_table
from plaudit_reward.machines import SANDBOXES, RunMachines
from plaudit_reward.pipeline import Pipeline
from plaudit_sandbox.machine import remove
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion, Prompt, SampleBody
from plaudit_wire.plain import PlainDataError, plain
from plaudit_wire.printable import print_text, shown
from plaudit_wire.records import AgentReward, GroupRecord, ScoringRecord, Stamps
from plaudit_workers.agents.messages import FinishedSample, Trajectory
from plaudit_workers.commands.samples import sample_lines
from plaudit_workers.commands.trial import (
    GROUND_TRUTH,
    TriedRow,
    ending_of,
    first_rows,
    reward_without_servers,
    right_answer,
    show_logs,
    try_scorers,
)
from plaudit_workers.data_files import NumberedRow, data_paths
from plaudit_workers.launch.child_server import environments_of
from plaudit_workers.process import model_servers
from plaudit_workers.rollout.agents.agent import Agent
from plaudit_workers.rollout.engine import EngineFailedError, Policy
from plaudit_workers.rollout.prompt_work import SampleRun, sample_body
from plaudit_workers.rollout.vllm_arguments import prepare_environment
from plaudit_workers.rollout.worker import build_engine, open_agent
from plaudit_workers.service.build import BuildContext, build_pipeline
from plaudit_workers.stored_samples import write_samples
from plaudit_workers.training.groups import sample_seed
from plaudit_workers.training.state import RunPlan

if TYPE_CHECKING:
    from plaudit_workers.tokenizer import ChatTemplate

_AT_ONCE = 8
_ANSWER_WITHIN_S = 600.0
_VERSION = PolicyVersion(1, 0)
_TURNS = "turns"
"""The column of a row's own turns."""


def try_job(arguments: argparse.Namespace) -> int:
    """Play rows with the job's agent, or score the rows' answers where there is neither an agent nor a policy."""
    job = load_job(arguments.job)
    chosen = arguments.answers or arguments.url or arguments.own_policy
    if not chosen and not (job.spec.trains and job.spec.rollout.agent.kind != "singleTurn"):
        if arguments.save or arguments.samples > 1:
            raise RefusedError("--save and --samples need a policy: give --answers, --url or --own-policy, too")
        return try_scorers(arguments)
    if not job.spec.trains:
        raise RefusedError("the job only scores, so it has no agent and no policy: leave out the policy's options")
    if bool(arguments.url) != bool(arguments.model):
        raise RefusedError("--url and --model belong together: name a model of the server")
    if arguments.url and not arguments.url.startswith(("http://", "https://")):
        raise RefusedError(f"--url {arguments.url} does not begin with http:// or https://")
    if arguments.save is not None and not arguments.save.absolute().parent.is_dir():
        raise RefusedError(f"--save {arguments.save}: the folder {arguments.save.absolute().parent} does not exist")
    show_logs()
    prepare_environment(job.spec.model.source)  # before anything imports torch
    try:
        return asyncio.run(_play(job, arguments))
    except EngineFailedError as error:
        raise RefusedError(f"the policy failed: {error}") from error


async def _play(job: RLJob, arguments: argparse.Namespace) -> int:
    console = Console()
    reward = reward_without_servers(job.spec.reward.rewarding)
    async with AsyncExitStack() as stack:
        stack.enter_context(_sigterm_as_ctrl_c())
        folder = await stack.enter_async_context(_run_folder())
        await stack.enter_async_context(environments_of(job, folder))
        rows = list(first_rows(job, arguments.data, arguments.rows))
        turns = [] if arguments.url or arguments.own_policy else _turns_of(rows, arguments.answers)
        began_s = time.monotonic()
        agent = await stack.enter_async_context(open_agent(job, folder))
        opened_s = time.monotonic() - began_s
        template = _template_of(job, agent)
        path = Path(arguments.data or data_paths(job.spec.data.train)[0])
        numbered = [NumberedRow(path, number, row.data, None) for number, row in enumerate(rows, 1)]
        prompts = _prompts(job, numbered, template, arguments.samples)
        shared = await _shared_policy(job, template, arguments, stack)
        policies = [shared or await _scripted(turns[place], template) for place in range(len(rows))]
        context = BuildContext(
            reward,
            "try",
            model_servers=model_servers(),
            machines=RunMachines.of_job(job, folder),
            max_concurrent_tests=job.spec.sandboxes.max_concurrent,
        )
        if context.machines is not None:
            stack.push_async_callback(asyncio.to_thread, context.machines.provider.end)
        pipeline = await build_pipeline(reward, "try", context)
        stack.push_async_callback(pipeline.close)
        tools = ", ".join(tool["function"]["name"] for tool in template.tools)
        kind = job.spec.rollout.agent.kind
        print_text(f"agent {kind} ready in {opened_s:.2f} s{tools and f', with the tools {tools}'}")
        player = _Player(
            agent, pipeline, asyncio.Semaphore(min(_AT_ONCE, job.spec.rollout.agent.max_concurrent_samples))
        )
        groups = [asyncio.create_task(player.group(*pair)) for pair in zip(prompts, policies, strict=True)]
        played: list[PlayedSample] = []
        try:
            for group in groups:
                played += await group
                for sample in played[-arguments.samples :]:
                    _show(console, sample, full=arguments.full)
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
    print_text(_verdict(played))
    if arguments.save is not None:
        write_samples(_table(played), arguments.save)
        print_text(f"saved; read it with: plaudit samples {arguments.save}")
    return ending_of([sample.scoring for sample in played])


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Unwind at SIGTERM what the command has opened: its folder, servers and machines."""
    loop, task, ended = asyncio.get_running_loop(), asyncio.current_task(), False
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def end() -> None:
        nonlocal ended
        ended = task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        yield
    except asyncio.CancelledError:
        if ended:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@asynccontextmanager
async def _run_folder() -> AsyncIterator[Path]:
    """Make the folder that stands for a run's, with the machines of samples; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="plaudit-try-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / SANDBOXES).mkdir()
        try:
            yield folder
        finally:
            await asyncio.to_thread(remove, folder / SANDBOXES)


def _template_of(job: RLJob, agent: Agent) -> ChatTemplate:
    """Return the template that renders prompts: with the agent's tools, where it has any."""
    from plaudit_workers.rollout.agents.tools import ToolAgent
    from plaudit_workers.tokenizer import ChatTemplate

    return agent.template if isinstance(agent, ToolAgent) else ChatTemplate.of_model(job.spec.model, [])


def _prompts(job: RLJob, rows: Sequence[NumberedRow], template: ChatTemplate, samples: int) -> list[Prompt]:
    """Return the rows as the trainer admits them."""
    from plaudit_workers.training.prompts import PromptRenderer

    if job.spec.data.images is not None:
        raise RefusedError("spec.data.images: plaudit try plays prompts of text. Leave out the policy's options")
    sampling = RunPlan.from_job(job).sampling
    renderer = PromptRenderer(template, continues=job.spec.rollout.agent.kind == "singleTurn")
    return [
        Prompt(
            group=f"row-{rendered.numbered.number}",
            position=position,
            split="train",
            step=0,
            n=samples,
            min_version=_VERSION,
            seed=sample_seed(job.spec.seed, "train", position),
            sampling=sampling,
            data_source=rendered.numbered.row.data_source,
            prompt=rendered.text,
            prompt_ids=rendered.ids.astype("<i4").tobytes(),
            ground_truth=rendered.numbered.row.ground_truth,
            extra_info=rendered.numbered.row.extra_info,
            messages=[] if isinstance(rendered.numbered.row.prompt, str) else rendered.numbered.row.prompt,
        )
        for position, rendered in enumerate(renderer.rendered(rows))
    ]


async def _shared_policy(
    job: RLJob, template: ChatTemplate, arguments: argparse.Namespace, stack: AsyncExitStack
) -> Policy | None:
    """Return the policy that plays all rows; None where each row has turns of its own."""
    if arguments.own_policy:
        return await _own_policy(job, stack)
    if not arguments.url:
        return None
    from plaudit_workers.rollout.served import ServedPolicy

    served = ServedPolicy(
        arguments.url,
        arguments.model,
        template,
        key=os.environ.get(arguments.api_key_variable, ""),
        key_field=arguments.api_key_variable,
        limit_s=_ANSWER_WITHIN_S,
    )
    stack.push_async_callback(served.close)
    return served


async def _own_policy(job: RLJob, stack: AsyncExitStack) -> Policy:
    """Start the job's engine and load the model's own weights."""
    engine = build_engine(job)
    stack.push_async_callback(engine.close)
    await engine.start()
    await engine.load_weights(await asyncio.to_thread(_weights_folder, job), _VERSION)
    return engine


def _weights_folder(job: RLJob) -> Path:
    source = job.spec.model.source
    if Path(source).is_dir() or job.spec.rollout.engine.kind == "scripted":
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=job.spec.model.revision or None))


async def _scripted(turns: Turns, template: ChatTemplate) -> Policy:
    """Return a policy that writes these turns, and repeats the last one."""
    from plaudit_workers.rollout.scripted import Constant, Script, ScriptedEngine
    from plaudit_workers.rollout.served import TurnWriter

    writer = TurnWriter(template)
    try:
        texts = [writer.text(turn) for turn in turns]
    except ValueError as error:
        raise RefusedError(f"a turn cannot be written: {error}") from error
    engine = ScriptedEngine(Script(Constant(0.0), turns=texts), tokenizer=template.tokenizer)
    await engine.load_weights(Path(), _VERSION)
    return engine


Turns = list[str | dict[str, Any]]


def _turns_of(rows: Sequence[TriedRow], answers: Path | None) -> list[Turns]:
    """Return the turns of each row: texts, and messages of the assistant; from a file or from the row itself."""
    given = _own_turns(rows) if answers is None else _answers(answers, len(rows))
    return [_checked(where, turns) for where, turns in given]


def _own_turns(rows: Sequence[TriedRow]) -> Iterator[tuple[str, Any]]:
    """Yield the column ``turns`` of each row, else its right answer as the only turn."""
    for number, row in enumerate(rows, 1):
        turns = row.columns.get(_TURNS)
        source, answer = right_answer(row)
        if not turns and source == GROUND_TRUTH and row.data.ground_truth is None:
            more = " (plaudit tasks FOLDER runs a task's tests and solution)" if "task" in row.data.extra_info else ""
            raise RefusedError(
                f"row {number} has neither turns nor an answer to play: give --answers, --url or --own-policy{more}"
            )
        yield f"row {number}", turns or [answer]


def _answers(path: Path, num_rows: int) -> list[tuple[str, Any]]:
    """Read a line of turns for each row."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # others end no line of JSON
    except (OSError, UnicodeDecodeError) as error:
        raise RefusedError(f"--answers {path} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turns = plain(json.loads(line), _TURNS)
        except (ValueError, RecursionError, PlainDataError) as error:
            raise RefusedError(f"--answers {path}:{number} is no JSON: {error}") from error
        found.append((f"--answers {path}:{number}", turns.get(_TURNS) if isinstance(turns, dict) else turns))
    if len(found) < num_rows:
        raise RefusedError(
            f"--answers {path} has turns for {len(found)} rows, and {num_rows} are played: add lines, or lower --rows"
        )
    return found[:num_rows]


def _checked(where: str, turns: Any) -> Turns:
    turns = [turns] if isinstance(turns, str) else turns
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str | dict) for turn in turns):
        raise RefusedError(f"{where}: its turns are {shown(turns)}; give a list of texts or messages, or one text")
    return turns


@dataclass(frozen=True)
class PlayedSample:
    """Hold one sample that was played and scored."""

    prompt: Prompt
    body: SampleBody
    stamps: Stamps
    scoring: ScoringRecord


class _Run(SampleRun):
    """Play one sample; a failed one asks the policy for nothing more."""

    async def failed(self, failure: AgentReward) -> Trajectory:
        """Return a trajectory of one token with the reason."""
        trajectory = Trajectory(failure=failure)
        trajectory.add_turn(FinishedSample([0], [0.0], [(0, _VERSION.incarnation, _VERSION.number)], "stop", 0.0))
        trajectory.response = ""
        return trajectory


class _Player:
    """Play and score groups."""

    def __init__(self, agent: Agent, pipeline: Pipeline, places: asyncio.Semaphore) -> None:
        self._agent = agent
        self._pipeline = pipeline
        self._places = places

    async def group(self, prompt: Prompt, policy: Policy) -> list[PlayedSample]:
        """Play the samples of a prompt and score them, those of group scorers together."""
        played = await asyncio.gather(*(self._sample(prompt, index, policy) for index in range(prompt.n)))
        samples = [each.body.sample for each in played]
        scorings = await self._pipeline.score_group(samples, [each.scoring for each in played])
        return [replace(each, scoring=scoring) for each, scoring in zip(played, scorings, strict=True)]

    async def _sample(self, prompt: Prompt, index: int, policy: Policy) -> PlayedSample:
        async with self._places:
            taken = time.time()
            run = _Run(prompt, index, policy, lambda change: None)
            trajectory = await run.run(self._agent)
            body = sample_body(prompt, index, trajectory, run.record("try", trajectory, None), policy)
            published = time.time()
            scoring = await self._pipeline.score(body.sample)
        stamps = Stamps(taken, taken=taken, published=published, score_taken=published, committed=time.time())
        return PlayedSample(prompt, body, stamps, scoring)


def _row(sample: PlayedSample) -> dict[str, Any]:
    """Return the sample in the columns of stored samples."""
    stamps, value = sample.stamps, sample.scoring.value
    assert stamps.committed is not None
    record = GroupRecord(
        group=sample.prompt.group,
        split="train",
        step=0,
        end="evaluated",
        num_samples=sample.prompt.n,
        num_scored=value is not None,
        admitted=stamps.admitted,
        closed=stamps.committed,
    )
    own = sample_columns(stamps, sample.body, sample.scoring)
    place = {"step": 0, "incarnation": 0, "index": sample.body.sample.index, "deliveries": 1}
    return place | group_columns(sample.prompt, record) | own


def _table(played: Sequence[PlayedSample]) -> Any:
    return samples_table([_row(sample) for sample in played], (sample.scoring for sample in played))


def _show(console: Console, sample: PlayedSample, *, full: bool) -> None:
    """Print a sample as ``plaudit samples`` does, and where its time went."""
    [row] = _table([sample]).to_pylist()
    for line in sample_lines(row, full):
        if line.plain:
            console.print(line, soft_wrap=True, highlight=False)
    console.print(f"  [dim]time:[/dim] {_times(sample)}\n", highlight=False, soft_wrap=True)


def _times(sample: PlayedSample) -> str:
    """Return the seconds of each stage, and of each scorer."""
    stamps, generation, scorers = sample.stamps, sample.body.generation, sample.scoring.scorers
    assert stamps.published is not None
    assert stamps.committed is not None
    own = "".join(f", {name} {of.call_s:.2f}" for name, of in scorers.items())
    calls = Counter(call.tool for turn in generation.turns for call in turn.calls)
    called = "".join(f", {count} × {name or 'unknown tool'}" for name, count in calls.items())
    turns = f"{len(generation.turns)} turns" if len(generation.turns) > 1 else "1 turn"
    return (
        f"{stamps.committed - stamps.admitted:.2f} s: policy {generation.generate_s:.2f} s in "
        f"{turns} ({generation.response_tokens:,} tokens); agent "
        f"{generation.tool_s:.2f} s{called}; scoring {stamps.committed - stamps.published:.2f} s{own}"
    )


def _verdict(played: Sequence[PlayedSample]) -> str:
    """Return one sentence: how many samples have a score, their mean, and how the others ended."""
    values = [sample.scoring.value for sample in played if sample.scoring.value is not None]
    mean = f", on average {sum(values) / len(values):.3g}" if values else ""
    ended = Counter(sample.scoring.outcome for sample in played if sample.scoring.value is None)
    others = "".join(f"; {count} ended with {outcome}" for outcome, count in ended.items())
    return f"{len(values)} of {len(played)} samples have a score{mean}{others}"
