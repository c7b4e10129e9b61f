"""The doors of values: what a caller, a function or a judge gives is a result, or its sample's named failure."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faulty_server import Reply, completion
from fuzzed_house import House
from outside_values import BODIES, VALUES, with_member

quietly = settings(suppress_health_check=list(HealthCheck))
SCALARS = ["1", "True", "None", "10**400", "float('nan')", "float('inf')", "-0.0", "1j", "''", "'\\ud800'", "b'x'"]
OBJECTS = ["object()", "lambda: 1", "{1: 2}.keys()", "range(10**9)", "type", "__import__('decimal').Decimal('sNaN')"]
CONTAINERS = ["{{'score': {}}}", "{{'score': 1, 'n': {}}}", "[{}]", "({}, 1)", "{{{}: 1}}", "[[[{}]]] * 3"]
NESTED = "(lambda f: f(f, 200))(lambda f, n: [f(f, n - 1)] if n else 1)"
RAISED = ["1 / 0", "__import__('sys').exit(3)", "exec('raise KeyboardInterrupt')", "[].pop()", "int('x' * 9)"]
RETURNED = st.recursive(
    st.sampled_from([*SCALARS, *OBJECTS, NESTED, *RAISED]),
    lambda inner: st.builds(str.format, st.sampled_from(CONTAINERS), inner),
    max_leaves=3,
)
JUDGED = st.builds(
    Reply,
    status=st.sampled_from([200, 200, 200, 204, 302, 400, 404, 418, 500]),
    body=BODIES
    | with_member(completion()).map(lambda value: json.dumps(value).encode())
    | VALUES.map(lambda value: json.dumps(completion(value)).encode()),
    cut=st.sampled_from(["", "", "before", "middle"]),
)
OUTCOMES = {"scored", "data_error", "infra_error", "timeout", "skipped"}


@quietly
@given(VALUES, VALUES)
def test_a_sample_is_kept_as_it_was_accepted_or_refused(house: House, truth: object, extra: object) -> None:
    with house.holding(), house.http() as http:
        body = {"response": "4", "ground_truth": truth, "data_source": "plain", "extra_info": {"value": extra}}
        answer = http.post("/v1/score", content=json.dumps(body))
        if answer.status_code == 200:
            result = answer.json()
            assert result["outcome"] == "scored"
            assert http.get(f"/v1/scores/{result['id']}").json() == result
        else:
            assert answer.status_code in {400, 413, 422}, answer.text
            assert answer.json()["error"]["message"]


@quietly
@given(RETURNED)
def test_what_a_function_returns_is_a_score_or_its_samples_failure(house: House, expression: str) -> None:
    with house.holding():
        answer = house.score(response="4", ground_truth=expression, data_source="evaluated")
        assert answer.status_code == 200, (expression, answer.text)
        result = answer.json()
        assert result["outcome"] in OUTCOMES
        assert (result["score"] is None) == (result["outcome"] != "scored")
        assert result["reason"] or result["outcome"] == "scored"


@settings(quietly, max_examples=max(2, settings().max_examples // 5))  # each may last until its time limit
@given(st.binary(min_size=1, max_size=40) | st.sampled_from([b"\0" * 4, b"\xff" * 8, b"\0\0\0\1\xc0"]))
def test_frames_that_no_child_would_send_cost_the_sample_that_wrote_them(house: House, frame: bytes) -> None:
    with house.holding():
        answer = house.score(response="4", ground_truth=frame.hex(), data_source="scribbled")
        assert answer.status_code == 200, answer.text
        assert answer.json()["outcome"] in {*OUTCOMES, "poison"}


@quietly
@given(JUDGED)
def test_what_a_judge_answers_is_a_score_or_its_samples_failure(house: House, reply: Reply) -> None:
    with house.holding():
        house.judge.reply = reply
        answer = house.score(response="judged", ground_truth="judged", data_source="plain")
        assert answer.status_code == 200, answer.text
        assert answer.json()["outcome"] in OUTCOMES
