"""Servers of the Open Reward Standard, without its package: of another language, of an older version, and broken ones.

The package's own server is played in tests/e2e_trainers.
"""

from __future__ import annotations

import asyncio
import json

import pytest
import pytest_asyncio
from aiohttp import web

import episodes
from episodes import served
from plaudit_job.load import load_job
from plaudit_job.problem import JobError
from plaudit_wire.errors import ConfigurationError, RefusedError
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.messages import EnvironmentServer
from plaudit_workers.agents.open_reward import write_tasks
from plaudit_workers.agents.processes import AgentProcesses
from plaudit_workers.data_files import checked_rows
from plaudit_workers.launch.data_checks import check_data

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM and torch warn when they are imported

TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"number": {}}}}


class Sums:
    """A server that adds numbers; it has no ``/openapi.json`` and no conversations.

    Args:
        numbers_tasks: it has the routes for many tasks.
    """

    def __init__(self, *, numbers_tasks: bool = False) -> None:
        self.numbers_tasks = numbers_tasks
        self.created: list[dict] = []
        self.deleted: list[str] = []
        self.starting = 1
        self.session = ""
        self.results: dict[str, str] = {}
        self.tasks = [{"goal": goal} for goal in range(2500)]

    async def create_session(self, request):
        return web.json_response({"sid": self.session or f"session-{len(self.created)}"})

    async def create(self, request):
        self.created.append({**await request.json(), "sid": request.headers["X-Session-ID"]})
        return web.json_response({})

    async def delete(self, request):
        self.deleted.append(request.headers["X-Session-ID"])
        return web.json_response({})

    async def prompt(self, request):
        self.starting -= 1
        if self.starting >= 0:
            return web.json_response({"detail": "starting"}, status=503)
        return web.json_response([{"type": "text", "text": "Add up to 3."}])

    async def call(self, request):
        body = await request.json()
        if self.session == "elsewhere":
            return web.Response(status=307, headers={"Location": "http://127.0.0.2:1/taken"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if "task_id" not in body:
            self.results["t"] = json.dumps(answer(body["input"]))
            await response.write(b": ping\r\n\r\nevent: task_id\r\ndata: t\r\n\r\n")
            request.transport.close()  # the client comes back for the result
            return response
        result = self.results[body["task_id"]]
        size = 7 if len(result) < 1000 else 1 << 20
        for place in range(0, len(result), size):
            event = "end" if place + size >= len(result) else "chunk"
            await response.write(f"event: {event}\ndata: {result[place : place + size]}\n\n".encode())
        return response

    async def listed(self, request):
        return web.json_response({"tasks": self.tasks})

    async def ranged(self, request):
        body = await request.json()
        return web.json_response({"tasks": self.tasks[body["start"] : body["stop"]]})

    def routes(self):
        def plain(path, content):
            async def get(request):
                return web.json_response(content)

            return web.get(path, get)

        async def number(request):
            return web.json_response({"num_tasks": len(self.tasks)})

        many = [web.post("/sums/num_tasks", number), web.post("/sums/task_range", self.ranged)]
        return [
            plain("/list_environments", ["sums"]),
            plain("/sums/tools", {"tools": [TOOL]}),
            plain("/sums/splits", ["train", "test"]),
            web.post("/create_session", self.create_session),
            web.post("/create", self.create),
            web.post("/delete", self.delete),
            web.get("/sums/prompt", self.prompt),
            web.post("/sums/call", self.call),
            web.post("/sums/tasks", self.listed),
            *(many if self.numbers_tasks else []),
        ]


def answer(arguments: dict) -> dict:
    """Return what the tool answers."""
    number = arguments.get("number")
    if number == "other":
        return {"ok": False, "error": "no number", "reason": "input_validation"}
    if number == "broken":
        return {"ok": True, "output": {"blocks": [{"type": "video"}], "reward": "much"}}
    if number == "endless":
        return {"ok": True, "output": {"blocks": [{"type": "text", "text": "x" * (5 << 20)}]}}
    image = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
    blocks = [{"type": "text", "text": f" got {number} "}, image]
    return {"ok": True, "output": {"blocks": blocks, "reward": number, "finished": number == 3}}


@pytest_asyncio.fixture
async def play(tokenizer):
    """Opens the agent of a server and plays one sample."""
    opened = []

    async def play(url, *turns, row, arguments=(), **changes):
        opened.append(AgentProcesses([EnvironmentServer(url, dict(arguments), 10.0)]))
        agent = await episodes.open_agent(opened[-1], tokenizer)
        return (await episodes.play(agent, tokenizer, *turns, extra_info=row, **changes))[1]

    yield play
    for processes in opened:
        await processes.close()


def call(number: object) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps({"number": number})}}}\n</tool_call>'


async def test_an_episode_survives_broken_connections_and_odd_answers(play) -> None:
    server = Sums()
    async with served(*server.routes()) as url:
        turns = (call(0.5), call("other"), call(3), "never asked")
        body = await play(url, *turns, row={"task_spec": {"goal": 3}})
    assert body.sample.messages[-2:] == [
        {"role": "user", "content": "Play."},  # the row's own
        {"role": "user", "content": "Add up to 3."},
    ]
    results = [message["content"] for message in body.sample.completion if message["role"] == "tool"]
    assert results[0] == " got 0.5 \n[image/png, 3 bytes]"
    assert results[1] == "ValueError: no number"
    assert (body.sample.agent_reward, body.sample.turn_rewards) == (AgentReward("scored", 3.5), [0.5, 0, 3.0])
    (played,) = (made for made in server.created if "task_spec" in made)
    assert (played["task_spec"], played["env_name"]) == ({"goal": 3}, "sums")
    assert played["sid"] in server.deleted


ENDING = [
    ("endless", "", "infra_error", "the response is longer than 4194304 bytes"),
    ("broken", "", "infra_error", "sent the reward 'much', which is not a finite number"),
    (0.5, "a\r\nX-Secrets: b", "data_error", "which no HTTP header can carry"),
    (0.5, "elsewhere", "infra_error", "redirects to 'http://127.0.0.2:1/taken', which is another server"),
]


@pytest.mark.parametrize(("number", "session", "outcome", "reason"), ENDING, ids=lambda value: str(value)[:9])
async def test_an_answer_that_cannot_be_used_ends_its_sample(play, number, session, outcome, reason) -> None:
    server = Sums()
    server.session = session
    async with served(*server.routes()) as url:
        body = await play(url, call(number), "Done.", row={"task_spec": {}}, arguments={"secrets": {"key": "secret"}})
    assert body.sample.failure.outcome == outcome
    assert reason in body.sample.failure.reason


@pytest.mark.parametrize("role", [5, None, "", ["user"], {"a": 1}])
async def test_a_message_without_a_role_ends_its_sample_by_name(play, role) -> None:
    async def messages(_: web.Request) -> web.Response:
        return web.json_response([{"role": role, "blocks": [{"type": "text", "text": "Add."}]}])

    async with served(web.get("/sums/messages", messages), *Sums().routes()) as url:
        body = await play(url, "Done.", row={"task_spec": {}})
    assert body.sample.failure.outcome == "data_error"
    assert f"the environment's messages[1].role is {role!r}; give a text such as user" in body.sample.failure.reason


async def test_a_row_without_a_task_is_data_that_cannot_be_played(play) -> None:
    async with served(*Sums().routes()) as url:
        body = await play(url, "Done.", row={"split": "train"})
    assert body.sample.failure.outcome == "data_error"
    assert "give extra_info.task_spec, or split and task_index" in body.sample.failure.reason


async def test_an_unknown_environment_of_a_server_is_refused(play) -> None:
    async with served(*Sums().routes()) as url:
        with pytest.raises(RefusedError, match=r"arguments\.env_name is 'other'; the server has sums"):
            await play(url, row={}, arguments={"env_name": "other"})


@pytest.mark.parametrize("numbers_tasks", [False, True])
async def test_tasks_become_rows(numbers_tasks, tmp_path) -> None:
    server = Sums(numbers_tasks=numbers_tasks)
    async with served(*server.routes()) as url:
        await asyncio.to_thread(write_tasks, EnvironmentServer(url), "train", tmp_path / "rows.jsonl")
    rows = [row.row.extra_info for row in checked_rows(tmp_path / "rows.jsonl")]
    assert [row["task_spec"] for row in rows] == server.tasks
    assert rows[7] == {"split": "train", "task_index": 7, "task_spec": {"goal": 7}}


async def test_the_tasks_of_a_job_are_checked_before_it_runs(tmp_path) -> None:
    async with served(*Sums().routes()) as url:
        report = await asyncio.to_thread(check_data, load_job(job_file(tmp_path, url, "train")), renders=False)
        assert report.problems == []
        assert report.facts is not None
        assert [file.rows for file in report.facts.files] == [2500]
        report = await asyncio.to_thread(check_data, load_job(job_file(tmp_path, url, "trian")), renders=False)
    (problem,) = report.problems
    assert problem.field == "spec.data.train.split"
    assert "has no split 'trian'; it has train, test" in problem.message


def test_a_split_needs_a_server_that_has_it(tmp_path) -> None:
    with pytest.raises(JobError, match="has no environment server"):
        load_job(job_file(tmp_path, "", "train"))


async def test_a_server_without_tasks_is_named(tmp_path) -> None:
    async with served(web.get("/list_environments", lambda request: web.json_response(["a"]))) as url:
        with pytest.raises(ConfigurationError, match=r"does not give its tasks: .*/a/splits responded with status 404"):
            await asyncio.to_thread(write_tasks, EnvironmentServer(url), "train", tmp_path / "rows.jsonl")


def job_file(folder, url: str, split: str):
    agent = {"kind": "environment", "url": url} if url else {}
    spec = {
        "model": {"source": "none"},
        "data": {"train": {"split": split}},
        "algorithm": {"steps": 1},
        "rollout": {"sampling": {"maxTokens": 8}, "agent": agent},
        "reward": {"scorers": [{"name": "a", "kind": "environment" if url else "rule"}]},
        "trainer": {},
    }
    job = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "sums"}, "spec": spec}
    (folder / "job.yaml").write_text(json.dumps(job))
    return folder / "job.yaml"
