"""Compiled code: the results of eager code, and no compilation for rows of further lengths. Real inductor and g++."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, PreTrainedModel

from plaudit_reward.attention import PACKED_ATTENTION, PackedLayout
from plaudit_wire.errors import RefusedError
from plaudit_workers.training.model import head
from plaudit_workers.training.model.head import forward_logits, reduced
from plaudit_workers.training.model.memory import checkpoint_layers, compile_layers, refuse_without_compiler

pytestmark = pytest.mark.engines

ROWS = [[9, 5], [30, 20, 3, 3], [40], [7, 7, 7], [12, 3, 1], [50, 9, 8, 4, 4, 2]]
GRAPHS = 8
"""A layer before, in and behind its attention, in two modules: four, with and without gradients."""


def gradients(model: PreTrainedModel, lengths: list[int]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    logits_of(model, lengths).log_softmax(-1)[:, 3].mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def logits_of(model: PreTrainedModel, lengths: list[int]) -> torch.Tensor:
    ids = torch.randint(0, 16, (1, sum(lengths)), generator=torch.Generator().manual_seed(sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return forward_logits(model, ids, positions, PackedLayout.of(lengths), torch.arange(ids.numel()))


# Of torch's compiler about torch itself.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
def test_rows_of_any_lengths_use_the_same_compiled_layers(model_folder, monkeypatch):
    # A vLLM that an earlier test built in this process leaves it set.
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    eager, compiled = (
        AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation=PACKED_ATTENTION) for _ in range(2)
    )
    compile_layers(compiled)
    checkpoint_layers(compiled, "layers", torch.device("cpu"))
    counters.clear()
    for lengths in ROWS:
        expected = gradients(eager, lengths)
        largest = max(float(gradient.abs().max()) for gradient in expected.values())
        torch.testing.assert_close(gradients(compiled, lengths), expected, rtol=1e-4, atol=1e-5 * largest)
        with torch.no_grad():
            torch.testing.assert_close(logits_of(compiled, lengths), logits_of(eager, lengths), rtol=1e-4, atol=1e-4)
    assert 0 < counters["stats"]["unique_graphs"] <= GRAPHS


@pytest.mark.filterwarnings("ignore")  # as above
def test_a_reduction_of_logits_is_compiled_where_it_gives_the_eager_values(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    compiled = head._compiled_reduction(torch.device("cpu"), 96, 40)
    assert compiled is not None
    for num_tokens, use in ((96, "figure"), (17, "figure"), (17, "loss"), (1, "none")):
        values = []
        for function in (compiled, reduced):
            logits = torch.randn(num_tokens, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()
            found = function(logits, torch.arange(num_tokens) % 40, 0.7, entropy=use)
            values.append((found.detach(), torch.autograd.grad(found.sum(), logits)[0]))
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [
        (lambda *arguments, **further: reduced(*arguments, **further) * 1.01, "its results differ by 0."),
        (lambda *arguments, **further: reduced(*arguments, **further) * float("nan"), "its results differ by nan"),
        (None, "TypeError: "),
    ],
)
def test_a_reduction_that_cannot_be_compiled_or_differs_stays_eager(monkeypatch, caplog, compiled, reason):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: compiled)
    caplog.set_level("INFO")
    assert head._compiled_reduction(torch.device("cpu"), 96, 40) is None
    log = " ".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert "the reduction of logits is not compiled" in log
    assert reason in log


def test_a_machine_without_a_compiler_is_refused(tmp_path):
    with pytest.raises(RefusedError, match=r"spec\.trainer\.compile needs a compiler, and g\+\+ is not installed here"):
        refuse_without_compiler("cpu", {"PATH": str(tmp_path)})
    compiler = tmp_path / "own-c++"
    compiler.touch(mode=0o755)
    refuse_without_compiler("cpu", {"PATH": str(tmp_path), "CXX": "own-c++ -O1"})
