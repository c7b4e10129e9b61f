"""What a forward pass keeps for the backward pass, in bytes a token, for the sizes of Qwen2.5-7B."""

import pytest

from saved_bytes import QWEN_7B, saved_bytes


@pytest.mark.timeout(120)
def test_checkpointing_and_the_chunked_head_keep_a_twentieth():
    before, _ = saved_bytes("none", 64)
    after, largest = saved_bytes("layers", 2048)
    assert before > 6.0e6
    assert after < 0.35e6
    assert largest < 2048 * QWEN_7B.vocab_size  # no logits: those of the row would take twice these bytes and more
