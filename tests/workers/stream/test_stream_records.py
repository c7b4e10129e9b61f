from __future__ import annotations

import pytest

from builders import make_body, make_prompt
from plaudit_wire.messages import Prompt, RecordError, decode, decode_body, encode, encode_body


def test_a_record_comes_back_as_it_was() -> None:
    prompt = make_prompt(ground_truth={"answer": [1, 2]}, extra_info={"index": 3})
    assert encode(prompt)[0] == 1
    assert decode(encode(prompt), Prompt) == prompt
    body = make_body(prompt, 1)
    encoded = encode_body(body)
    assert decode_body(encoded.tensors, encoded.sample, encoded.generation) == body


def test_the_digest_changes_with_tensors_and_text_and_with_nothing_else() -> None:
    prompt = make_prompt()
    digest = encode_body(make_body(prompt, 0)).digest
    assert encode_body(make_body(prompt, 0)).digest == digest
    assert encode_body(make_body(prompt, 0, tokens=(1, 2, 4))).digest != digest
    assert encode_body(make_body(prompt, 0, text="13")).digest != digest


@pytest.mark.parametrize(
    ("data", "says"), [(b"", "an empty Prompt"), (b"\x02\x80", "02"), (b"\x01\xc1", "damaged Prompt")]
)
def test_an_unreadable_record_raises_with_its_reason(data: bytes, says: str) -> None:
    with pytest.raises(RecordError, match=says):
        decode(data, Prompt)
