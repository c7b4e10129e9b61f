"""Scores over HTTP, from a real gateway before real workers."""

import asyncio
import json
from typing import Any

import pytest
import redis.asyncio as redis

from plaudit_client import AuthenticationError, InvalidSampleError, RewardClient
from plaudit_workers.service import application
from plaudit_workers.service.build import scoring_version

RIGHT = {"response": "4", "ground_truth": "4"}
GROUP = {"name": "share", "kind": "python", "scope": "group", "python": {"path": "reward.py", "function": "share"}}
TOKEN = "token-of-one-caller"
OTHER = "token-of-another-caller"
SLOW = {"name": "slow", "kind": "python", "python": {"path": "reward.py", "function": "slow"}, "isolation": "thread"}


async def test_a_sample_gets_a_result_and_many_get_theirs_in_order(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        one = (await http.post("/v1/score", json={**RIGHT, "id": "a"})).json()
        assert (one["id"], one["score"], one["outcome"], one["reason"]) == ("a", 1.0, "scored", None)
        assert one["scorers"]["right"]["value"] == 1.0
        assert one["seconds"] > 0
        assert one["version"] == scoring_version(service.job)
        samples = [{"response": str(i % 2), "ground_truth": "1"} for i in range(20)] + [{"response": "broken"}]
        many = (await http.post("/v1/score", json={"samples": samples})).json()["results"]
        assert [each["score"] for each in many] == [float(i % 2) for i in range(20)] + [None]
        assert many[-1]["outcome"] == "data_error"
        assert "on purpose" in many[-1]["reason"]


async def test_results_come_as_lines_when_they_are_there(start_service: Any, start_gateway: Any, tmp_path: Any) -> None:
    async with start_service(SLOW) as service, start_gateway(service) as gateway, gateway.http() as http:
        samples = [
            {"response": "held", "ground_truth": "1", "id": "a"},
            {"response": "", "ground_truth": "2", "id": "b"},
        ]
        accept = {"accept": "application/x-ndjson"}
        async with http.stream("POST", "/v1/score", json={"samples": samples[1:]}, headers=accept) as response:
            assert [json.loads(line)["id"] async for line in response.aiter_lines()] == ["b"]
        async with http.stream("POST", "/v1/score", json={"samples": samples}, headers=accept) as response:
            lines = response.aiter_lines()
            assert json.loads(await anext(lines))["id"] == "b"
            (tmp_path / "let-go").touch()
            assert json.loads(await anext(lines))["id"] == "a"
        for accepts, kind in [
            ("application/json, Application/X-NDJSON;q=0.5", "application/x-ndjson"),
            ("application/x-ndjson;v=1", "application/x-ndjson"),
            ("application/x-ndjson; q=0.0, */*", "application/json"),
            ("application/x-ndjsonp", "application/json"),
        ]:
            answer = await http.post("/v1/score", json={"response": "2"}, headers={"accept": accepts})
            assert answer.headers["content-type"] == kind, accepts


async def test_an_id_stands_for_one_sample(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        first = (await http.post("/v1/score", json={**RIGHT, "id": "a"})).json()
        assert (await http.post("/v1/score", json={**RIGHT, "id": "a"})).json() == first
        assert (await http.get("/v1/scores/a")).json() == first
        other = await http.post("/v1/score", json={"samples": [{**RIGHT, "id": "b"}, {"response": "5", "id": "a"}]})
        assert other.status_code == 409
        assert set(other.json()["error"]["samples"]) == {"1"}
        assert (await http.get("/v1/scores/c")).status_code == 404
        async with gateway.client() as client:
            with pytest.raises(InvalidSampleError, match="Give each sample an id of its own"):
                await client.score({"response": "5", "id": "a"})


async def test_callers_do_not_see_each_others_ids(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service() as service,
        start_gateway(service) as gateway,
        gateway.http() as one,
        gateway.http("token-of-another-caller") as other,
    ):
        await one.post("/v1/score", json={**RIGHT, "id": "a"})
        assert (await other.get("/v1/scores/a")).status_code == 404
        assert (await other.post("/v1/score", json={"response": "5", "id": "a"})).json()["score"] == 0.0


async def test_a_score_waits_for_a_caller_that_has_left(start_service: Any, start_gateway: Any, tmp_path: Any) -> None:
    async with start_service(SLOW) as service, start_gateway(service) as gateway, gateway.http() as http:
        held = asyncio.create_task(http.post("/v1/score", json={"response": "held", "ground_truth": "3", "id": "a"}))
        while (await http.get("/v1/scores/a")).status_code != 202:
            await asyncio.sleep(0.01)
        held.cancel()
        (tmp_path / "let-go").touch()
        assert (await http.get("/v1/scores/a?wait=20")).json()["score"] == 3.0


async def test_a_request_ends_after_its_timeout_and_the_score_waits(start_service: Any, start_gateway: Any) -> None:
    async with start_service(workers=0) as service, start_gateway(service) as gateway, gateway.http() as http:
        answer = await http.post("/v1/score?timeout=0.1", json={**RIGHT, "id": "a"})
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "not_scored_yet")
        async with service.worker():
            assert (await http.get("/v1/scores/a?wait=20")).json()["score"] == 1.0


async def test_groups_are_scored_together(start_service: Any, start_gateway: Any) -> None:
    async with start_service(GROUP) as service, start_gateway(service) as gateway, gateway.client() as client:
        groups = await asyncio.gather(*(client.score_group([{"response": "a"}, {"response": "abc"}]) for _ in range(5)))
        assert [[each.score for each in group] for group in groups] == [[0.25, 0.75]] * 5
        async with gateway.http() as http:
            answer = await http.post("/v1/groups", json={"id": "g", "samples": [{"response": "a"}, {"response": "a"}]})
            assert [each["score"] for each in answer.json()["results"]] == [0.5, 0.5]
            assert (await http.get("/v1/scores/g")).json() == answer.json()


async def test_candidates_of_an_open_reward_session_are_scored_together(start_service: Any, start_gateway: Any) -> None:
    def group(*blocks: dict[str, str]) -> dict[str, Any]:
        thought = {"type": "reasoning", "text": "hm"}
        turns = [{"role": "assistant", "blocks": [thought, block]} for block in blocks]
        return {"candidates": [{"messages": [turn], "metadata": {"n": 1}} for turn in turns]}

    def text(content: str) -> dict[str, str]:
        return {"type": "text", "text": content}

    both = group(text("a"), text("abc"))
    async with (
        start_service(GROUP) as service,
        start_gateway(service) as one,
        start_gateway(service) as two,
        one.http() as http,
        two.http() as other,
    ):
        http.headers = {"x-api-key": TOKEN}
        name = (await http.post("/create_session")).text.split()[3]
        http.headers["x-session-id"] = other.headers["x-session-id"] = name
        assert (await http.post("/score_group", json=both)).status_code == 410
        task = {"task_spec": {"prompt": "p", "ground_truth": "a"}}
        assert (await http.post("/create", json=task)).json() == {"sid": name}
        assert (await http.get(f"/{service.job.metadata.name}/task_tools")).json()["supports_score_group"] is True

        events = events_of(await http.post("/score_group", json=both))
        assert [(each["reward"], each["metadata"]["scorers"]) for each in json.loads(events["chunk"])["scores"]] == [
            (0.25, {"share": 0.25}),
            (0.75, {"share": 0.75}),
        ]
        # A client resumes a broken stream by the id, at any gateway; the session is the caller's own.
        resumed = events_of(await other.post("/score_group", json={**both, "task_id": events["task_id"]}))
        assert resumed == events
        stranger = {"authorization": f"Bearer {OTHER}"}
        assert (await other.post("/ping", headers=stranger)).status_code == 410

        failed = events_of(await http.post("/score_group", json=group(text(""), text(""))))
        assert failed["error"].startswith("no score: candidates[0]: data_error: ")
        image = await http.post("/score_group", json=group({"type": "image", "data": "aGk=", "mimeType": "image/png"}))
        assert image.status_code == 422
        assert "candidates[0].messages: a block is" in image.json()["error"]["message"]
        assert (await http.post("/score_group", json={"candidates": []})).status_code == 422
        split = await http.post("/create", json={"split": "train", "index": 0})
        assert "task_spec: give the task's data row" in split.json()["error"]["message"]
        large = await http.post("/create", json={"task_spec": {"prompt": "p" * (1 << 20)}})
        assert large.status_code == 413
        await http.post("/delete")
        assert (await http.post("/ping")).status_code == 410


async def test_sessions_of_one_token_fill_their_own_room(
    start_service: Any, start_gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "_MOST_BYTES_OF_TOKEN", 3 << 20)
    task = {"task_spec": {"prompt": "p" * 1_000_000}}
    async with start_service(GROUP, workers=0) as service, start_gateway(service) as gateway, gateway.http() as http:

        async def create(session: str, **headers: str) -> int:
            http.headers["x-session-id"] = session
            return (await http.post("/create", json=task, headers=headers)).status_code

        assert [await create(session) for session in ("a", "b", "b", "c", "d")] == [200, 200, 200, 200, 429]
        assert await create("d", **{"plaudit-caller": "another-run"}) == 429
        assert await create("d", authorization=f"Bearer {OTHER}") == 200
        await http.post("/delete", headers={"x-session-id": "a"})
        assert [await create(session) for session in ("d", "e")] == [200, 429]
        # Sessions that have lapsed make room.
        async with redis.Redis.from_url(service.server.url, password=service.server.password) as commands:
            for key in [key async for key in commands.scan_iter("*:task:b")]:
                await commands.delete(key)
        assert await create("e") == 200


def events_of(response: Any) -> dict[str, str]:
    """Return the data of a stream's events by their kinds."""
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    return {kind.removeprefix("event: "): data.removeprefix("data: ") for kind, data in events}


async def test_a_thousand_callers_at_once_get_their_own(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.client() as client:
        samples = [{"response": str(i), "ground_truth": str(i - i % 2)} for i in range(1000)]
        results = await asyncio.gather(*map(client.score, samples))
        assert [each.score for each in results] == [1.0, 0.0] * 500


async def test_more_than_the_room_of_a_caller_waits_its_turn(start_service: Any, start_gateway: Any) -> None:
    async with (
        start_service(workers=0) as service,
        start_gateway(service, room=4) as gateway,
        gateway.client() as client,
        gateway.http() as http,
    ):
        scoring = asyncio.gather(*(client.score({**RIGHT, "id": f"n{i}"}) for i in range(20)))
        while (await http.get("/v1/service")).json()["health"]["awaited"] < 20:
            await asyncio.sleep(0.01)
        async with service.worker():
            assert [each.score for each in await scoring] == [1.0] * 20


@pytest.mark.parametrize(
    ("content", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"[]", 422, "Expected `object`, got `array`"),
        (b'{"ground_truth": "4"}', 422, "Object missing required field `response`"),
        (
            b'{"samples": [{"response": "a"}, {"response": 5}]}',
            422,
            "samples[1]: response is 5: Expected `str`, got `int`",
        ),
        (b'{"response": "a", "answer": "b"}', 422, "unknown field `answer`"),
        (b'{"response": "a", "id": "a b"}', 422, "id 'a b': give at most 200 characters without spaces"),
    ],
)
async def test_a_bad_body_is_refused_with_the_field(
    start_service: Any, start_gateway: Any, content: bytes, status: int, message: str
) -> None:
    async with start_service(workers=0) as service, start_gateway(service) as gateway, gateway.http() as http:
        answer = await http.post("/v1/score", content=content)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]


async def test_null_and_verls_columns_are_read_as_everywhere(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        row = {"response": "4", "prompt": None, "reward_model": {"ground_truth": "4", "style": "rule"}, "id": None}
        assert (await http.post("/v1/score", json=row)).json()["score"] == 1.0


async def test_compressed_and_oversized_bodies_are_refused(start_service: Any, start_gateway: Any) -> None:
    async with start_service(workers=0) as service, start_gateway(service) as gateway, gateway.http() as http:
        compressed = await http.post("/v1/score", content=b"x", headers={"content-encoding": "gzip"})
        assert compressed.status_code == 415
        large = await http.post("/v1/score", content=b'"' + b"x" * (65 << 20))
        assert large.status_code == 413


async def test_only_a_known_token_is_served(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway:
        async with RewardClient(gateway.url, "wrong") as client:
            with pytest.raises(AuthenticationError, match="give the service's token"):
                await client.score(RIGHT)
            with pytest.raises(AuthenticationError):
                await client.service()
        async with gateway.http() as http:
            for path in ("/v1/score", "/slime", "/openrlhf", "/verify"):
                assert (await http.post(path, json=RIGHT, headers={"authorization": "Bearer x"})).status_code == 401


async def test_a_token_in_the_url_is_one_too(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        url = gateway.url.replace("http://", "http://any:token-of-one-caller@")
        answer = await http.post(f"{url}/v1/score", json=RIGHT)
        assert answer.json()["score"] == 1.0


async def test_the_service_describes_itself(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.client() as client:
        await client.score(RIGHT)
        described = await client.service()
        assert described["scorers"] == [{"name": "right", "kind": "python", "scope": "sample", "weight": 1.0}]
        assert described["health"]["workers_ready"] == 1
        async with gateway.http() as http:
            document = (await http.get("/openapi.json")).json()
            assert {"/v1/score", "/v1/groups", "/v1/scores/{id}", "/v1/service"} == set(document["paths"])
            metrics = (await http.get("/metrics")).text
            assert 'plaudit_gateway_samples_total{caller="one",outcome="scored"} 1.0' in metrics
            assert 'plaudit_gateway_requests_total{caller="one",path="/v1/score",status="200"} 1.0' in metrics


async def test_the_shapes_of_other_trainers(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        slime = await http.post("/slime", json={"prompt": "2+2", "response": "4", "label": "4"})
        assert slime.json() == 1.0
        assert (await http.post("/slime", json={"prompt": "", "response": "broken", "label": "4"})).json() is None
        query = {"query": ["2+2=4", "2+2=5"], "prompts": ["2+2=", "2+2="], "labels": ["4", "4"]}
        openrlhf = (await http.post("/openrlhf", json=query)).json()
        assert openrlhf == {"rewards": [1.0, 0.0], "scores": [1.0, 0.0], "extra_logs": {"right": [1.0, 0.0]}}
        body = {
            "responses_create_params": {"input": [{"role": "user", "content": "2+2"}]},
            "response": {
                "id": "r",
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]},
                ],
            },
            "expected_answer": "4",
        }
        assert (await http.post("/verify", json=body)).json() == {**body, "reward": 1.0}
        body["response"]["output"][1]["content"][0]["text"] = "broken"
        failed = await http.post("/verify", json=body)
        assert (failed.status_code, failed.json()["error"]["type"]) == (502, "no_score")
        assert (await http.post("/openrlhf", json={"query": "x"})).status_code == 422


async def test_runs_that_share_a_token_have_ids_of_their_own(start_service: Any, start_gateway: Any) -> None:
    async with start_service() as service, start_gateway(service) as gateway, gateway.http() as http:
        for run, response in (("run-a", "4"), ("run-b", "5")):
            body = {"id": "same", "response": response, "ground_truth": "4"}
            answer = await http.post("/v1/score", json=body, headers={"plaudit-caller": run})
            assert answer.json()["score"] == float(response == "4")
        assert (await http.get("/v1/scores/same")).status_code == 404
        refused = await http.post("/v1/score", json=RIGHT, headers={"plaudit-caller": "a b"})
        assert refused.status_code == 422
        assert "plaudit-caller: 'a b' is not a name" in refused.json()["error"]["message"]


async def test_a_caller_with_a_long_queue_does_not_delay_another(start_service: Any, start_gateway: Any) -> None:
    async with start_service(SLOW, slots=4) as service, start_gateway(service) as gateway, gateway.http() as http:
        flood = {"samples": [{"response": "a", "ground_truth": str(i)} for i in range(200)]}
        flooding = asyncio.create_task(http.post("/v1/score", json=flood, headers={"plaudit-caller": "flood"}))
        while not (await http.get("/v1/service")).json()["health"]["awaited"]:
            await asyncio.sleep(0.01)
        one = await http.post("/v1/score", json={"response": "b", "ground_truth": "1"})
        assert one.json()["score"] == 1.0
        assert not flooding.done()
        flooding.cancel()
