"""Measure the publication of weights: from the trainer's call to both rollouts having the version.

Three ways: direct, whole files, and deltas over files. The weights are random, with the shapes of Qwen2.5-0.5B (494
million parameters, 1 GB in bfloat16; ``--scale N``: about an Nth). Trainer and rollouts are processes with a real Redis
between them, two rollouts for each way; they receive or read, check and load into an engine without a model, so that
the time of vLLM's own loading, the same in all, is left out. Each round publishes once by each way; the order
alternates. Files go to a folder of ``--folder``, such as a shared volume.

From one version to the next, a share of the elements changes. It is measured first: AdamW's updates with the trainer's
defaults (a rate of 1e-6) of a transformer of 15 million parameters with the usual initial weights (standard deviation
0.02), whose gradients are those of a policy gradient on random tokens with random advantages.

Usage: ``python benchmarks/weight_transfer.py [--scale 1] [--rounds 7] [--share S] [--folder PATH] [--json FILE]``
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

import msgspec
import torch

from plaudit_job.spec.algorithm import AlgorithmSpec
from plaudit_wire.messages import Announcement, PolicyVersion, Transfer, TransferPart
from plaudit_wire.redis import RedisAddress
from plaudit_workers.files import remove, whole_folder
from plaudit_workers.launch.redis import RedisServer
from plaudit_workers.rollout.agents.agent import SingleTurn
from plaudit_workers.rollout.scripted import Script, ScriptedEngine
from plaudit_workers.rollout.worker import RolloutOptions, RolloutWorker
from plaudit_workers.stream.calls import StreamLimits
from plaudit_workers.stream.trainer import TrainerStreams
from plaudit_workers.stream.transport import Transport
from plaudit_workers.training.model.optimizer import PolicyOptimizer
from plaudit_workers.training.model.weight_offer import part_of, shapes_of
from plaudit_workers.weights.deltas import DELTA_FILE, DeltaRecord
from plaudit_workers.weights.files import WeightFiles
from plaudit_workers.weights.image import WeightForm, WeightImage
from plaudit_workers.weights.published import combined_digest
from plaudit_workers.weights.send import WeightServer, file_layout

_LAYERS, _HIDDEN, _INNER, _KEYS, _VOCABULARY = 24, 896, 4864, 128, 151_936
_ROLLOUTS = 2
WAYS = ("direct", "files", "deltas")


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


def changed_shares(updates: int) -> list[float]:
    """Return the share of bfloat16 elements that each update of a small transformer changes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
        initializer_range=0.02,
    )
    model = Qwen2ForCausalLM(config)
    optimizer = PolicyOptimizer(model.named_parameters(), AlgorithmSpec(steps=updates))
    shares = []
    for _ in range(updates):
        ids, advantages = torch.randint(config.vocab_size, (32, 64)), torch.randn(32)
        logprobs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[:, :, 0]
        (-(advantages * logprobs.mean(1)).mean()).backward()
        before = [each.detach().to(torch.bfloat16) for each in model.parameters()]
        optimizer.step()
        changed = sum(
            int((each.detach().to(torch.bfloat16) != old).sum())
            for each, old in zip(model.parameters(), before, strict=True)
        )
        shares.append(changed / sum(each.numel() for each in before))
    return shares


def measured_share() -> float:
    """Return the mean share of the last updates, when AdamW's averages have formed."""
    shares = changed_shares(20)
    print("share of elements that each update changes:", " ".join(f"{share:.2%}" for share in shares))
    return statistics.mean(shares[-5:])


class Publisher:
    """The trainer's side: publishes weights by one way.

    Args:
        way: one of ``WAYS``.
        transport: of the trainer.
        folder: for files.
        weights: float32; changed between two versions.
    """

    def __init__(self, way: str, transport: Transport, folder: Path, weights: dict[str, torch.Tensor]) -> None:
        self._make = {"direct": self._direct, "files": self._files, "deltas": self._deltas}[way]
        self._transport = transport
        self._streams = TrainerStreams(transport, StreamLimits(max_open_groups=1))
        self._folder = folder
        self._weights = weights
        self._server = WeightServer()
        self._plan = WeightFiles.plan(shapes_of(weights, torch.bfloat16), "model.safetensors", 1)
        self._image = WeightImage(self._plan, 0)
        self._versions: list[PolicyVersion] = []

    async def begin(self) -> None:
        """Take the run over."""
        await self._streams.take_over()

    async def publish(self) -> tuple[float, int]:
        """Publish one version; return the seconds until all rollouts hold it, and the bytes that each received."""
        version = PolicyVersion(self._streams.incarnation, len(self._versions) + 1)
        started = time.monotonic()
        announcement = await asyncio.to_thread(self._make, version)
        await self._streams.announce(announcement)
        while await self._num_holding(version) < _ROLLOUTS:  # noqa: ASYNC110 - other processes load them
            await asyncio.sleep(0.01)
        seconds = time.monotonic() - started
        self._versions.append(version)
        for old in self._versions[1:-1]:  # the first one is whole, the next rests on the last
            remove(self._folder / str(old))
        return seconds, self._num_bytes(announcement)

    async def _num_holding(self, version: PolicyVersion) -> int:
        return sum(worker.version == str(version) for worker in await self._transport.workers())

    def _num_bytes(self, announcement: Announcement) -> int:
        if announcement.transfer is not None:
            return announcement.transfer.num_bytes
        return sum(path.stat().st_size for path in Path(announcement.path).glob("model.*"))

    def _direct(self, version: PolicyVersion) -> Announcement:
        part = part_of(self._weights, torch.bfloat16, 0, b"")
        self._server.offer(version, "token", part)
        parts = [TransferPart(f"127.0.0.1:{self._server.port}", part.digest)]
        return Announcement(
            version, "", "", Transfer("token", file_layout(shapes_of(self._weights, torch.bfloat16)).num_bytes, parts)
        )

    def _files(self, version: PolicyVersion) -> Announcement:
        target = self._folder / str(version)
        with whole_folder(target) as temporary:
            digests = self._plan.write_own(temporary, 0, self._ordered())
        return Announcement(version, str(target), combined_digest(digests))

    def _deltas(self, version: PolicyVersion) -> Announcement:
        target, whole = self._folder / str(version), not self._versions
        digest = combined_digest(self._image.replace(self._ordered()).digests)
        with whole_folder(target) as temporary:
            self._image.write(WeightForm(str(temporary), whole, not whole))
            if not whole:
                record = DeltaRecord(str(self._versions[-1]), digest)
                (temporary / DELTA_FILE).write_bytes(msgspec.json.encode(record))
        return Announcement(version, str(target), digest)

    def _ordered(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._weights[name]) for name in self._plan.order]


def change(weights: dict[str, torch.Tensor], share: float) -> None:
    """Change a share of the elements by the least that bfloat16 shows."""
    for tensor in weights.values():
        elements = tensor.view(-1)
        elements[torch.randint(elements.numel(), (max(1, int(share * elements.numel())),))] *= 1 + 2**-7


def rollout(name: str, run: str, url: str, password: str) -> None:
    """Run a rollout worker until the process is ended."""

    async def serve() -> None:
        transport = await Transport.open(RedisAddress(url, password), run)
        worker = RolloutWorker(
            name, transport, ScriptedEngine(Script(load_seconds=0.0)), SingleTurn(), RolloutOptions()
        )
        await worker.run(asyncio.Event())

    asyncio.run(serve())


async def measure(server: RedisServer, folder: Path, rounds: int, scale: int, share: float) -> dict[str, Any]:
    """Return the seconds and the bytes of each round by way."""
    weights = random_weights(scale)
    publishers = {}
    for way in WAYS:
        transport = await Transport.open(RedisAddress(server.url, server.password), way)
        publishers[way] = Publisher(way, transport, folder / way, weights)
        await publishers[way].begin()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    num_bytes: dict[str, list[int]] = {way: [] for way in WAYS}
    for number in range(rounds + 2):
        change(weights, share)
        for way in WAYS if number % 2 else WAYS[::-1]:
            taken, size = await publishers[way].publish()
            if number > 1:  # the first round waits for the rollouts' start, the second makes their local copies
                seconds[way].append(taken)
                num_bytes[way].append(size)
    return {"seconds": seconds, "num_bytes": num_bytes}


def report(measured: dict[str, Any], share: float) -> dict[str, float]:
    """Print and return medians and their ratios to whole files."""
    medians = {way: statistics.median(each) for way, each in measured["seconds"].items()}
    sizes = {way: statistics.median(each) for way, each in measured["num_bytes"].items()}
    figures = {"changed_share": share}
    print(f"{_ROLLOUTS} rollouts, {share:.2%} of the elements change, p50 of {len(measured['seconds']['files'])}:")
    for way, seconds in measured["seconds"].items():
        spread = f"from {min(seconds):.2f} to {max(seconds):.2f}"
        print(f"  {way:6} {sizes[way] / 1e6:8.2f} MB  {medians[way]:6.2f} s  ({spread})")
        figures |= {f"{way}_s": medians[way], f"{way}_bytes": sizes[way]}
        figures |= {f"{way}_to_files": medians[way] / medians["files"]}
    print(f"  bytes, deltas ÷ files: {sizes['deltas'] / sizes['files']:.4f}")
    print(
        f"  seconds, direct ÷ files: {figures['direct_to_files']:.2f}, deltas ÷ files: {figures['deltas_to_files']:.2f}"
    )
    return figures


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="divides the bytes, about")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where files are written (default: the temporary folder)")
    parser.add_argument("--share", type=float, help="of elements that change (default: measured)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    share = arguments.share or measured_share()
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name, RedisServer(Path(name) / "redis") as server:
        rollouts = [
            processes.Process(target=rollout, args=(f"rollout-{i}", way, server.url, server.password), daemon=True)
            for i in range(_ROLLOUTS)
            for way in WAYS
        ]
        for each in rollouts:
            each.start()
        measured = asyncio.run(measure(server, Path(name) / "weights", arguments.rounds, arguments.scale, share))
        for each in rollouts:
            each.terminate()
            each.join()
    figures = report(measured, share)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
