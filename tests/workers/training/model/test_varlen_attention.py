"""The flash kernel for variable lengths, as far as a machine without a GPU can check it.

The choice is pure. The call is checked on fake tensors of a GPU, which have shapes and no values. That the kernel's
results are those of blocks is checked by the trainer itself, at its start on a GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from plaudit_reward.attention import (
    PACKED_ATTENTION,
    VARLEN_ATTENTION,
    PackedLayout,
    UnsupportedAttentionError,
    choose_attention,
    disagreement,
    packed_attention,
    refusal,
    sliding_windows,
    varlen_attention,
)
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.memory import checkpoint_layers
from plaudit_workers.training.model.policy_model import build_model

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "problem"),
    [
        ((9, 0), torch.bfloat16, 128, ""),
        ((8, 0), torch.float16, 256, ""),
        ((7, 5), torch.float16, 128, "the kernel needs compute capability 8.0, the GPU has 7.5"),
        ((9, 0), torch.float32, 128, "the kernel computes in bfloat16 and float16, the model in float32"),
        ((9, 0), torch.bfloat16, 288, "the kernel takes heads of a multiple of 8 up to 256, the model's have 288"),
        ((9, 0), torch.bfloat16, 20, "the kernel takes heads of a multiple of 8 up to 256, the model's have 20"),
    ],
)
def test_the_kernel_serves_new_gpus_in_two_precisions(capability, dtype, head_size, problem):
    assert refusal(capability, dtype, head_size) == problem


def test_a_kernel_that_cannot_run_is_a_problem_not_a_crash():
    assert disagreement(CPU, torch.bfloat16, (4, 2, 16)).startswith("the kernel failed: NotImplementedError")


def test_a_kernel_that_fails_without_a_word_is_a_problem_too(monkeypatch):
    def fails(*arguments, **named):
        raise AssertionError

    monkeypatch.setattr("plaudit_reward.attention.varlen_attention", fails)
    assert disagreement(CPU, torch.bfloat16, (4, 2, 16)) == "the kernel failed: AssertionError"


def test_a_reward_model_compares_the_kernel_in_inference_mode(monkeypatch):
    """Where nothing has gradients: the kernel was never used there. Blocks compute in its place here."""
    monkeypatch.setattr("plaudit_reward.attention.varlen_attention", packed_attention)
    with torch.inference_mode():
        assert disagreement(CPU, torch.bfloat16, (4, 2, 16)) == ""


@pytest.mark.parametrize("window", [None, 16, 500])
def test_the_call_is_one_that_torch_accepts_for_tensors_of_a_gpu(window):
    lengths = [70, 33, 5]
    with FakeTensorMode():
        query, key, value = (
            torch.empty(1, heads, sum(lengths), 16, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)
        )
        layout = PackedLayout.of(lengths).to(query.device)
        output, _ = varlen_attention(
            torch.nn.Identity(), query, key, value, None, packed_layout=layout, sliding_window=window
        )
    assert (output.shape, output.dtype, output.device.type) == ((1, 108, 4, 16), torch.bfloat16, "cuda")


def test_the_layout_has_the_bounds_of_all_sequences():
    layout = PackedLayout.of([70, 33, 33, 5])
    assert layout.bounds.tolist() == [0, 70, 103, 136, 141]
    assert (layout.bounds.dtype, layout.longest) == (torch.int32, 70)
    assert [block.num_sequences for block in layout.blocks] == [1, 2, 1]


@pytest.mark.parametrize("lengths", [[40, 40, 33, 9, 9, 5], [50, 40], [9, 5]], ids=["both", "long", "short"])
def test_long_sequences_are_computed_by_themselves_where_that_is_faster(lengths, monkeypatch):
    """Blocks compute in the kernel's place; a GPU's own results are compared by the tests that need one."""
    seen = []

    def kernel(query, key, value, bounds, *_, scale, **further):
        seen.append(bounds.diff().tolist())
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        return packed_attention(torch.nn.Identity(), *parts, None, packed_layout=PackedLayout.of(seen[-1]))[0][0]

    monkeypatch.setattr("plaudit_reward.attention.LONG_TOKENS", 30)
    monkeypatch.setattr("plaudit_reward.attention._has_fast_cudnn", lambda _: True)
    monkeypatch.setattr("plaudit_reward.attention.varlen_attn", kernel)
    parts = [torch.randn(1, heads, sum(lengths), 16) for heads in (4, 2, 2)]
    layout = PackedLayout.of(lengths).to(CPU)
    expected, _ = packed_attention(torch.nn.Identity(), *parts, None, packed_layout=layout)
    found, _ = varlen_attention(torch.nn.Identity(), *parts, None, packed_layout=layout)
    torch.testing.assert_close(found, expected)
    assert [length for row in seen for length in row] == [length for length in lengths if length < 30]
    varlen_attention(torch.nn.Identity(), *parts, None, packed_layout=layout, sliding_window=4)
    assert seen[-1] == lengths


def test_attention_of_another_kind_is_refused():
    row = torch.zeros(1, 4, 6, 8)
    with pytest.raises(UnsupportedAttentionError):
        varlen_attention(torch.nn.Identity(), row, row, row, None, packed_layout=PackedLayout.of([6]), softcap=30.0)


def test_every_pass_of_a_model_in_bfloat16_reaches_the_kernel_in_bfloat16(make_job, make_groups, monkeypatch):
    """The kernel takes no float32, in which one rank holds the parameters. Blocks compute in its place here."""
    seen = []

    def kernel(query, key, value, bounds, *_, scale, **further):
        seen.append({query.dtype, key.dtype, value.dtype})
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        layout = PackedLayout.of(bounds.diff().tolist())
        return packed_attention(torch.nn.Identity(), *parts, None, packed_layout=layout, scaling=scale)[0][0]

    monkeypatch.setattr("plaudit_reward.attention.varlen_attn", kernel)
    monkeypatch.setattr(
        "plaudit_workers.training.model.policy_model.choose_attention",
        lambda model, *_: model.set_attn_implementation(VARLEN_ATTENTION),
    )
    policy = build_model(make_job({"model": {"dtype": "bfloat16"}, "algorithm": {"loss": {"klCoefficient": 0.1}}}))
    policy.update(make_batch(make_groups([[0.0, 1.0, 0.5]]), "grpo", 1.0))
    policy.probe()
    assert len(seen) > 8
    assert all(dtypes == {torch.bfloat16} for dtypes in seen)


def test_a_model_on_a_cpu_keeps_blocks():
    config = Gemma3TextConfig(
        vocab_size=23,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    choose_attention(model, CPU, torch.bfloat16)
    assert model.config._attn_implementation == PACKED_ATTENTION
    assert sliding_windows(model) == [8]


class Layer(torch.nn.Module):
    def forward(self, row: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        return varlen_attn(2 * row, 3 * row, 4 * row, bounds, bounds, 4, 4)


class Layers(torch.nn.Module):
    _no_split_modules = ("Layer",)

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()


class CountedCalls(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.calls += operation is torch.ops.torch_attn._varlen_attn.default
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "calls"), [("none", 1), ("layers", 2), ("selective", 1)])
def test_selective_checkpointing_does_not_compute_the_kernel_again(kind, calls):
    model, bounds = Layers(), torch.empty(3, dtype=torch.int32, device="meta")
    checkpoint_layers(model, kind, torch.device("cuda"))
    row = torch.empty(8, 2, 16, device="meta", requires_grad=True)
    with CountedCalls() as counted:
        (2 * model.layer(row, bounds)).sum().backward()
    assert counted.calls == calls
