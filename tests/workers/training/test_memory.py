"""What a forward pass keeps for the backward pass, in bytes a token, for the sizes of Qwen2.5-7B."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from saved_bytes import QWEN_7B, saved_bytes


@pytest.mark.timeout(120)
def test_checkpointing_and_the_chunked_head_keep_a_twentieth():
    before, _ = saved_bytes("none", 64)
    after, largest = saved_bytes("layers", 2048)
    assert before > 6.0e6
    assert after < 0.35e6
    assert largest < 2048 * QWEN_7B.vocab_size  # no logits: those of the row would take twice these bytes and more


@pytest.fixture
def two_ranks() -> Iterator[dist.ProcessGroup]:
    """Torch's group without other processes: tensors on the meta device have no content to exchange."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("checkpointing", "num_tokens"), [("none", 64), ("layers", 2048)])
def test_two_ranks_that_compute_a_row_together_keep_half_each(checkpointing, num_tokens, two_ranks):
    alone, _ = saved_bytes(checkpointing, num_tokens)
    together, _ = saved_bytes(checkpointing, num_tokens, two_ranks)
    assert together == pytest.approx(alone / 2, rel=0.02)
