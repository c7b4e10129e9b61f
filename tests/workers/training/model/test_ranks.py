"""Several ranks: the same updates as one, states that move between any number of them, no rank left behind."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from forked_ranks import end_ranks, errors_in, exit_codes, run_ranks, start_ranks
from plaudit_job.spec.rljob import RLJob
from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.checkpoint import load_checkpoint, recovered_checkpoints
from plaudit_workers.training.model.batch import TrainingBatch, make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.weights.deltas import restore_version
from plaudit_workers.weights.files import ShardReader
from plaudit_workers.weights.published import weights_digest
from rank_program import run_rank
from tiny_vision import save_vision_policy
from vision_policy import opened, random_batch, vision_job
from whole_state import full_state, save_checkpoint

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SCORES = [[0.0, 1.0, 0.5, 0.25], [1.0, 1.0, 0.0, None], [0.2, 0.4, 0.6, 0.8]]
FSDP = {"strategy": "fsdp2", "ranks": 2, "activationCheckpointing": "layers"}
SETTINGS = {
    "algorithm": {
        "promptsPerStep": 6,
        "miniBatchesPerStep": 2,
        "loss": {"correction": "decoupled", "klCoefficient": 0.1, "entropyCoefficient": 0.01},
        "optimizer": {"warmupSteps": 2},
    }
}


def write_inputs(folder: Path, job: RLJob, batches: list[TrainingBatch]) -> None:
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
    (folder / "batches.pickle").write_bytes(pickle.dumps(batches))


LORA = {"lora": {"rank": 4, "alpha": 8.0}}
ON_HOST = {"cpuOffload": True}


REPLICAS = {"ranks": 4, "fsdpSize": 2, "sequenceParallelSize": 2}
CASES = {"all weights": {}, "adapters": LORA, "replicas and shared rows": REPLICAS, "states on the host": ON_HOST}


@pytest.mark.parametrize("trainer", CASES.values(), ids=CASES)
def test_sharded_ranks_give_the_updates_of_one(make_job, make_groups, tmp_path, trainer):
    # The last batch leaves ranks without a sequence.
    scores = [SCORES, SCORES, SCORES, [[0.7]]]
    batches = [make_batch(make_groups(own, seed=seed), "grpo", 0.9) for seed, own in enumerate(scores)]
    write_inputs(tmp_path, make_job({**SETTINGS, "trainer": FSDP | trainer}), batches)
    world_size = trainer.get("ranks", 2)
    run_ranks(run_rank, tmp_path, world_size)
    results = pickle.loads((tmp_path / "results.pickle").read_bytes())

    adapters = {name: value for name, value in trainer.items() if name == "lora"}
    alone = build_model(make_job({**SETTINGS, "trainer": adapters}))
    figures = [alone.update(batch) for batch in batches[:2]]
    alone.hold_proximal(PolicyVersion(1, 2))
    logprobs = alone.logprobs(batches[0]) + alone.logprobs(batches[3])
    for mine, theirs in zip(logprobs, results["logprobs"], strict=True):
        torch.testing.assert_close(torch.from_numpy(theirs), torch.from_numpy(mine), atol=1e-5, rtol=1e-4)
    assert results["probe"].ids == alone.probe().ids
    assert results["probe"].logprobs == pytest.approx(alone.probe().logprobs, abs=1e-5)
    figures += [alone.update(batch) for batch in batches[2:]]
    for mine, theirs in zip(figures, results["figures"], strict=True):
        assert theirs == pytest.approx(mine, rel=1e-3, abs=1e-5)
    torch.testing.assert_close(results["state"], full_state(alone), atol=2e-5, rtol=1e-4)

    if not adapters:
        # Each rank offers its shards, and a rollout puts them together.
        assert results["parts"] == world_size
        torch.testing.assert_close(results["received"], results["state"], atol=0, rtol=0)
    published = tmp_path / "weights" / "1.4"
    files = sorted(path.name for path in published.glob("*.safetensors"))
    assert files == (
        ["adapter_model.safetensors"]
        if adapters
        else [f"model-{number + 1:05d}-of-{world_size:05d}.safetensors" for number in range(world_size)]
    )
    assert results["announced"].digest == weights_digest(published)
    loaded = {name: each for file in files for name, each in load_file(published / file).items()}
    torch.testing.assert_close(loaded, results["state"], atol=0, rtol=0)
    if not adapters:
        own = AutoModelForCausalLM.from_pretrained(published).state_dict()
        torch.testing.assert_close(dict(own), results["state"], atol=0, rtol=0)
    assert results["extra"] == {"cursor": 8}
    torch.testing.assert_close(results["state_again"], results["state"], atol=0, rtol=0)
    saved = tmp_path / "checkpoints" / "step-000002"
    resumed = build_model(make_job({**SETTINGS, "trainer": adapters}))
    load_checkpoint(saved, resumed)
    save_checkpoint(tmp_path / "one", 2, resumed, {})
    assert_stored_alike(tmp_path / "one" / "step-000002", saved)
    for batch in batches[2:]:
        resumed.update(batch)
    torch.testing.assert_close(full_state(resumed), results["state"], atol=2e-5, rtol=1e-4)


def test_ranks_whose_rows_have_no_images_take_part_in_those_of_others(tmp_path):
    model = save_vision_policy(tmp_path / "model")
    algorithm = {"steps": 4, "optimizer": {"learningRate": 1e-3}, "loss": {"klCoefficient": 0.1}}
    one = vision_job(model, tmp_path, algorithm=algorithm, trainer={"microBatchTokens": 64})
    two = vision_job(model, tmp_path, algorithm=algorithm, trainer=FSDP | {"microBatchTokens": 64})
    images, rows = opened(one, tmp_path)
    text = [row for row in rows if not row.images]
    batches = [
        random_batch(images, rows, seed=1),
        random_batch(images, [*text, *text, *text, rows[0]], seed=2, copies=1),
        random_batch(images, text, seed=3),
        random_batch(images, [rows[3]], seed=4, copies=1),  # one rank has no sequence
    ]
    write_inputs(tmp_path, two, batches)
    run_ranks(run_rank, tmp_path, 2)
    results = pickle.loads((tmp_path / "results.pickle").read_bytes())

    alone = build_model(one, images=images)
    figures = [alone.update(batch) for batch in batches[:2]]
    logprobs = alone.logprobs(batches[0]) + alone.logprobs(batches[3])
    for mine, theirs in zip(logprobs, results["logprobs"], strict=True):
        torch.testing.assert_close(torch.from_numpy(theirs), torch.from_numpy(mine), atol=1e-4, rtol=1e-4)
    figures += [alone.update(batch) for batch in batches[2:]]
    for mine, theirs in zip(figures, results["figures"], strict=True):
        assert theirs["actor/grad_norm"] == pytest.approx(mine["actor/grad_norm"], rel=1e-3)
    torch.testing.assert_close(results["state"], full_state(alone), atol=5e-5, rtol=1e-3)
    torch.testing.assert_close(results["state_again"], results["state"], atol=0, rtol=0)
    published = tmp_path / "weights" / "1.4"
    files = {name: each for file in published.glob("*.safetensors") for name, each in load_file(file).items()}
    torch.testing.assert_close(results["received"], files, atol=0, rtol=0)
    assert "visual.patch_embed.proj.weight" in files  # the name in the files of Qwen2.5-VL
    own = AutoModelForImageTextToText.from_pretrained(published).state_dict()
    torch.testing.assert_close(dict(own), results["state"], atol=0, rtol=0)


def relayed(
    folder: Path, world_size: int, *arguments: object
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    run_ranks(run_rank, folder, world_size, "relay", *map(str, arguments))
    figures, state = pickle.loads((folder / "relayed.pickle").read_bytes())
    return figures, state


def assert_stored_alike(mine: Path, theirs: Path) -> None:
    """Both hold the same state bit by bit, however it is cut."""
    readers = [ShardReader(checkpoint) for checkpoint in (mine, theirs)]
    assert readers[0].index.progress == readers[1].index.progress
    tensors = [{name: reader.whole(name) for name in reader.index.tensors} for reader in readers]
    torch.testing.assert_close(*tensors, atol=0, rtol=0)
    assert any(name.startswith("exp_avg_sq/") for name in tensors[0])


@pytest.mark.parametrize("trainer", [{}, LORA], ids=["all weights", "adapters"])
def test_a_run_moves_from_two_ranks_to_one_and_back_bit_by_bit(make_job, make_groups, tmp_path, trainer):
    batches = [make_batch(make_groups(SCORES, seed=seed), "grpo", 0.9) for seed in range(4)]
    write_inputs(tmp_path, make_job({**SETTINGS, "trainer": FSDP | trainer}), batches)
    on_two, on_one = tmp_path / "two", tmp_path / "one"
    relayed(tmp_path, 2, "-", 0, 2, on_two)
    assert {path.name for path in (on_two / "step-000002").iterdir()} == {
        "policy.json",
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
        "state.json",
    }
    figures, expected = relayed(tmp_path, 2, on_two / "step-000002", 2, 4, "-")

    # On one rank: loaded and saved, then trained and saved.
    alone = build_model(make_job({**SETTINGS, "trainer": trainer}))
    load_checkpoint(on_two / "step-000002", alone)
    save_checkpoint(on_one, 2, alone, {})
    alone.update(batches[2])
    save_checkpoint(on_one, 3, alone, {})
    assert_stored_alike(on_one / "step-000002", on_two / "step-000002")

    # Back on two: the further updates are those of a run that never left.
    figures_again, state = relayed(tmp_path, 2, on_one / "step-000002", 2, 4, "-")
    assert figures_again == figures
    torch.testing.assert_close(state, expected, atol=0, rtol=0)
    relayed(tmp_path, 2, on_one / "step-000003", 3, 3, on_two)
    assert_stored_alike(on_two / "step-000003", on_one / "step-000003")


def test_two_ranks_publish_deltas_each_of_its_own_file(make_job, make_groups, tmp_path):
    batches = [make_batch(make_groups(SCORES, seed=seed), "grpo", 0.9) for seed in range(3)]
    trainer = {**FSDP, "weights": {"fullEvery": 10}}
    slowly = {"optimizer": {"learningRate": 1e-5}}
    write_inputs(tmp_path, make_job({"model": {"dtype": "bfloat16"}, "algorithm": slowly, "trainer": trainer}), batches)
    run_ranks(run_rank, tmp_path, 2, "deltas")
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    published = pickle.loads((tmp_path / "published.pickle").read_bytes())
    for announcement, state in published:
        (whole := tmp_path / f"restored-{announcement.version}").mkdir()
        restore_version(Path(announcement.path), whole)
        assert weights_digest(whole) == announcement.digest
        loaded = {name: each for file in files for name, each in load_file(whole / file).items()}
        torch.testing.assert_close(loaded, state, atol=0, rtol=0)
        names = {path.name for path in Path(announcement.path).iterdir()}
        deltas = {f"{file}.delta" for file in files}
        assert names & {*files, *deltas} == {0: {*files}, 1: deltas, 2: {*files, *deltas}}[announcement.version.number]
    last = Path(published[-1][0].path)
    loaded = dict(AutoModelForCausalLM.from_pretrained(last, dtype=torch.bfloat16).state_dict())
    torch.testing.assert_close(loaded, published[-1][1], atol=0, rtol=0)


def test_replicas_load_what_one_rank_saved_and_two_ranks_what_replicas_saved(make_job, make_groups, tmp_path):
    batches = [make_batch(make_groups(SCORES), "grpo", 0.9)]
    one = build_model(make_job(SETTINGS))
    one.update(batches[0])
    save_checkpoint(tmp_path / "one", 1, one, {})
    write_inputs(tmp_path, make_job({**SETTINGS, "trainer": FSDP | REPLICAS}), batches)
    relayed(tmp_path, 4, tmp_path / "one" / "step-000001", 1, 1, tmp_path / "replicas")
    assert_stored_alike(tmp_path / "replicas" / "step-000001", tmp_path / "one" / "step-000001")
    # The replicas share the writing: no file holds the rows of another.
    sizes = [path.stat().st_size for path in (tmp_path / "replicas" / "step-000001").glob("rank-*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)
    write_inputs(tmp_path, make_job({**SETTINGS, "trainer": FSDP}), batches)
    relayed(tmp_path, 2, tmp_path / "replicas" / "step-000001", 1, 1, tmp_path / "two")
    assert_stored_alike(tmp_path / "two" / "step-000001", tmp_path / "one" / "step-000001")


def test_a_rank_that_dies_while_it_saves_leaves_the_checkpoint_before(make_job, make_groups, tmp_path):
    write_inputs(tmp_path, make_job({"trainer": FSDP}), [])
    ended = exit_codes(start_ranks(run_rank, tmp_path, 2, "dies"))
    assert (tmp_path / "saved-1").exists(), errors_in(tmp_path)
    assert not (tmp_path / "saved-2").exists()
    assert ended == [1, -9], errors_in(tmp_path)
    assert recovered_checkpoints(tmp_path / "checkpoints") == [tmp_path / "checkpoints" / "step-000001"]
    load_checkpoint(tmp_path / "checkpoints" / "step-000001", build_model(make_job({})))


def test_the_others_end_when_a_rank_dies(make_job, make_groups, tmp_path):
    write_inputs(tmp_path, make_job({"trainer": FSDP}), [make_batch(make_groups(SCORES), "grpo", 1.0)])
    leader, follower = start_ranks(run_rank, tmp_path, 2, "endless")
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "updated").exists() and leader.is_alive() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "updated").exists(), errors_in(tmp_path)
        follower.kill()
        leader.join(60)
        assert leader.exitcode == 1
    finally:
        end_ranks([leader, follower])
