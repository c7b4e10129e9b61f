"""One rank of ``test_sharded_start``: called with a folder, which holds models and gets the results."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from plaudit_job.spec.algorithm import ModelSpec
from plaudit_job.spec.rljob import LoraSpec
from plaudit_wire.errors import RefusedError
from plaudit_workers.tokenizer import load_tokenizer
from plaudit_workers.training.model.head import LoadedModel, companion_files, forward_logits, load_by_rows, load_model
from plaudit_workers.training.model.lora import Adapters
from plaudit_workers.training.model.packing import pack_single
from plaudit_workers.training.model.policy_model import placed
from plaudit_workers.training.model.sharding import Ranks, gathered, join_ranks, leave_ranks
from plaudit_workers.training.model.weight_offer import shapes_of
from plaudit_workers.weights.files import WeightFiles
from plaudit_workers.weights.parameters import ModelFiles
from whole_state import gather


class PeakMemory:
    """The largest anonymous memory of this process while it is observed, in bytes above that at the beginning."""

    def __init__(self) -> None:
        gc.collect()  # earlier models, so that none is freed meanwhile
        self._start = self._peak = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._observe)
        self._thread.start()

    def _observe(self) -> None:
        while not self._stop.is_set():
            self._peak = max(self._peak, anonymous_bytes())
            time.sleep(0.001)

    def end(self) -> int:
        self._stop.set()
        self._thread.join()
        return max(self._peak, anonymous_bytes()) - self._start


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@torch.no_grad()
def compared(source: Path, ranks: Ranks) -> dict[str, Any]:
    """Load a model in both ways; return how they differ."""
    spec = ModelSpec(source=str(source), dtype="float32")
    loaded = load_by_rows(spec)
    on_meta = all(parameter.is_meta for parameter in loaded.module.parameters())
    module, eager = placed(loaded, ranks, torch.float32), load_model(spec)
    row = pack_single(torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]))
    values = [
        forward_logits(each, row.input_ids, row.position_ids, row.layout, row.sources) for each in (module, eager)
    ]
    whole, buffers = gather(dict(module.named_parameters())), dict(module.named_buffers())
    tokenizer = load_tokenizer(spec)
    files = [companion_files(each, tokenizer, torch.bfloat16) for each in (module, eager)]
    return {
        "on meta": on_meta,
        "parameters": {name for name, _ in eager.named_parameters()} == whole.keys()
        and all(torch.equal(whole[name], each) for name, each in eager.named_parameters()),
        "buffers": {name for name, _ in eager.named_buffers()} == buffers.keys()
        and all(torch.equal(buffers[name], each) for name, each in eager.named_buffers()),
        "logits": float((values[0] - values[1]).abs().max() / values[1].abs().max()),
        "companions": files[0] == files[1],
        "published": published(source, loaded, module, ranks),
    }


def published(source: Path, loaded: LoadedModel, module: PreTrainedModel, ranks: Ranks) -> bool:
    """Write a model, each rank its file; return True if its files hold the tensors that it was read from."""
    tensors, folder = dict(module.named_parameters()), source.with_name(f"published-{source.name}")
    folder.mkdir(exist_ok=True)
    files = WeightFiles.plan(shapes_of(tensors, torch.float32, loaded.published), "model.safetensors", ranks.world_size)
    files.write_own(folder, ranks.rank, gathered(tensors, files.order))
    for name, content in files.index().items():
        (folder / name).write_bytes(content)
    torch.distributed.barrier(ranks.commands)
    read, whole = ModelFiles.find(str(folder), None), ModelFiles.find(str(source), None)
    assert read is not None
    assert whole is not None
    return set(read.names) == set(whole.names) and all(
        torch.equal(read.whole(name), whole.whole(name)) for name in read.names
    )


@torch.no_grad()
def adapted(source: Path, ranks: Ranks) -> dict[str, Any]:
    """Add adapters to a model that is loaded in both ways; return how they differ."""
    spec, lora = ModelSpec(source=str(source)), LoraSpec(rank=4, alpha=8.0)
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        both = [load_by_rows(spec), LoadedModel(load_model(spec))]
        for each in both:
            torch.manual_seed(5)
            Adapters(each.module, lora, spec.source, dtype)
        modules = [placed(each, ranks, dtype) for each in both]
        values = [dict(each.named_parameters()) for each in modules]
        whole, expected = (gather(each) for each in values)
        row = pack_single(torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]))
        logits = [forward_logits(each, row.input_ids, row.position_ids, row.layout, row.sources) for each in modules]
        found[str(dtype)] = {
            "parameters": whole.keys() == expected.keys()
            and all(
                torch.equal(whole[name], each) and whole[name].dtype == each.dtype for name, each in expected.items()
            ),
            "trained": all(values[0][name].requires_grad == each.requires_grad for name, each in values[1].items()),
            "logits": torch.equal(logits[0], logits[1]),
        }
    return found


def refusals(source: Path, ranks: Ranks) -> dict[str, str]:
    """Return the refusal of a model by the precision in which it computes; empty where it is accepted."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        try:
            loaded = load_by_rows(ModelSpec(source=str(source), dtype=dtype))
            placed(loaded, ranks, getattr(torch, dtype))
            found[dtype] = ""
        except RefusedError as error:
            found[dtype] = str(error)
    return found


def peak(source: Path, ranks: Ranks, lora: LoraSpec | None = None) -> float:
    """Return this rank's peak while it loads a model, as a share of the float32 model."""
    observed = PeakMemory()
    loaded = load_by_rows(ModelSpec(source=str(source)))
    dtype = torch.float32 if lora is None else torch.bfloat16
    if lora is not None:
        Adapters(loaded.module, lora, str(source), dtype)
    module = placed(loaded, ranks, dtype)
    return observed.end() / (4 * sum(parameter.numel() for parameter in module.parameters()))


def return_freed_memory() -> None:
    """Let memory that is freed leave the process at once, so that the peak is of tensors that live at the same time."""
    for threshold in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
        assert ctypes.CDLL(None).mallopt(threshold, 1 << 16) == 1


def load_models(folder: Path) -> None:
    """Be one rank, whose number the environment has."""
    return_freed_memory()
    rank = int(os.environ["RANK"])
    ranks = join_ranks(rank, int(os.environ["WORLD_SIZE"]))
    results: dict[str, Any] = {}
    for name in sorted(path.name for path in folder.glob("like-*")):
        results[name] = compared(folder / name, ranks) | {"refused": refusals(folder / name, ranks)}
    results["adapted"] = adapted(folder / "like-qwen2-tied", ranks)
    results["peak"] = peak(folder / "large", ranks)
    results["peak with adapters"] = peak(folder / "large", ranks, LoraSpec(rank=4, alpha=8.0))
    results["state-space"] = refusals(folder / "state-space", ranks)
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    leave_ranks(ranks)
