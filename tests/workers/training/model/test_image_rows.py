"""Rows with images: packed as single, trained with the vision tower, saved, published and exported whole."""

from __future__ import annotations

import argparse
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2Config, Qwen2ForCausalLM

from builders import make_body, make_prompt
from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import PolicyVersion
from plaudit_wire.records import Stamps
from plaudit_workers.images import ImageStore
from plaudit_workers.stream.groups import Group, GroupSample
from plaudit_workers.training.backend import TorchBackend
from plaudit_workers.training.checkpoint import load_checkpoint
from plaudit_workers.training.export import export
from plaudit_workers.training.model.batch import TrainingBatch
from plaudit_workers.training.model.checks import ImageRows, busy_sequence, refuse_unpackable_images
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.publish import write_weights
from tiny_vision import save_vision_policy
from vision_policy import opened, random_batch, vision_job
from whole_state import full_state, save_checkpoint

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    return save_vision_policy(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def begin(vision_model, tmp_path):
    """``begin(**trainer)``: job, processor, prompts and policy."""

    def build(**trainer):
        job = vision_job(vision_model, tmp_path, trainer={"microBatchTokens": 512} | trainer)
        images, rows = opened(job, tmp_path)
        return job, images, rows, build_model(job, images=images)

    return build


@pytest.mark.long
def test_a_packed_row_gives_what_its_sequences_give_alone(begin):
    _, images, rows, packed = begin()
    *_, single = begin(microBatchTokens=1)
    batch = random_batch(images, rows, seed=1)
    for together, alone in zip(packed.logprobs(batch), single.logprobs(batch), strict=True):
        assert np.abs(together - alone).max() < 1e-5
    figures = [policy.update(batch) for policy in (packed, single)]
    assert figures[0]["actor/grad_norm"] == pytest.approx(figures[1]["actor/grad_norm"], rel=1e-4)
    states = [full_state(policy) for policy in (packed, single)]
    torch.testing.assert_close(states[0], states[1], atol=1e-4, rtol=1e-3)


def test_packed_rows_give_what_transformers_gives(begin, vision_model):
    _, images, rows, policy = begin()
    batch = random_batch(images, rows, seed=2)
    model = AutoModelForImageTextToText.from_pretrained(vision_model, dtype=torch.float32)
    for each, found in zip(batch.sequences, policy.logprobs(batch), strict=True):
        if images.token_id in each.response_ids:
            continue  # transformers takes every such token for an image
        ids = torch.from_numpy(np.concatenate([each.prompt_ids, each.response_ids])).long()[None]
        pixels = [images.pixels(digest) for digest in each.images]
        further = {}
        if pixels:
            further = {
                "pixel_values": torch.cat([one.values for one in pixels]),
                "image_grid_thw": torch.cat([one.grid for one in pixels]),
                "mm_token_type_ids": (ids == images.token_id).int(),
            }
        with torch.no_grad():
            logits = model(input_ids=ids, **further).logits[0, each.prompt_ids.size - 1 : -1]
        chosen = ids[0, each.prompt_ids.size :, None]
        expected = logits.log_softmax(-1).gather(1, chosen)[:, 0].numpy()
        assert np.abs(expected - found).max() < 1e-4


def test_an_update_trains_the_vision_tower_where_there_are_images(begin):
    _, images, rows, policy = begin()
    before = full_state(policy)
    text = random_batch(images, [row for row in rows if not row.images], seed=3)
    assert policy.update(text)["actor/skipped_updates"] == 0
    after_text = full_state(policy)
    policy.update(random_batch(images, rows, seed=3))
    after_images = full_state(policy)
    tower = [name for name in before if "visual" in name]
    assert tower
    assert all(torch.equal(before[name], after_text[name]) for name in tower)
    changed = [name for name in tower if not torch.equal(after_text[name], after_images[name])]
    assert len(changed) == len(tower)


def test_the_pixels_of_an_image_change_the_policys_view(begin):
    _, images, rows, policy = begin()
    batch = random_batch(images, [rows[0], rows[0]], seed=4, copies=1)
    other = images.add(images.store.read(rows[1].images[1]))
    same_size = [digest for row in rows for digest in row.images if images.num_tokens(digest) == 12]
    assert rows[0].images[0] in same_size
    assert other not in same_size
    first = policy.logprobs(batch)[0]
    swapped = policy.logprobs(
        TrainingBatch((replace(batch.sequences[0], images=(_turned(images, rows[0].images[0]),)),), 1.0, {})
    )[0]
    assert np.abs(first - swapped).max() > 1e-3


def _turned(images, digest):
    """The digest of the same image upside down."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.open(io.BytesIO(images.store.read(digest))).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(file, "PNG")
    return images.add(file.getvalue())


@pytest.mark.long
def test_a_checkpoint_resumes_bit_for_bit(begin, tmp_path):
    _, images, rows, through = begin()
    batches = [random_batch(images, rows, seed) for seed in range(3)]
    through.update(batches[0])
    path = save_checkpoint(tmp_path / "checkpoints", 1, through, {})
    for batch in batches[1:]:
        through.update(batch)
    *_, resumed = begin()
    load_checkpoint(path, resumed)
    for batch in batches[1:]:
        resumed.update(batch)
    torch.testing.assert_close(full_state(resumed), full_state(through), atol=0, rtol=0)


@pytest.mark.long
def test_published_weights_and_exports_are_whole_models(begin, tmp_path, vision_model):
    job, images, rows, policy = begin()
    policy.update(random_batch(images, rows, seed=5))
    run = tmp_path / "run"
    write_weights(policy, run / "weights", PolicyVersion(1, 1))
    save_checkpoint(run / "checkpoints", 1, policy, {})
    (run / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json", by_alias=True, exclude_none=True)))
    outputs = {"version": tmp_path / "version", "step": tmp_path / "step"}
    shared = {"run": run, "runs_folder": tmp_path}
    export(argparse.Namespace(**shared, output=outputs["version"], step=None, version=""))
    export(argparse.Namespace(**shared, output=outputs["step"], step=1, version=""))
    expected = full_state(policy)
    for folder in outputs.values():
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        torch.testing.assert_close(dict(model.state_dict()), expected, atol=0, rtol=0)
        found = AutoProcessor.from_pretrained(folder)
        assert type(found) is type(AutoProcessor.from_pretrained(vision_model))
        assert found.image_processor.to_dict() == AutoProcessor.from_pretrained(vision_model).image_processor.to_dict()
        assert found.tokenizer.chat_template == images_template(images)


def images_template(images):
    return images._processor.chat_template


def group_of(row, prompt_ids):
    """A scored group whose two samples came back with these prompts."""
    prompt = make_prompt("t-0-1.0", 2, prompt_ids=row.prompt_ids)
    prompt = msgspec.structs.replace(prompt, images=list(row.images))
    samples = []
    for index in range(2):
        body = make_body(prompt, index, "ab", [3, 4])
        body = msgspec.structs.replace(body, prompt_ids=np.asarray(prompt_ids, "<i4").tobytes())
        samples.append(GroupSample(index, Stamps(1.0, 1.1, 1.5, None, 1.6, 1.7), body, "digest", None))
    return Group("t-0-1.0", "ready", prompt, samples, 1, 1.0, 1.8, 1.9)


def test_a_rollout_that_makes_other_tokens_of_an_image_ends_the_run(begin, tmp_path):
    job, images, rows, policy = begin()
    backend = TorchBackend(job, policy, tmp_path)
    expanded = images.expand(np.frombuffer(rows[0].prompt_ids, "<i4"), rows[0].images)
    backend.update([group_of(rows[0], expanded)])
    fewer = expanded[expanded != images.token_id].tolist()
    for other in (fewer, [], [*expanded[::-1].tolist()]):
        with pytest.raises(RefusedError, match=r"group t-0-1\.0: vLLM made (0|12) tokens .*, the trainer 12"):
            backend.update([group_of(rows[0], other)])


def test_a_rank_without_images_computes_some_where_another_has_them(begin):
    _, images, rows, _ = begin()
    sequences = random_batch(images, rows, seed=6, copies=1).sequences
    text, one, two = 2, 0, 1
    assert busy_sequence(sequences, [text], [[text], [one]]) == one
    assert busy_sequence(sequences, [text], [[text], [two]]) == one
    assert busy_sequence(sequences, [one], [[one], [two]]) is None
    assert busy_sequence(sequences, [text], [[text], [text]]) is None
    assert busy_sequence(sequences, [], [[], [one]]) == one  # the shortest sequence, which has no images, stands in


def test_an_image_that_vanishes_from_the_run_is_named(begin, tmp_path):
    _, images, rows, policy = begin()
    store = ImageStore(tmp_path)
    store.path(rows[0].images[0]).unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        policy.update(random_batch(images, rows, seed=7))


def test_a_model_whose_sequences_see_each_other_in_a_row_is_refused(begin, vision_model):
    _, images, _, _ = begin()
    leaking = AutoModelForImageTextToText.from_pretrained(vision_model, dtype=torch.float32)  # plain causal attention
    with pytest.raises(RefusedError, match=r"type 'qwen2_5_vl' cannot be trained with images: logits change by"):
        refuse_unpackable_images(leaking, ImageRows(images, leaking), torch.device("cpu"))


def test_a_model_without_positions_of_images_is_refused(begin):
    _, images, _, _ = begin()
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    with pytest.raises(RefusedError, match=r"type 'qwen2' has no positions of images in three dimensions"):
        ImageRows(images, model)
