"""Environments behind servers: OpenEnv's socket and NeMo Gym's routes over real HTTP, one server and several."""

from __future__ import annotations

import json

import pytest
import pytest_asyncio
from aiohttp import web

import episodes
from episodes import call, served
from plaudit_job.load import load_job
from plaudit_wire.errors import RefusedError
from plaudit_wire.records import AgentReward
from plaudit_workers.agents.messages import EnvironmentServer
from plaudit_workers.agents.processes import AgentProcesses, sources_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM and torch warn when they are imported


@pytest_asyncio.fixture
async def open_agent(tokenizer):
    """Opens the agent of a server."""
    opened: list[AgentProcesses] = []

    async def open_agent(url, arguments=()):
        opened.append(AgentProcesses([EnvironmentServer(url, dict(arguments))]))
        return await episodes.open_agent(opened[-1], tokenizer)

    yield open_agent
    for processes in opened:
        await processes.close()


class OpenEnv:
    """A server with OpenEnv's routes: its board holds a number that ``step`` adds to."""

    def __init__(self) -> None:
        self.sessions = 0
        self.full_for = 0
        self.board = "empty"
        self.resets: list[dict] = []

    async def socket(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.sessions += 1
        value = 0
        async for message in socket:
            request = json.loads(message.data)
            data = request.get("data", {})
            if request["type"] == "reset" and self.sessions <= self.full_for:
                await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
                break
            if request["type"] == "reset":
                self.resets.append(data)
                answer = {"observation": {"board": self.board, "metadata": {}}, "reward": None, "done": False}
            elif "number" not in data:
                await socket.send_json(
                    {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
                )
                continue
            elif data["number"] < 0:
                break
            else:
                value += data["number"]
                answer = {"observation": {"board": str(value)}, "reward": 0.5, "done": value > 5}
            await socket.send_json({"type": "observation", "data": answer})
        await socket.close()
        return socket

    def routes(self):
        action = {"properties": {"number": {"type": "integer"}, "metadata": {}}, "required": ["number"]}

        async def openapi(request):
            tasks = {"/list_environments": {}, "/{env_name}/tasks": {}}  # as OpenEnv 0.10 has
            return web.json_response({"paths": {**tasks, "/schema": {}, "/health": {}}})

        async def schema(request):
            return web.json_response({"action": action, "observation": {}, "state": {}})

        return [web.get("/openapi.json", openapi), web.get("/schema", schema), web.get("/ws", self.socket)]


async def test_an_openenv_server_is_reset_and_stepped_over_its_socket(open_agent, play) -> None:
    server = OpenEnv()
    server.full_for = 1
    async with served(*server.routes()) as url:
        agent = await open_agent(url, arguments={"size": 3})
        parameters = agent.tools["step"].schema["function"]["parameters"]
        assert parameters == {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
        turns = (call("step", number=2), call("step", wrong=1), call("step", number=4), "never asked")
        _, body = await play(agent, *turns)
    assert server.resets == [{"seed": 5, "size": 3}]
    assert body.sample.messages[-1]["content"] == "Play.\n\nempty"
    results = [m["content"] for m in body.sample.completion if m["role"] == "tool"]
    assert results == ["2", "ValueError: Invalid message", "6"]
    assert (body.sample.agent_reward, body.sample.turn_rewards) == (AgentReward("scored", 1.0), [0.5, 0, 0.5])
    assert len(body.generation.turns) == 3  # the environment was done


async def test_an_openenv_server_that_goes_away_ends_the_sample(open_agent, play) -> None:
    async with served(*OpenEnv().routes()) as url:
        _, body = await play(await open_agent(url), call("step", number=-1), "Done.")
    assert body.sample.failure == AgentReward(
        "infra_error", reason="InfrastructureError: the environment closed the connection"
    )


class Gym:
    """A resources server with NeMo Gym's routes: the reward is whether the tool was called in the session."""

    def __init__(self, verify_status: int = 200, **further: object) -> None:
        self.verify_status = verify_status
        self.further = further
        self.called: set[str] = set()
        self.verified: list[dict] = []
        self.seeded: list[dict] = []

    async def seed(self, request):
        self.seeded.append(await request.json())
        response = web.json_response({})
        response.set_cookie("session", "abc")
        return response

    async def weather(self, request):
        self.called.add(request.cookies.get("session"))
        return web.json_response({"weather": "cold in " + (await request.json())["city"]})

    async def verify(self, request):
        body = await request.json()
        self.verified.append(body)
        if self.verify_status != 200:
            return web.json_response({"detail": "broken"}, status=self.verify_status)
        reward = float(request.cookies.get("session") in self.called)
        return web.json_response({**body, "reward": reward, **self.further})

    def routes(self):
        reference = {"$ref": "#/components/schemas/Weather"}
        post = {"summary": "Weather", "requestBody": {"content": {"application/json": {"schema": reference}}}}
        near = {"type": "array", "items": reference}  # a type may hold itself
        properties = {"city": {"type": "string"}, "near": near}
        schemas = {"Weather": {"type": "object", "properties": properties, "required": ["city"]}}
        document = {
            "paths": {path: {"post": post} for path in ("/seed_session", "/close_session", "/verify", "/get_weather")},
            "components": {"schemas": schemas},
        }

        async def openapi(request):
            return web.json_response(document)

        return [
            web.get("/openapi.json", openapi),
            web.post("/seed_session", self.seed),
            web.post("/get_weather", self.weather),
            web.post("/verify", self.verify),
        ]


async def test_a_resources_server_of_nemo_gym_seeds_answers_calls_and_verifies(open_agent, play) -> None:
    server = Gym()
    async with served(*server.routes()) as url:
        agent = await open_agent(url)
        assert list(agent.tools) == ["get_weather"]
        parameters = agent.tools["get_weather"].schema["function"]["parameters"]
        assert parameters["properties"] == {"city": {"type": "string"}, "near": {"type": "array", "items": {}}}
        _, body = await play(agent, call("get_weather", city="Rome"), "Cold.", extra_info={"expected": "cold"})
    assert [m["content"] for m in body.sample.completion if m["role"] == "tool"] == ['{"weather": "cold in Rome"}']
    assert body.sample.agent_reward == AgentReward("scored", 1.0)
    (verified,) = server.verified
    assert (server.seeded[0]["expected"], verified["expected"]) == ("cold", "cold")
    assert [item["type"] for item in verified["response"]["output"]] == [
        "function_call",
        "function_call_output",
        "message",
    ]


@pytest.mark.parametrize(
    ("server", "outcome", "reason"),
    [
        (Gym(422), "data_error", "status 422"),
        (Gym(500), "infra_error", "status 500"),
        (Gym(mask_sample=True, failure_kind="judge_failed"), "infra_error", "masks this sample (judge_failed)"),
    ],
)
async def test_a_verification_that_fails_is_no_zero(open_agent, play, server, outcome, reason) -> None:
    async with served(*server.routes()) as url:
        _, body = await play(await open_agent(url), "Done.")
    reward = body.sample.agent_reward
    assert (reward.outcome, reward.value) == (outcome, None)
    assert reason in reward.reason


SPREAD = [
    ({"replicas": 2}, "spec.environments[1].replicas: 2"),
    ({"replicas": 2, "sessionAffinity": "clientIP"}, ""),
    ({}, ""),
]


@pytest.mark.parametrize(("server", "spread"), SPREAD)
async def test_several_servers_spread_connections_unless_they_keep_their_clients(
    server, spread, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PLAUDIT_ENVIRONMENT_GYM_URL", "http://gym:8000")
    (tmp_path / "gym.py").touch()
    program = {"command": ["python3", "gym.py"]}
    spec = {
        "model": {"source": "none"},
        "data": {"train": {"path": "none.parquet"}},
        "algorithm": {"steps": 1},
        "environments": [{"name": "other", "replicas": 9, **program}, {"name": "gym", **program, **server}],
        "rollout": {"sampling": {"maxTokens": 8}, "agent": {"kind": "environment", "environment": "gym"}},
        "reward": {"scorers": [{"name": "a", "kind": "environment"}]},
        "trainer": {},
    }
    job = {"apiVersion": "plaudit.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "gym"}, "spec": spec}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    (source,) = sources_of(load_job(tmp_path / "job.yaml"))
    assert source.spread == spread


async def test_resources_servers_among_which_a_session_would_be_lost_are_refused() -> None:
    async with served(*Gym().routes()) as url:
        processes = AgentProcesses([EnvironmentServer(url, spread="spec.environments[1].replicas: 2")])
        with pytest.raises(RefusedError, match=r"environments\[1\].replicas: 2: .*Set sessionAffinity: clientIP"):
            await processes.open()
        await processes.close()
    async with served(*OpenEnv().routes()) as url:
        processes = AgentProcesses([EnvironmentServer(url, spread="spec.environments[1].replicas: 2")])
        await processes.open()  # one connection holds the session
        await processes.close()


async def test_a_server_that_is_no_environment_is_refused(open_agent) -> None:
    async with served() as url:
        with pytest.raises(RefusedError, match=f"the environment's server {url} cannot be used: .*404"):
            await open_agent(url)


def nested(width: int, levels: int) -> dict:
    """Return types of which each has ``width`` fields of the next one."""
    fields = [
        {str(at): {"$ref": f"#/components/schemas/T{level + 1}"} for at in range(width)} for level in range(levels)
    ]
    return {f"T{level}": {"properties": each} for level, each in enumerate(fields)}


@pytest.mark.parametrize(
    ("schema", "schemas", "problem"),
    [
        ({"$ref": "#/components/schemas/T0"}, nested(1, 500), "nested more than 64 levels deep"),
        ({"$ref": "#/components/schemas/T0"}, nested(10, 25), "more than 200000 parts"),
        ([1], None, r"tool 'act' has the parameters \[1\]; give a JSON schema"),
    ],
    ids=["deep", "wide", "list"],
)
async def test_a_description_that_no_prompt_can_hold_is_refused(open_agent, schema, schemas, problem) -> None:
    post = {"requestBody": {"content": {"application/json": {"schema": schema}}}}
    paths = {"/seed_session": {}, "/verify": {}, "/act": {"post": post}, "/none": None}

    async def openapi(request):
        return web.json_response({"paths": paths, "components": {"schemas": schemas}})

    async with served(web.get("/openapi.json", openapi)) as url:
        with pytest.raises(RefusedError, match=problem):
            await open_agent(url)


async def test_a_first_observation_that_would_hold_up_the_rollout_ends_its_sample(open_agent, play) -> None:
    server = OpenEnv()
    server.board = "x" * (2 << 20)
    async with served(*server.routes()) as url:
        _, body = await play(await open_agent(url), "Done.")
    assert body.sample.failure.outcome == "data_error"
    assert "an environment may show 1,048,576 at once" in body.sample.failure.reason
