"""One rank of ``test_ranks``: called with a folder, which holds job and batches and gets the results.

With ``endless`` behind the folder: updates until it is killed. With ``relay LOAD FROM TO SAVE``: loads a checkpoint
(``-`` for none), makes the updates FROM to TO, saves as step TO in the folder SAVE (``-`` for none), and leaves its
state in ``relayed.pickle``. With ``deltas``: publishes after each update. With ``dies``: rank 1 gets SIGKILL when it
opens its file of the second checkpoint.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path

from safetensors.torch import load_file

from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.images import ImageProcessor
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.checkpoint import load_checkpoint, write_checkpoint
from plaudit_workers.training.model.policy_model import PolicyModel, build_model
from plaudit_workers.training.publish import offer_weights, write_weights
from plaudit_workers.weights.receive import Reception
from whole_state import full_state, save_checkpoint


def lead(job: RLJob, policy: PolicyModel, folder: Path) -> None:
    batches = pickle.loads((folder / "batches.pickle").read_bytes())
    results = {"figures": [policy.update(batch) for batch in batches[:2]]}
    policy.hold_proximal(PolicyVersion(1, 2))
    save_checkpoint(folder / "checkpoints", 2, policy, {"cursor": 8})
    results["logprobs"] = policy.logprobs(batches[0]) + policy.logprobs(batches[3])
    results["probe"] = policy.probe()
    results["figures"] += [policy.update(batch) for batch in batches[2:]]
    results["state"] = full_state(policy)
    if not job.spec.trainer.lora:
        announcement = offer_weights(policy, PolicyVersion(1, 4), "token", "redis://127.0.0.1")
        results["parts"] = len(announcement.transfer.parts)
        with Reception(announcement.version, announcement.transfer) as reception:
            results["received"] = load_file(reception.receive() / "model.safetensors")
    results["announced"] = write_weights(policy, folder / "weights", PolicyVersion(1, 4))
    results["extra"] = load_checkpoint(folder / "checkpoints" / "step-000002", policy)
    results["figures_again"] = [policy.update(batch) for batch in batches[2:]]
    results["state_again"] = full_state(policy)
    (folder / "results.pickle").write_bytes(pickle.dumps(results))


def relay(policy: PolicyModel, folder: Path, load: str, first: int, end: int, save: str) -> None:
    batches = pickle.loads((folder / "batches.pickle").read_bytes())
    if load != "-":
        load_checkpoint(Path(load), policy)
    figures = [policy.update(batch) for batch in batches[first:end]]
    if save != "-":
        copy = policy.copy_state()
        policy.update(batches[0])  # while it is written
        write_checkpoint(Path(save), end, copy, {})
        load_checkpoint(Path(save) / f"step-{end:06d}", policy)
    (folder / "relayed.pickle").write_bytes(pickle.dumps((figures, full_state(policy))))


def save_until_a_rank_dies(policy: PolicyModel, folder: Path) -> None:
    for step in (1, 2):
        save_checkpoint(folder / "checkpoints", step, policy, {})
        (folder / f"saved-{step}").touch()


def die_at_the_second_file() -> None:
    opened = 0

    def look(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal opened
        if event == "open" and "rank-00001" in str(arguments[0]):
            opened += 1
            if opened == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def publish_deltas(job: RLJob, policy: PolicyModel, folder: Path) -> None:
    """Publish after each update; in the end write the last version, a delta, whole."""
    backend, published = TorchBackend(job, policy, folder), []
    for number, batch in enumerate(pickle.loads((folder / "batches.pickle").read_bytes())):
        policy.update(batch)
        published.append((backend.publish(PolicyVersion(1, number)), full_state(policy)))
    backend.write_whole(published[-1][0])
    (folder / "published.pickle").write_bytes(pickle.dumps(published))


def update_without_end(policy: PolicyModel, folder: Path) -> None:
    batch = pickle.loads((folder / "batches.pickle").read_bytes())[0]
    while True:
        policy.update(batch)
        (folder / "updated").touch()


def run_rank(folder: Path, *arguments: str) -> None:
    """Be one rank, whose number the environment has."""
    rank = int(os.environ["RANK"])
    job = RLJob.model_validate_json((folder / "job.json").read_bytes())
    images = ImageProcessor.of_job(job, folder)
    policy = build_model(job, rank, int(os.environ["WORLD_SIZE"]), images)
    if "dies" in arguments and rank == 1:
        die_at_the_second_file()
    if rank != 0:
        policy.follow()
    elif "endless" in arguments:
        update_without_end(policy, folder)
    elif "dies" in arguments:
        save_until_a_rank_dies(policy, folder)
    elif "deltas" in arguments:
        publish_deltas(job, policy, folder)
        policy.close()
    elif "relay" in arguments:
        load, first, end, save = arguments[1:]
        relay(policy, folder, load, int(first), int(end), save)
        policy.close()
    else:
        lead(job, policy, folder)
        policy.close()
