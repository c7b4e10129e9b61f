"""Time and memory of one update of the trainer on one GPU, beside plain transformers and TRL.

Needs torch, transformers and this checkout, nothing else and no installation. All sides compute the same PPO loss on
the same random sequences of a model with random weights and the sizes of Qwen2.5 in two passes, whose gradients are
added, then clip the gradient and step with the trainer's AdamW. Parameters are float32, passes bfloat16 (float32 on a
CPU). ``plaudit`` computes a packed row with the trainer's attention, chunked head and checkpointing; the others are
described in ``train_sides``. TRL's is measured where ``trl`` is installed. ::

    python benchmarks/gpu/train_step.py --size 1.5b --length 8192 --json update.json
    python benchmarks/gpu/train_step.py --size tiny --length 64 --sequences 4   # on a CPU, to see that it runs

``planned_gb`` is what ``plaudit plan`` computes for the same update without its reserve, to be held against
``peak_gb``, the most that torch's allocator gave out; ``reserved_gb`` is the most that it took from the GPU. A side
that runs out of memory is reported as such, and the others go on. MFU counts 6 FLOP a parameter and token plus 6 ·
layers · width · length for causal attention, without recomputation.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.extend(
    str(Path(__file__).parents[2] / part) for part in ("wire", "job", "metrics", "sandbox", "reward", "workers")
)

from train_case import ALGORITHM, SIZES, Case
from train_sides import Side, sides

from plaudit_job.model_shape import find_device
from plaudit_workers.training.model.optimizer import PolicyOptimizer, training_flops

Figures = dict[str, Any]


def measure(case: Case, side: Side, steps: int, passes: int) -> Figures:
    """Return seconds, tokens a second and MFU of an update; the first one is not timed."""
    cuda = case.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    model, loss = side(case)
    optimizer = PolicyOptimizer(model.named_parameters(), ALGORITHM)
    times = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        for _ in range(passes):
            loss().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = sorted(times[1:])[steps // 2]
    figures: Figures = {"seconds": seconds, "tokens_per_s": passes * case.length * case.sequences / seconds}
    if device := find_device(torch.cuda.get_device_name()) if cuda else None:
        flops = training_flops(case.shape, [case.length] * case.sequences * passes)
        figures["mfu"] = flops / seconds / device.flops
    return figures


def measured(case: Case, name: str, side: Side, steps: int, passes: int) -> Figures:
    """Return the figures of a side, or that it ran out of memory; with the memory that it took either way."""
    cuda = case.device.type == "cuda"
    try:
        figures = measure(case, side, steps, passes)
    except torch.OutOfMemoryError as error:
        figures = {"out_of_memory": str(error).splitlines()[0]}
    gc.collect()  # the model, the gradients and the optimizer refer to each other
    if cuda:
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        figures["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        torch.cuda.empty_cache()
    if name == "plaudit":
        figures |= planned(case)
    return figures


def planned(case: Case) -> Figures:
    """Return the plan's gigabytes for the update, without its reserve, and each part."""
    counted = {name: num_bytes / 1e9 for name, num_bytes in case.planned().items() if name != "reserved"}
    return {"planned_gb": sum(counted.values()), "planned_parts_gb": counted}


def main() -> None:
    """Measure each side and print a line for it."""
    arguments = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    prompt = arguments.length // 8 if arguments.prompt is None else arguments.prompt
    case = Case(arguments.size, arguments.length, prompt, arguments.sequences, device, dtype)
    results: dict[str, Figures] = {}
    for name, side in sides().items():
        results[name] = measured(case, name, side, arguments.steps, arguments.passes)
        print(f"{name:29}" + "  ".join(_text(*figure) for figure in results[name].items()))
        if arguments.json:  # after each side, so that nothing is lost with a later one
            written = _setting(case) | {"passes": arguments.passes, "sides": results}
            arguments.json.write_text(json.dumps(written, indent=2) + "\n")


def _text(name: str, value: float | str | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"({', '.join(_text(*part) for part in value.items())})"
    return f"{name}: {value}" if isinstance(value, str) else f"{name} {value:,.4g}"


def _setting(case: Case) -> Figures:
    return {
        "gpu": torch.cuda.get_device_name() if case.device.type == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "size": case.size,
        "length": case.length,
        "prompt": case.prompt,
        "sequences": case.sequences,
        "dtype": str(case.dtype).removeprefix("torch."),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="1.5b")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each sequence (default 8,192)")
    parser.add_argument("--prompt", type=int, help="tokens of it that are not trained (default an eighth)")
    parser.add_argument("--sequences", type=int, default=2, help="sequences of a pass (default 2)")
    parser.add_argument("--passes", type=int, default=2, help="of these sequences, for one update (default 2)")
    parser.add_argument("--steps", type=int, default=5, help="measured updates (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
