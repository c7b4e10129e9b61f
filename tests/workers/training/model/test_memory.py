"""What a forward pass keeps for the backward pass; with offload, the inputs of layers leave the device in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from plaudit_reward.attention import PACKED_ATTENTION, PackedLayout
from plaudit_workers.training.model.head import forward_logits
from plaudit_workers.training.model.memory import checkpoint_layers
from saved_bytes import QWEN_7B, saved_bytes

LENGTHS = [9, 8, 5]
TOKENS = sum(LENGTHS)


class Copies(TorchDispatchMode):
    """Counts the bytes of copies into new tensors, as the offload makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if operation is torch.ops.aten.copy_.default:
            self.num_bytes.append(arguments[1].nbytes)
        return operation(*arguments, **(options or {}))


@contextmanager
def kept_on_device() -> Iterator[list[int]]:
    """Count the bytes of tensors that operations save on the device themselves."""
    found: list[int] = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        found.append(0 if isinstance(tensor, torch.nn.Parameter) else tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield found


def model_of(folder: object, device: str, *, offload: bool) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=PACKED_ATTENTION)
    checkpoint_layers(model, "layers", torch.device(device), offload=offload)
    return model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    ids = torch.arange(TOKENS)[None] % 16
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return forward_logits(model, ids, positions, PackedLayout.of(LENGTHS), torch.arange(TOKENS))


@pytest.mark.parametrize(("device", "copied"), [("cuda", 2), ("cpu", 0)])
def test_only_the_inputs_of_layers_are_copied_to_the_host(model_folder, device, copied):
    model = model_of(model_folder, device, offload=True)
    input_bytes = TOKENS * model.config.hidden_size * 4
    with Copies() as offloaded:
        logits_of(model)
    assert [each for each in offloaded.num_bytes if each >= input_bytes] == [input_bytes] * copied
    assert sum(offloaded.num_bytes) < (copied + 0.1) * input_bytes + 1


def test_layers_keep_nothing_on_the_device(model_folder):
    kept = {}
    for offload in (False, True):
        with kept_on_device() as num_bytes:
            logits_of(model_of(model_folder, "cuda", offload=offload))
        kept[offload] = sum(num_bytes)
    input_bytes = TOKENS * 32 * 4
    assert kept[False] - kept[True] == 2 * input_bytes


def test_gradients_are_the_same_bit_by_bit(model_folder):
    gradients = []
    for offload in (False, True):
        model = model_of(model_folder, "cuda", offload=offload)
        logits_of(model).log_softmax(-1)[:, 3].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], atol=0, rtol=0)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("checkpointing", "num_tokens"), [("none", 64), ("layers", 2048)])
def test_two_ranks_that_compute_a_row_together_keep_half_each(checkpointing, num_tokens, two_ranks):
    alone, _ = saved_bytes(checkpointing, num_tokens)
    together, _ = saved_bytes(checkpointing, num_tokens, two_ranks)
    assert together == pytest.approx(alone / 2, rel=0.02)
