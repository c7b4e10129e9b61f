"""The two sides of a protocol read what the other writes: a sample as its request, a result as its answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plaudit_reward.endpoint.shapes import GATEWAY_SHAPES, SHAPES, EndpointShape, GatewayResult, GatewayShape
from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
SIDES: dict[str, tuple[EndpointShape, GatewayShape]] = {
    "slime": (SHAPES["slime"], GATEWAY_SHAPES["/slime"]),
    "openrlhf": (SHAPES["openrlhf"], GATEWAY_SHAPES["/openrlhf"]),
    "nemo-gym": (SHAPES["nemo-gym"], GATEWAY_SHAPES["/verify"]),
}


def sent(value: Any) -> Any:
    """Return what arrives of a value that travels as JSON."""
    return msgspec.json.decode(msgspec.json.encode(value))


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    truth, prompt = draw(TEXTS), draw(TEXTS)
    messages = [{"role": "user", "content": prompt}]
    return Sample("g-0-1.0", 1, "", prompt, draw(TEXTS), truth, {"expected_answer": truth}, messages=messages)


def read_back(protocol: str, sample: Sample) -> dict[str, Any]:
    client, gateway = SIDES[protocol]
    (row,) = gateway.rows(sent(client.body(sample)))
    return row


@pytest.mark.parametrize("protocol", SIDES)
@given(sample=samples())
def test_a_gateway_reads_the_sample_that_a_client_wrote(protocol: str, sample: Sample) -> None:
    row = read_back(protocol, sample)
    assert row["response"] == sample.response
    assert row["ground_truth"] == sample.ground_truth
    assert row["prompt"] == (sample.prompt if protocol == "openrlhf" else sample.messages)


@pytest.mark.parametrize("protocol", SIDES)
@given(sample=samples(), value=NUMBERS, of_scorer=NUMBERS)
def test_a_client_reads_the_score_that_a_gateway_wrote(
    protocol: str, sample: Sample, value: float, of_scorer: float
) -> None:
    client, gateway = SIDES[protocol]
    body = sent(client.body(sample))
    answer = gateway.answer(body, [GatewayResult(value, values={"exact": of_scorer})])
    score = client.score(sent(answer))
    assert (score.outcome, score.value) == ("scored", value)
    if protocol == "openrlhf":
        assert score.extra == {"exact": of_scorer}


@pytest.mark.parametrize("protocol", SIDES)
@given(sample=samples())
def test_a_missing_score_never_becomes_a_number(protocol: str, sample: Sample) -> None:
    client, gateway = SIDES[protocol]
    with pytest.raises((DataError, ValueError)):
        client.score(sent(gateway.answer(sent(client.body(sample)), [GatewayResult(None, "data_error", "no answer")])))
