"""Tools that misbehave, in real processes: each costs its own sample only, and ends with a typed outcome."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from plaudit_sandbox.confinement import abi
from plaudit_workers.agents.messages import FunctionTool, ProcessLimits
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.rollout.agents.machine_tools import CallEnd
from plaudit_workers.rollout.agents.tool_calls import ParsedCall
from plaudit_workers.rollout.agents.tools import ToolProcess
from waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # transformers warns when it is imported
    pytest.mark.asyncio(loop_scope="module"),  # the tests share the template process, and so the event loop
]

LIMITS = ProcessLimits(memory_bytes=512 << 20, threads=100)

TOOLS = '''
import asyncio, json, os, pickle, re, signal, socket, struct, sys, time

calls = 0


def neighbour() -> int:
    """Count."""
    global calls
    calls += 1
    return calls


def write_to_wire(data: bytes) -> None:
    for descriptor in range(3, 256):
        try:
            socket.socket(fileno=os.dup(descriptor)).sendall(data)
        except OSError:
            pass


class HostileText(str):
    def refuse(self, *arguments):
        raise SystemExit("no")

    __getitem__ = __len__ = __str__ = __format__ = __repr__ = encode = refuse


class HostileError(Exception):
    def __str__(self):
        raise SystemExit("no")


class Pickled:
    def __reduce__(self):
        return os._exit, (1,)

    def __str__(self):
        return "pickled"


def nested(levels: int) -> list:
    value = []
    for _ in range(levels):
        value = [value]
    return value


def kills_its_parent():
    os.kill(os.getppid(), signal.SIGKILL)


def stops_its_parent():
    os.kill(os.getppid(), signal.SIGSTOP)


def kills_its_parents_group():
    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)


def kills_its_own_group():
    os.killpg(0, signal.SIGKILL)


def forks_without_end():
    while True:
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)


def allocates_without_end():
    held = []
    while True:
        held.append(bytearray(4 << 20))


def allocates_in_children():
    for _ in range(4):
        if os.fork() == 0:
            held = b"x" * (150 << 20)
            time.sleep(60)
    time.sleep(60)


def prints_without_end():
    while True:
        os.write(1, b"\\n" * (1 << 20))


def returns_hundreds_of_megabytes():
    return "x" * (150 << 20)


def returns_what_is_no_json():
    value = []
    value.append(value)
    return value


def returns_a_deep_structure():
    return nested(100_000)


def returns_a_hostile_text():
    return HostileText("text")


def returns_an_object_that_pickles_to_code():
    return Pickled()


def returns_half_a_surrogate():
    return "a\\ud800b"


def returns_an_infinite_reward():
    return "text", float("inf")


def returns_an_endless_reward():
    return "text", 10**400


def closes_its_pipes():
    os.closerange(0, 256)


def sends_what_is_no_message():
    write_to_wire(struct.pack("<I", 1) + b"\\x00")
    time.sleep(60)


def sends_an_empty_message():
    write_to_wire(struct.pack("<I", 1) + b"\\x90")
    time.sleep(60)


def sends_a_result_that_nothing_asked_for():
    from plaudit_wire.frames import frame
    from plaudit_workers.agents.messages import ToolResult
    write_to_wire(frame([ToolResult(999, "ok", "forged")]))
    time.sleep(60)


def sends_a_result_of_another_kind():
    from plaudit_wire.frames import frame
    from plaudit_workers.agents.messages import EnvironmentReply
    write_to_wire(frame([EnvironmentReply(number, reward=1.0) for number in range(1, 4)]))
    time.sleep(60)


def sends_a_message_without_end():
    write_to_wire(struct.pack("<I", 2**32 - 1) + bytes(70 << 20))
    time.sleep(60)


def replaces_its_protocol():
    from plaudit_workers.agents import sample_process
    sample_process.frame = lambda messages: b"\\x01\\x00\\x00\\x00\\x00"
    sys.modules.clear()


def exits():
    sys.exit(3)


def returns_in_a_fork_too():
    pid = os.fork()
    if pid == 0:
        return "forged"
    os.waitpid(pid, 0)
    return "honest"


async def exits_in_a_fork():
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    return str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def exits_at_once():
    os._exit(0)


def raises_a_keyboard_interrupt():
    raise KeyboardInterrupt


def raises_a_cancelled_error():
    raise asyncio.CancelledError


def raises_the_end_of_an_iterator():
    next(iter(()))


async def raises_a_hostile_error():
    raise HostileError


def raises_too_deep():
    raises_too_deep()


def hangs_in_c():
    re.match("(a+)+$", "a" * 64 + "b")


async def ignores_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def starts_a_daemon():
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(writing, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    return os.read(reading, 20).decode()
'''
NOT_PERMITTED = "PermissionError: [Errno 1] Operation not permitted"
ENDS = {
    "kills_its_parent": ("error", NOT_PERMITTED),
    "stops_its_parent": ("error", NOT_PERMITTED),
    "kills_its_parents_group": ("error", NOT_PERMITTED),
    "kills_its_own_group": ("killed", "was killed by SIGKILL"),
    "forks_without_end": ("killed", "it had more than 100 processes and threads"),
    "allocates_without_end": ("error", "MemoryError"),
    "allocates_in_children": ("killed", "its processes used more than 512 MiB"),
    "prints_without_end": ("timeout", "gave no result within"),
    "returns_hundreds_of_megabytes": ("ok", "x" * (1 << 20)),
    "returns_what_is_no_json": ("error", "ValueError: Circular reference"),
    "returns_a_deep_structure": ("error", "RecursionError"),
    "returns_a_hostile_text": ("ok", "text"),
    "returns_an_object_that_pickles_to_code": ("ok", '"pickled"'),
    "returns_half_a_surrogate": ("ok", "a\ufffdb"),
    "returns_an_infinite_reward": ("error", "ValueError: the tool returned the reward inf"),
    "returns_an_endless_reward": ("error", "OverflowError"),
    "closes_its_pipes": ("killed timeout", "closes_its_pipes"),
    "sends_what_is_no_message": ("killed", "sent something that is no message"),
    "sends_an_empty_message": ("killed", "sent a message that nothing asked for"),
    "sends_a_result_that_nothing_asked_for": ("killed", "sent a message that nothing asked for"),
    "sends_a_result_of_another_kind": ("killed", "sent a message that nothing asked for"),
    "sends_a_message_without_end": ("killed", "sent a message of more than 64 MiB"),
    "replaces_its_protocol": ("killed", "sent something that is no message"),
    "exits": ("error", "SystemExit: 3"),
    "returns_in_a_fork_too": ("ok", "honest"),
    "exits_in_a_fork": ("ok", "3"),
    "exits_at_once": ("killed", "ended with exit code 0"),
    "raises_a_keyboard_interrupt": ("error", "KeyboardInterrupt"),
    "raises_a_cancelled_error": ("error", "CancelledError"),
    "raises_the_end_of_an_iterator": ("error", "StopIteration"),
    "raises_a_hostile_error": ("error", "HostileError"),
    "raises_too_deep": ("error", "RecursionError"),
    "hangs_in_c": ("timeout", "gave no result within"),
    "ignores_sigterm": ("timeout", "gave no result within"),
    "stops_itself": ("timeout", "gave no result within"),
}
"""What a tool does → possible outcomes of its call, and a part of the text that the policy reads."""
NEED_THE_SCOPE = {"kills_its_parent", "stops_its_parent", "kills_its_parents_group"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes(tmp_path_factory):
    path = tmp_path_factory.mktemp("tools") / "hostile.py"
    path.write_text(_described(TOOLS))
    limits_s = {name: 0.5 if "timeout" in outcome else 30.0 for name, (outcome, _) in ENDS.items()}
    names = [*ENDS, "neighbour", "starts_a_daemon"]
    processes = AgentProcesses(
        [FunctionTool(str(path), name, limits_s.get(name, 30.0)) for name in names], limits=LIMITS
    )
    yield processes
    await processes.close()


def _described(source: str) -> str:
    """Give each function without a docstring one, which a tool needs."""
    return source.replace("():\n", '():\n    """Do it."""\n')


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ends(processes):
    """All of them at the same time, beside one sample that only counts."""
    tools = {tool.name: tool for tool in await processes.open()}

    async def end_of(name: str) -> CallEnd:
        async with ToolProcess(processes, tools, {}) as process:
            (end,) = await process.call([ParsedCall(name, {})])
            return end

    async with ToolProcess(processes, tools, {}) as neighbour:
        hostile = [name for name in ENDS if abi() >= 6 or name not in NEED_THE_SCOPE]
        running = asyncio.gather(*map(end_of, hostile))
        counted: list[CallEnd] = []
        while not running.done() or not counted:
            counted += await neighbour.call([ParsedCall("neighbour", {})])
            await asyncio.sleep(0.05)
        counted += await neighbour.call([ParsedCall("neighbour", {})])
        return {**dict(zip(hostile, await running, strict=True)), "neighbour": counted}


@pytest.mark.long
@pytest.mark.parametrize("name", ENDS)
async def test_a_hostile_tool_ends_with_a_typed_outcome(ends, name) -> None:
    if name not in ends:
        pytest.skip("this kernel cannot keep signals inside (Linux 6.12)")
    outcomes, text = ENDS[name]
    assert ends[name].outcome in outcomes.split(), ends[name].text[:500]
    assert text in ends[name].text
    assert len(ends[name].text) <= 1 << 20


@pytest.mark.long
async def test_the_sample_beside_them_keeps_its_process_and_its_state(ends) -> None:
    counted = ends["neighbour"]
    assert [(end.outcome, end.text) for end in counted] == [("ok", str(n + 1)) for n in range(len(counted))]


@pytest.mark.long
async def test_a_daemon_ends_with_its_sample(processes) -> None:
    tools = {tool.name: tool for tool in await processes.open()}
    async with ToolProcess(processes, tools, {}) as process:
        (end,) = await process.call([ParsedCall("starts_a_daemon", {})])
        daemon = Path(f"/proc/{int(end.text)}")
        assert daemon.exists()

    async def ended() -> bool:
        return not daemon.exists()

    await until(ended)


@pytest.mark.long
async def test_closing_the_processes_ends_what_running_samples_started(tmp_path) -> None:
    (tmp_path / "daemon.py").write_text(_described(TOOLS))
    processes = AgentProcesses([FunctionTool(str(tmp_path / "daemon.py"), "starts_a_daemon")])
    tools = {tool.name: tool for tool in await processes.open()}
    process = ToolProcess(processes, tools, {})
    (end,) = await process.call([ParsedCall("starts_a_daemon", {})])
    os.kill(int(end.text), 0)
    await processes.close()

    async def ended() -> bool:
        return not Path(f"/proc/{int(end.text)}").exists()

    await until(ended)


async def test_a_print_raises_in_no_locale(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    (tmp_path / "tool.py").write_text(
        'def look_up() -> str:\n    """Look up."""\n    print("数")\n    return "found"\n'
    )
    processes = AgentProcesses([FunctionTool(str(tmp_path / "tool.py"), "look_up")])
    tools = {tool.name: tool for tool in await processes.open()}
    async with ToolProcess(processes, tools, {}) as process:
        (result,) = await process.call([ParsedCall("look_up", {})])
    assert result.text == "found"
    await processes.close()


@pytest.mark.long
async def test_files_of_tools_may_be_large(tmp_path) -> None:
    (tmp_path / "table.py").write_text(f"TEXT = {4_000_000 * 'x'!r}\n")
    tool = 'import table\n\n\ndef look_up() -> str:\n    """Look up."""\n    return str(len(table.TEXT))\n'
    (tmp_path / "tool.py").write_text(tool)
    processes = AgentProcesses([FunctionTool(str(tmp_path / "tool.py"), "look_up")])
    tools = {each.name: each for each in await processes.open()}
    (result,) = await ToolProcess(processes, tools, {}).call([ParsedCall("look_up", {})])
    assert result.text == "4000000"
    await processes.close()


@pytest.mark.long
async def test_a_fork_that_the_kernel_refuses_costs_its_own_sample(tmp_path) -> None:
    (tmp_path / "tool.py").write_text(
        "import errno, os\n"
        "fork, refusals = os.fork, [OSError(errno.EAGAIN, 'no more processes')]\n"
        "os.fork = lambda: fork() if not refusals else (_ for _ in ()).throw(refusals.pop())\n"
        'def look_up() -> str:\n    """Look up."""\n    return str(os.getppid())\n'
    )
    processes = AgentProcesses([FunctionTool(str(tmp_path / "tool.py"), "look_up")])
    tools = {each.name: each for each in await processes.open()}
    results = [(await ToolProcess(processes, tools, {}).call([ParsedCall("look_up", {})]))[0] for _ in range(3)]
    await processes.close()
    assert "did not start: [Errno 11] no more processes" in results[0].text
    assert results[1].text == results[2].text != results[0].text  # one template forked both


@pytest.mark.long
async def test_a_template_that_replaces_another_loads_the_files_as_they_were(tmp_path) -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    tool = 'import parts\n\n\ndef look_up() -> str:\n    """Look up."""\n    return f"{parts.answer} %s"\n'
    (tmp_path / "parts.py").write_text('answer = "first"\n')
    (tmp_path / "tool.py").write_text(tool % "one")
    processes, before = AgentProcesses([FunctionTool(str(tmp_path / "tool.py"), "look_up")]), children()
    tools = {each.name: each for each in await processes.open()}
    (template,) = children() - before
    (tmp_path / "parts.py").write_text('answer = "second"\n')
    (tmp_path / "tool.py").write_text(tool % "two")
    os.kill(int(template), signal.SIGKILL)
    await until(lambda: not Path(f"/proc/{template}").exists())
    (result,) = await ToolProcess(processes, tools, {}).call([ParsedCall("look_up", {})])
    assert result.text == "first one"
    await processes.close()
