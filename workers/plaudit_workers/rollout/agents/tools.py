"""Let the policy call tools (``agent.kind: tools``) or act in a user's environment (``agent.kind: environment``).

Generate → run the tool calls → append their results → generate, until the policy stops or the episode ends. The
conversation lives here, beside the engine; tools and environment run in the sample's own process. Token ids are only
ever appended (``chat.ChatSuffix``). In an environment the policy acts by tool calls (TRL, OpenEnv, NeMo Gym) or by the
text of its turns (SkyRL). verl's agent loops, which hold the conversation themselves, run as ``custom`` agents do.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, Self, TypeVar

from plaudit_job.spec.rollout import AgentSpec
from plaudit_wire.errors import described
from plaudit_wire.messages import Prompt
from plaudit_wire.printable import shown
from plaudit_wire.records import AgentReward, CallOutcome, CallRecord
from plaudit_workers.agents.messages import (
    AskEnvironment,
    CallTool,
    EnvironmentReply,
    FromSample,
    Tool,
    ToolResult,
    ToSample,
    Trajectory,
    UseMachine,
    prompt_messages,
    prompt_tokens,
)
from plaudit_workers.agents.processes import AgentProcesses, ProcessDiedError, SampleProcess
from plaudit_workers.rollout.agents.agent import AgentError, Generate
from plaudit_workers.rollout.agents.chat import ChatSuffix, decoded_turn, tool_call, tool_message, without_end
from plaudit_workers.rollout.agents.machine_tools import CallEnd, MachineTools, SampleMachine
from plaudit_workers.rollout.agents.tool_calls import ParsedCall, ParsedTurn, ToolCallParser
from plaudit_workers.rollout.engine import Chat
from plaudit_workers.tokenizer import TOOL_SELECTION, ChatTemplate

_ONE_CALL = "only the first call of a turn is run"
"""With a chat template that has no place for more."""
_CHARACTERS_OF_A_TOKEN = 8
"""Of a longer result, this many characters for each token that may stay are read."""
_STEP_OUTCOMES: dict[str, CallOutcome] = {
    "ok": "ok",
    "data_error": "error",
    "timeout": "timeout",
    "infra_error": "killed",
}
_RESETS_AFTER_DEATH = 2
_MOST_CHARACTERS = 1 << 20
"""Of what an environment shows at once: more would hold up the event loop while it is tokenised."""
_MOST_USES_AT_ONCE = 64
_MOST_SELECTIONS = 256
"""Of the agent's tools, by rows; those used last are kept."""

Answer = TypeVar("Answer", ToolResult, EnvironmentReply)


class ToolProcess:
    """Call the tools and the environment of one sample in its process, which the first call forks; kill it at a limit.

    Args:
        create_arguments: by the tool's name, the arguments of ``create`` of verl's tools.
        machine: runs the tools that are its own, in place of the process.
    """

    def __init__(
        self,
        processes: AgentProcesses,
        tools: Mapping[str, Tool],
        create_arguments: Mapping[str, dict[str, Any]],
        machine: SampleMachine | None = None,
    ) -> None:
        self._machine = machine
        self._processes = processes
        self._tools = tools
        self._create_arguments = create_arguments
        self._process: SampleProcess | None = None
        self._awaited: dict[int, tuple[type[ToolResult | EnvironmentReply], asyncio.Future[Any]]] = {}
        self._num_calls = 0
        self._uses: set[asyncio.Task[None]] = set()
        """Of the machine, by the process."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.close()
        for use in self._uses:
            use.cancel()
        await asyncio.gather(*self._uses, return_exceptions=True)

    @property
    def died(self) -> bool:
        """Return True if the process ended."""
        return self._process is not None and self._process.died.done()

    async def call(self, calls: Sequence[ParsedCall]) -> list[CallEnd]:
        """Run the calls at the same time, those in the machine one by one; return their ends in order. Never raises."""
        inside = [self._machine is not None and self._machine.runs(call.name) for call in calls]
        of_process, of_machine = await asyncio.gather(
            self._call_process([call for call, own in zip(calls, inside, strict=True) if not own]),
            self._call_machine([call for call, own in zip(calls, inside, strict=True) if own]),
        )
        left = {True: iter(of_machine), False: iter(of_process)}
        return [next(left[own]) for own in inside]

    async def _call_machine(self, calls: Sequence[ParsedCall]) -> list[CallEnd]:
        if self._machine is None:
            return []
        return [await self._machine.call(call.name, call.arguments) for call in calls]

    async def _call_process(self, calls: Sequence[ParsedCall]) -> list[CallEnd]:
        if not calls:
            return []
        began = time.monotonic()
        try:
            process = await self._forked()
        except ProcessDiedError as error:
            return [CallEnd("killed", f"no process can be started: {error}")] * len(calls)
        wait_s = time.monotonic() - began
        return await asyncio.gather(*(self._call(process, call, began, wait_s) for call in calls))

    async def ask(self, method: Literal["reset", "step", "finish"], limit_s: float, **fields: Any) -> EnvironmentReply:
        """Ask the environment; a failure is an outcome of the reply. Never raises.

        Args:
            limit_s: seconds after which the process is killed.
            fields: of ``AskEnvironment``.
        """
        process = self._process
        try:
            if method == "reset":
                process = await self._forked()
            if process is None or process.died.done():
                raise ProcessDiedError("ended before")
            return await self._answer(
                process, EnvironmentReply, partial(AskEnvironment, method=method, **fields), limit_s
            )
        except TimeoutError:
            reason = f"{method} of the environment gave no answer within {limit_s:g} s"
            if process is not None:
                process.kill(f"was killed: {reason}")
            return EnvironmentReply(0, "timeout", reason)
        except ProcessDiedError as error:
            return EnvironmentReply(0, "infra_error", f"the environment's process {error}")

    async def _forked(self) -> SampleProcess:
        if self._process is None or self._process.died.done():
            process = self._process = await self._processes.fork()
            process.on_message = self._on_message
            process.died.add_done_callback(self._on_death)
        return self._process

    async def _call(self, process: SampleProcess, call: ParsedCall, began: float, wait_s: float) -> CallEnd:
        name, limit_s = call.name, self._tools[call.name].timeout_s
        create = self._create_arguments.get(name, {})
        outcome: CallOutcome = "killed"
        try:
            message = partial(CallTool, tool=name, arguments=call.arguments, create_arguments=create)
            result = await self._answer(process, ToolResult, message, limit_s)
            return CallEnd(result.outcome, result.text, time.monotonic() - began, wait_s, result.reward, result.done)
        except TimeoutError:
            outcome, text = "timeout", f"{name} gave no result within {limit_s:g} s"
            process.kill(f"was killed: {text}")
        except ProcessDiedError as error:
            text = f"the process that ran {name} {error}"
        return CallEnd(outcome, text, time.monotonic() - began, wait_s)

    async def _answer(
        self, process: SampleProcess, kind: type[Answer], message: Callable[[int], ToSample], limit_s: float
    ) -> Answer:
        """Send the message with a number of its own; return what answers it, which is of this kind."""
        self._num_calls += 1
        number = self._num_calls
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._awaited[number] = (kind, answer)
        process.send(message(number))
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        finally:
            self._awaited.pop(number, None)

    def _on_message(self, message: FromSample) -> bool:
        if isinstance(message, UseMachine):
            return self._use_machine(message)
        if not isinstance(message, ToolResult | EnvironmentReply):
            return False
        kind, answer = self._awaited.get(message.id, (None, None))
        if answer is None or type(message) is not kind:
            return False
        del self._awaited[message.id]
        if not answer.done():
            answer.set_result(message)
        return True

    def _use_machine(self, message: UseMachine) -> bool:
        process = self._process
        if self._machine is None or process is None or len(self._uses) >= _MOST_USES_AT_ONCE:
            return False

        async def use(machine: SampleMachine) -> None:
            process.send(await machine.use(message))

        work = asyncio.get_running_loop().create_task(use(self._machine))
        self._uses.add(work)
        work.add_done_callback(self._uses.discard)
        return True

    def _on_death(self, died: asyncio.Future[str]) -> None:
        for _, answer in self._awaited.values():
            if not answer.done():
                answer.set_exception(ProcessDiedError(died.result()))


@dataclass(frozen=True)
class ToolLimits:
    """Hold the limits of one sample; see ``spec.rollout.agent``."""

    turns: int = 8
    turn_tokens: int | None = None
    calls_per_turn: int = 8
    calls: int = 64
    result_tokens: int = 1024
    truncate: Literal["left", "middle", "right"] = "middle"
    seconds: float = 1800.0
    fail_on_tool_failure: bool = False

    @classmethod
    def from_spec(cls, agent: AgentSpec) -> ToolLimits:
        """Read the limits of a job."""
        return cls(
            turns=agent.max_turns,
            turn_tokens=agent.max_turn_tokens,
            calls_per_turn=agent.max_calls_per_turn,
            calls=agent.max_calls,
            result_tokens=agent.max_tool_response_tokens,
            truncate=agent.truncate_tool_response,
            seconds=agent.timeout_seconds,
            # A new process would not have the state of the environment.
            fail_on_tool_failure=agent.on_tool_failure == "fail" or agent.kind == "environment",
        )


class ToolAgent:
    """Hold conversations with tools, which ``processes`` have loaded."""

    def __init__(
        self,
        template: ChatTemplate,
        parser: ToolCallParser,
        processes: AgentProcesses,
        tools: Sequence[Tool],
        limits: ToolLimits = ToolLimits(),
        machines: MachineTools | None = None,
    ) -> None:
        self.machines = machines
        self.template = template
        self.parser = parser
        self.suffix = ChatSuffix(template)
        self.processes = processes
        self.tools = {tool.name: tool for tool in tools}
        self.limits = limits
        self._with_tools = lru_cache(_MOST_SELECTIONS)(self._selected)

    def for_row(self, prompt: Prompt) -> ToolAgent:
        """Return the agent with the tools that the prompt's row selects; raise ``AgentError``."""
        try:
            template = self.template.for_row(prompt.extra_info)
        except ValueError as error:
            raise AgentError(str(error)) from error
        if template is self.template:
            return self
        return self._with_tools(tuple(tool["function"]["name"] for tool in template.tools))

    def _selected(self, names: tuple[str, ...]) -> ToolAgent:
        selected = copy.copy(self)
        selected.tools = {name: self.tools[name] for name in names}
        selected.template = self.template.for_row({TOOL_SELECTION: list(names)})
        selected.parser = self.parser.with_tools(selected.template.tools)
        selected.suffix = ChatSuffix(selected.template)
        return selected

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        """Hold one conversation; raise ``AgentError`` if it has no trajectory."""
        agent = self.for_row(prompt)
        if self.machines is None:
            return await agent._run(prompt, generate)
        return await self.machines.play(prompt, partial(agent._run, prompt, generate))

    async def _run(self, prompt: Prompt, generate: Generate, machine: SampleMachine | None = None) -> Trajectory:
        async with ToolProcess(self.processes, self.tools, _create_arguments(prompt), machine) as process:
            conversation = self.conversation(prompt, generate, process)
            limit_s = machine.limit_s(self.limits.seconds) if machine is not None else self.limits.seconds
            try:
                async with asyncio.timeout(limit_s):
                    await conversation.hold()
            except TimeoutError:
                reason = f"the conversation took longer than {limit_s:g} s"
                if not conversation.trajectory.response_ids:
                    raise AgentError(reason, "timeout") from None
                conversation.stop(reason, has_machine=machine is not None)
            return conversation.trajectory

    def conversation(self, prompt: Prompt, generate: Generate, process: ToolProcess) -> Conversation:
        """Return a conversation that ``hold`` leads."""
        return Conversation(self, prompt, generate, process)


def _create_arguments(prompt: Prompt) -> dict[str, dict[str, Any]]:
    """Return the arguments of ``create`` of verl's tools, by the tool's name, from the data row."""
    written: Any = prompt.extra_info.get("tools_kwargs") or {}
    tools = {name: of_tool or {} for name, of_tool in written.items()} if isinstance(written, dict) else {"": written}
    create = {name: tool.get("create_kwargs") or {} if isinstance(tool, dict) else tool for name, tool in tools.items()}
    if not all(isinstance(arguments, dict) for arguments in create.values()):
        raise AgentError(f"extra_info.tools_kwargs is {shown(written)}; give {{tool: {{create_kwargs: {{…}}}}}}")
    return create


class Conversation:
    """Hold one sample in progress."""

    def __init__(self, agent: ToolAgent, prompt: Prompt, generate: Generate, process: ToolProcess) -> None:
        self.trajectory = Trajectory()
        self._agent = agent
        self._prompt = prompt
        self._prompt_ids = prompt_tokens(prompt)
        self._max_tokens = prompt.sampling.max_tokens
        self._generate = generate
        self._process = process
        self._num_calls = 0
        self._started = time.monotonic()

    async def hold(self) -> None:
        """Take turns until the policy calls no tool, or a limit is reached."""
        limits, trajectory = self._agent.limits, self.trajectory
        while True:
            turn = await self._turn()
            if not turn.calls or trajectory.finish_reason == "length" or len(trajectory.turns) >= limits.turns:
                return
            ends = await self._run(turn.calls)
            self._note(turn.calls, ends)
            results = self._results(turn.calls, ends)
            done = trajectory.failure is not None or any(end.done for end in ends)
            if done or not self._continue(turn.calls, results):
                return

    def stop(self, reason: str, *, has_machine: bool) -> None:
        """Record that its time is over."""
        if has_machine:  # a policy could use up its time whenever it fears the tests of its machine
            self.trajectory.finish_reason = "timeout"
        else:
            self.trajectory.failure = AgentReward("timeout", reason=reason)

    async def _sample(self) -> list[int]:
        """Let the policy write one turn; return its ids."""
        left = self._max_tokens - len(self.trajectory.response_ids)
        limit = min(left, self._agent.limits.turn_tokens or left)
        trajectory = self.trajectory
        messages = [*(trajectory.prompt_messages or prompt_messages(self._prompt)), *trajectory.messages]
        chat = Chat(messages, self._agent.template.tools)
        finished = await self._generate(self._prompt_ids + trajectory.response_ids, limit, chat=chat)
        self.trajectory.add_turn(finished)
        return finished.response_ids

    async def _turn(self) -> ParsedTurn:
        """Let the policy write one turn, and parse it."""
        turn = self._agent.parser.parse(decoded_turn(self._agent.template.tokenizer, await self._sample()))
        message: dict[str, Any] = {"role": "assistant", "content": turn.content}
        if turn.calls:
            message["tool_calls"] = self._written_calls(turn.calls)
        self.trajectory.messages.append(message)
        return turn

    def _written_calls(self, calls: Sequence[ParsedCall]) -> list[dict[str, Any]]:
        written = calls[: self._num_shown(calls)]
        return [tool_call(call.name, call.arguments, self._num_calls + place) for place, call in enumerate(written)]

    def _num_shown(self, calls: Sequence[ParsedCall]) -> int:
        """Return how many calls of a turn the template has a place for."""
        return len(calls) if len(calls) < 2 or self._agent.suffix.renders_parallel_calls else 1

    async def _run(self, calls: Sequence[ParsedCall]) -> list[CallEnd]:
        """Run the calls that may run; refuse the others with a message for the model."""
        shown = self._num_shown(calls)
        problems = [self._problem(call, place) if place < shown else _ONE_CALL for place, call in enumerate(calls)]
        run = iter(await self._process.call([c for c, problem in zip(calls, problems, strict=True) if not problem]))
        return [CallEnd("refused", f"Error: {problem}") if problem else next(run) for problem in problems]

    def _problem(self, call: ParsedCall, place: int) -> str:
        limits = self._agent.limits
        if call.name not in self._agent.tools:
            return f"there is no tool {call.name!r}; the tools are {', '.join(self._agent.tools)}"
        if place >= limits.calls_per_turn:
            return f"only {limits.calls_per_turn} calls are run in one turn"
        if self._num_calls + place >= limits.calls:
            return f"only {limits.calls} calls are run in one conversation"
        return call.problem

    def _note(self, calls: Sequence[ParsedCall], ends: Sequence[CallEnd]) -> None:
        """Record the calls, their rewards, and a failure that ends the sample."""
        now_s = time.monotonic() - self._started
        names = [call.name if call.name in self._agent.tools else "" for call in calls]
        self.trajectory.add_calls(
            [
                CallRecord(name, end.outcome, now_s - end.call_s, end.call_s, end.wait_s)
                for name, end in zip(names, ends, strict=True)
            ]
        )
        self.trajectory.tool_rewards += [end.reward for end in ends if end.reward is not None]
        if self.trajectory.tool_rewards:
            self.trajectory.reward = AgentReward("scored", sum(self.trajectory.tool_rewards))
        fail = self._agent.limits.fail_on_tool_failure
        failed = next((end for end in ends if end.ends_sample(fail)), None)
        if failed is not None:
            outcome: Literal["timeout", "infra_error"] = "timeout" if failed.outcome == "timeout" else "infra_error"
            self.trajectory.failure = AgentReward(outcome, reason=failed.text)

    def _results(self, calls: Sequence[ParsedCall], ends: Sequence[CallEnd]) -> list[dict[str, Any]]:
        """Add the results to the messages; return them."""
        shown = self._num_shown(calls)
        texts = [self._cut(end.text) for end in ends[:shown]]
        if shown < len(calls):
            texts[-1] += f"\nError: {_ONE_CALL}"
        results = [
            tool_message(call.name, text, self._num_calls + place)
            for place, (call, text) in enumerate(zip(calls, texts, strict=False))
        ]
        self.trajectory.messages += results
        return results

    def _continue(self, calls: Sequence[ParsedCall], results: Sequence[dict[str, Any]]) -> bool:
        """Append the results' tokens; return False where no token is left for another turn."""
        written = self._written_calls(calls)
        self._num_calls += len(calls)
        return self._observe(self._agent.suffix.after_calls(written, results, self.trajectory.response_ids[-1]))

    def _observe(self, suffix: Sequence[int]) -> bool:
        """Append tokens that the policy did not choose; return False where no token is left for another turn."""
        if len(self.trajectory.response_ids) + len(suffix) >= self._max_tokens:
            self.trajectory.finish_reason = "length"
            return False
        self.trajectory.add_observation(suffix)
        return True

    def _cut(self, text: str) -> str:
        """Cut a long result to its limit of tokens."""
        limits, template = self._agent.limits, self._agent.template
        kept, decode = limits.result_tokens, template.tokenizer.decode
        if len(text) <= kept:
            return text  # a token has at least one character
        # Only the parts that can stay are tokenised: a megabyte would hold up the event loop.
        longest = kept * _CHARACTERS_OF_A_TOKEN
        if len(text) <= longest and len(template.encode(text)) <= kept:
            return text
        if limits.truncate == "left":
            return f"(truncated)...{decode(template.encode(text[-longest:])[-kept:])}"
        if limits.truncate == "right":
            return f"{decode(template.encode(text[:longest])[:kept])}...(truncated)"
        half = kept // 2
        first, last = template.encode(text[: longest // 2])[:half], template.encode(text[-(longest // 2) :])
        return f"{decode(first)}...(truncated)...{decode(last[len(last) - half :])}"


class EnvironmentAgent(ToolAgent):
    """Run episodes.

    Args:
        reads_text: each turn of the policy is an action; otherwise it acts by tool calls.
        step_limit_s: seconds of one call of the environment.
    """

    def __init__(self, *agent: Any, reads_text: bool, step_limit_s: float) -> None:
        super().__init__(*agent)
        self.reads_text = reads_text
        self.step_limit_s = step_limit_s

    def conversation(self, prompt: Prompt, generate: Generate, process: ToolProcess) -> Conversation:
        """Return an episode."""
        return _Episode(self, prompt, generate, process)


class _Episode(Conversation):
    """Hold one sample in progress."""

    _agent: EnvironmentAgent

    async def hold(self) -> None:
        """Reset the environment, act until the episode ends, ask for the reward."""
        reset = await self._reset()
        if reset.outcome != "ok":
            outcome = "data_error" if reset.outcome == "skipped" else reset.outcome
            raise AgentError(f"the environment cannot be reset: {reset.reason}", outcome)
        if problem := _too_long(reset.messages):
            raise AgentError(f"the environment cannot be reset: {problem}", "data_error")
        if reset.messages is not None:
            self._begin(reset.messages)
        await (self._act() if self._agent.reads_text else super().hold())
        if self.trajectory.failure is None:
            await self._finish()

    def stop(self, reason: str, *, has_machine: bool) -> None:
        """Record that its time is over, and so that the environment gave no reward."""
        super().stop(reason, has_machine=False)

    async def _reset(self) -> EnvironmentReply:
        """Reset the environment, in a new process where the last one died; a server is asked again in the process."""
        limit_s = self._agent.step_limit_s
        for _ in range(1 + _RESETS_AFTER_DEATH):
            reply = await self._process.ask("reset", limit_s, prompt=self._prompt)
            if reply.outcome != "infra_error" or not self._process.died:
                break
        return reply

    def _begin(self, messages: list[dict[str, Any]]) -> None:
        """Replace the prompt by the one that the environment wrote."""
        template = self._agent.template
        try:
            text = template.render(messages, generate=True)
        except Exception as error:  # a template is a program: it raises several kinds
            problem = f"the chat template refuses the environment's messages: {described(error)}"
            raise AgentError(f"the environment cannot be reset: {problem}", "data_error") from error
        self._prompt_ids = template.encode(text)
        self.trajectory.prompt_ids, self.trajectory.prompt_messages = list(self._prompt_ids), messages

    async def _act(self) -> None:
        """Pass each turn's text to the environment."""
        trajectory, tokenizer = self.trajectory, self._agent.template.tokenizer
        while True:
            action = str(tokenizer.decode(without_end(tokenizer, await self._sample()), skip_special_tokens=True))
            trajectory.messages.append({"role": "assistant", "content": action})
            reply = await self._step(action)
            if reply.outcome != "ok":
                outcome = "data_error" if reply.outcome == "skipped" else reply.outcome
                trajectory.failure = AgentReward(outcome, reason=reply.reason)
                return
            if reply.reward is not None:
                # Earlier turns without a reward have 0, so that each keeps its position.
                without = len(trajectory.turns) - 1 - len(trajectory.turn_rewards)
                trajectory.turn_rewards += [0.0] * without + [reply.reward]
                trajectory.reward = AgentReward("scored", sum(trajectory.turn_rewards))
            messages = reply.messages or []
            if problem := _too_long(messages):
                trajectory.failure = AgentReward("data_error", reason=problem)
                return
            trajectory.messages += messages
            if reply.done or not messages or len(trajectory.turns) >= self._agent.limits.turns:
                return
            if not self._observe(self._agent.suffix.after_answer(messages, trajectory.response_ids[-1])):
                return

    async def _step(self, action: str) -> EnvironmentReply:
        began = time.monotonic()
        reply = await self._process.ask("step", self._agent.step_limit_s, action=action)
        seconds = time.monotonic() - began
        self.trajectory.add_calls([CallRecord("step", _STEP_OUTCOMES[reply.outcome], began - self._started, seconds)])
        return reply

    def _note(self, calls: Sequence[ParsedCall], ends: Sequence[CallEnd]) -> None:
        super()._note(calls, ends)
        self.trajectory.turn_rewards.append(sum(end.reward for end in ends if end.reward is not None))

    async def _finish(self) -> None:
        """End the episode; its reward, where it has one, replaces the sum of the steps' rewards."""
        completion = self.trajectory.messages
        reply = await self._process.ask("finish", self._agent.step_limit_s, completion=completion)
        self.trajectory.environment = reply.attributes
        if reply.outcome != "ok":
            self.trajectory.reward = AgentReward(reply.outcome, reason=reply.reason)
        elif reply.reward is not None:
            self.trajectory.reward = AgentReward("scored", reply.reward)


def _too_long(messages: Sequence[dict[str, Any]] | None) -> str:
    """Return why messages of an environment cannot be tokenised; empty if they can."""
    size = sum(len(str(message)) for message in messages or [])
    if size <= _MOST_CHARACTERS:
        return ""
    return f"its messages have {size:,} characters; an environment may show {_MOST_CHARACTERS:,} at once"
