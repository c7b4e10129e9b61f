"""Measure the publication of weights: from the trainer's call to both rollouts having the version, direct and by files.

The weights are random, with the shapes of Qwen2.5-0.5B (494 million parameters, 1 GB in bfloat16; ``--quick``: a
fiftieth). Trainer and rollouts are processes with a real Redis between them; the rollouts receive or read, check and
load into an engine without a model, so that the time of vLLM's own loading, the same in both, is left out. Each round
publishes once by each way; the order alternates. Files go to a folder of ``--folder``, such as a shared volume.

Usage: ``python benchmarks/weight_transfer.py [--quick] [--rounds 7] [--folder PATH] [--json FILE]``
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from plaudit_wire.messages import Announcement, PolicyVersion, Transfer, TransferPart
from plaudit_workers.launch.redis.server import RedisServer
from plaudit_workers.published_weights import weights_digest
from plaudit_workers.rollout.agents.single_turn import SingleTurn
from plaudit_workers.rollout.engines.script import Script
from plaudit_workers.rollout.engines.scripted import ScriptedEngine
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker
from plaudit_workers.stream.connection import RedisAddress, Transport
from plaudit_workers.stream.trainer.groups import StreamLimits, TrainerStreams
from plaudit_workers.training.model.weight_offer import layout_of, part_of
from plaudit_workers.weight_transfer.server import WeightServer
from plaudit_workers.whole_files import remove, whole_folder

_LAYERS, _HIDDEN, _INNER, _KEYS, _VOCABULARY = 24, 896, 4864, 128, 151_936
_ROLLOUTS = 2


def random_weights(scale: int) -> dict[str, torch.Tensor]:
    """Return float32 tensors by name; ``scale`` divides the vocabulary and the layers' inner sizes."""
    inner, keys = _INNER // scale, max(8, _KEYS // scale)
    weights = {"model.embed_tokens.weight": torch.randn(_VOCABULARY // scale, _HIDDEN)}
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}self_attn.q_proj.weight": torch.randn(_HIDDEN // scale, _HIDDEN),
            f"{prefix}self_attn.o_proj.weight": torch.randn(_HIDDEN, _HIDDEN // scale),
            f"{prefix}self_attn.k_proj.weight": torch.randn(keys, _HIDDEN),
            f"{prefix}self_attn.v_proj.weight": torch.randn(keys, _HIDDEN),
            f"{prefix}mlp.gate_proj.weight": torch.randn(inner, _HIDDEN),
            f"{prefix}mlp.up_proj.weight": torch.randn(inner, _HIDDEN),
            f"{prefix}mlp.down_proj.weight": torch.randn(_HIDDEN, inner),
            f"{prefix}input_layernorm.weight": torch.randn(_HIDDEN),
        }
    return weights


class Publisher:
    """The trainer's side: publishes one set of weights under new versions.

    Args:
        transport: of the trainer.
        folder: for files.
        weights: float32.
    """

    def __init__(self, transport: Transport, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self._transport = transport
        self._streams = TrainerStreams(transport, StreamLimits(max_open_groups=1))
        self._folder = folder
        self._weights = weights
        self._server = WeightServer()
        self._number = 0

    async def begin(self) -> None:
        """Take the run over."""
        await self._streams.take_over()

    async def publish(self, way: str) -> float:
        """Publish one version; return the seconds until all rollouts hold it."""
        self._number += 1
        version = PolicyVersion(self._streams.incarnation, self._number)
        started = time.monotonic()
        make = self._direct if way == "direct" else self._files
        await self._streams.announce(await asyncio.to_thread(make, version))
        while await self._num_holding(version) < _ROLLOUTS:  # noqa: ASYNC110 - other processes load them
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - started
        remove(self._folder / str(version))
        return seconds

    async def _num_holding(self, version: PolicyVersion) -> int:
        return sum(worker.version == str(version) for worker in await self._transport.workers())

    def _direct(self, version: PolicyVersion) -> Announcement:
        part = part_of(self._weights, torch.bfloat16, 0, b"")
        self._server.offer(version, "token", part)
        parts = [TransferPart(f"127.0.0.1:{self._server.port}", part.digest)]
        return Announcement(
            version, "", "", Transfer("token", layout_of(self._weights, torch.bfloat16).num_bytes, parts)
        )

    def _files(self, version: PolicyVersion) -> Announcement:
        from safetensors.torch import save_file

        target = self._folder / str(version)
        with whole_folder(target) as temporary:
            cast = {name: tensor.to(torch.bfloat16) for name, tensor in self._weights.items()}
            save_file(cast, temporary / "model.safetensors", metadata={"format": "pt"})
            digest = weights_digest(temporary)
        return Announcement(version, str(target), digest)


def rollout(name: str, url: str, password: str) -> None:
    """Run a rollout worker until the process is ended."""

    async def serve() -> None:
        transport = await Transport.open(RedisAddress(url, password), "weights")
        worker = RolloutWorker(
            name, transport, ScriptedEngine(Script(load_seconds=0.0)), SingleTurn(), RolloutOptions()
        )
        await worker.run(asyncio.Event())

    asyncio.run(serve())


async def measure(server: RedisServer, folder: Path, rounds: int, scale: int) -> dict[str, Any]:
    """Return the seconds of each round by way."""
    transport = await Transport.open(RedisAddress(server.url, server.password), "weights")
    weights = random_weights(scale)
    publisher = Publisher(transport, folder, weights)
    await publisher.begin()
    seconds: dict[str, list[float]] = {"direct": [], "files": []}
    for number in range(rounds + 1):
        for way in ("direct", "files") if number % 2 else ("files", "direct"):
            taken = await publisher.publish(way)
            if number:  # the first round waits for the rollouts' start
                seconds[way].append(taken)
    await transport.close()
    num_bytes = sum(tensor.numel() * 2 for tensor in weights.values())
    return {"num_bytes": num_bytes, "seconds": seconds}


def report(measured: dict[str, Any]) -> dict[str, float]:
    """Print and return medians and their ratio."""
    medians = {way: statistics.median(each) for way, each in measured["seconds"].items()}
    ratio = medians["direct"] / medians["files"]
    print(f"{measured['num_bytes'] / 1e9:.2f} GB, {_ROLLOUTS} rollouts, p50 of {len(measured['seconds']['files'])}:")
    for way, seconds in measured["seconds"].items():
        print(f"  {way:6} {medians[way]:6.2f} s  (from {min(seconds):.2f} to {max(seconds):.2f})")
    print(f"  direct ÷ files: {ratio:.2f}")
    return {"direct_s": medians["direct"], "files_s": medians["files"], "direct_to_files": ratio}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where files are written (default: the temporary folder)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, RedisServer(Path(name) / "redis") as server:
        rollouts = [
            processes.Process(target=rollout, args=(f"rollout-{i}", server.url, server.password), daemon=True)
            for i in range(_ROLLOUTS)
        ]
        for each in rollouts:
            each.start()
        scale = 50 if arguments.quick else 1
        measured = asyncio.run(measure(server, Path(name) / "weights", arguments.rounds, scale))
        for each in rollouts:
            each.terminate()
            each.join()
    figures = report(measured)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
