"""Published weights: a model folder that engines read, a digest, a probe; deleted only when nobody needs them."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit_wire.errors import RefusedError
from plaudit_wire.messages import Announcement, PolicyVersion, Transfer, TransferPart
from plaudit_workers.training.model.batch import make_batch
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.publish import (
    offer_weights,
    prune_weights,
    published_versions,
    write_offered,
    write_weights,
)
from plaudit_workers.weights.published import weights_digest
from plaudit_workers.weights.receive import Reception
from plaudit_workers.weights.send import (
    GO,
    MAX_CONTENTS_BYTES,
    NONCE_BYTES,
    TransferError,
    WeightPart,
    WeightServer,
    make_request,
    receive_bytes,
    receive_frame,
    send_frame,
)
from whole_state import full_state


def test_published_weights_load_as_a_model_and_answer_the_probe(make_job, tmp_path):
    policy = build_model(make_job({}))
    announcement = write_weights(policy, tmp_path, PolicyVersion(2, 7))
    folder = tmp_path / "2.7"
    assert announcement.version == PolicyVersion(2, 7)
    assert announcement.path == str(folder)
    assert os.listdir(tmp_path) == ["2.7"]

    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(dict(model.state_dict()), full_state(policy), atol=0, rtol=0)
    assert AutoTokenizer.from_pretrained(folder).decode([1, 2, 10]).replace(" ", "") == "12="
    probe = json.loads((folder / "probe.json").read_text())
    ids = torch.tensor(probe["ids"])
    with torch.no_grad():
        logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    assert probe["logprobs"] == pytest.approx(logprobs[:-1].gather(1, ids[1:, None])[:, 0].tolist(), abs=1e-5)


def test_the_digest_is_that_of_the_files(make_job, tmp_path):
    announcement = write_weights(build_model(make_job({})), tmp_path, PolicyVersion(1, 0))
    assert announcement.digest == weights_digest(tmp_path / "1.0")


def test_tied_weights_are_published_once_and_load(make_job, model_folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tied = tmp_path / "tied"
    model.config.tie_word_embeddings = True
    type(model)(model.config).save_pretrained(tied)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tied)
    policy = build_model(make_job({"model": {"source": str(tied)}}))
    write_weights(policy, tmp_path / "weights", PolicyVersion(1, 0))
    assert "lm_head.weight" not in full_state(policy)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "1.0")
    assert torch.equal(loaded.lm_head.weight, full_state(policy)["model.embed_tokens.weight"])


def test_publishing_moves_the_proximal_policy_along(make_job, make_groups, tmp_path):
    settings = {"promptsPerStep": 4, "miniBatchesPerStep": 2, "loss": {"correction": "decoupled"}}
    policy = build_model(make_job({"algorithm": {**settings, "optimizer": {"learningRate": 0.1}}}))
    batch = make_batch(make_groups([[0.0, 1.0], [1.0, 0.0]]), "grpo", 1.0)
    policy.update(batch)
    assert policy.update(batch)["actor/pg_clipfrac"] > 0
    write_weights(policy, tmp_path, PolicyVersion(1, 1))
    assert policy.update(batch)["actor/pg_clipfrac"] == 0


def test_offered_weights_are_those_of_files_and_can_be_written_as_files(make_job, tmp_path):
    policy = build_model(make_job({}))
    version = PolicyVersion(1, 3)
    announcement = offer_weights(policy, version, "token", "redis://127.0.0.1")
    assert announcement.path == ""
    assert os.listdir(tmp_path) == []
    with Reception(version, announcement.transfer) as reception:
        received = load_file(reception.receive() / "model.safetensors")
    torch.testing.assert_close(received, full_state(policy), atol=0, rtol=0)

    written = write_offered(announcement, policy.files(), tmp_path)
    assert written.digest == weights_digest(tmp_path / "1.3")
    assert written.transfer == announcement.transfer
    files = write_weights(policy, tmp_path, PolicyVersion(1, 4))
    assert sorted(os.listdir(written.path)) == sorted(os.listdir(files.path))
    assert (tmp_path / "1.3" / "probe.json").read_bytes() == (tmp_path / "1.4" / "probe.json").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(written.path)
    torch.testing.assert_close(dict(model.state_dict()), received, atol=0, rtol=0)
    policy.close()


def test_offered_weights_do_not_change_with_the_next_update(make_job, make_groups, tmp_path):
    policy = build_model(make_job({"algorithm": {"optimizer": {"learningRate": 0.1}}}))
    before = full_state(policy)
    announcement = offer_weights(policy, PolicyVersion(1, 0), "token", "redis://127.0.0.1")
    policy.update(make_batch(make_groups([[0.0, 1.0], [1.0, 0.0]]), "grpo", 1.0))
    with Reception(PolicyVersion(1, 0), announcement.transfer) as reception:
        received = load_file(reception.receive() / "model.safetensors")
    torch.testing.assert_close(received, before, atol=0, rtol=0)
    offer_weights(policy, PolicyVersion(1, 1), "token", "redis://127.0.0.1")
    with pytest.raises(TransferError, match="closed the connection"):
        write_offered(announcement, {}, tmp_path)
    assert os.listdir(tmp_path) == []
    policy.close()


def test_a_transfer_ends_when_its_version_would_be_the_third_in_memory(make_job):
    policy = build_model(make_job({}))
    versions = [PolicyVersion(1, number) for number in range(4)]
    host, _, port = (
        offer_weights(policy, versions[0], "token", "redis://127.0.0.1").transfer.parts[0].address.rpartition(":")
    )
    slow = []
    for version, following in itertools.pairwise(versions):
        slow.append(socket.create_connection((host, int(port)), timeout=20))
        nonce = receive_bytes(slow[-1], NONCE_BYTES)
        send_frame(slow[-1], make_request("token", nonce, version))
        receive_frame(slow[-1], MAX_CONTENTS_BYTES)
        offer_weights(policy, following, "token", "redis://127.0.0.1")
    for connection in slow[:-1]:
        assert connection.recv(1) == b""
    slow[-1].sendall(GO)
    assert slow[-1].recv(1) != b""
    for connection in slow:
        connection.close()
    policy.close()


@pytest.fixture
def offered():
    """A version that is offered from memory, without a model; 20 MB."""
    content, server = memoryview(bytes(20 << 20)), WeightServer()
    part, version = WeightPart.of([(0, content)], b"probe"), PolicyVersion(1, 2)
    server.offer(version, "token", part)
    parts = [TransferPart(f"127.0.0.1:{server.port}", part.digest)]
    yield Announcement(version, "", "", Transfer("token", len(content), parts))
    server.close()


def test_files_of_offered_weights_need_no_memory_for_a_second_copy(offered, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(os, "memfd_create", refuse)
    written = write_offered(offered, {"config.json": b"{}"}, tmp_path)
    assert {path.name: path.stat().st_size for path in Path(written.path).iterdir()} == {
        "config.json": 2,
        "model.safetensors": offered.transfer.num_bytes,
        "probe.json": 5,
    }
    assert written.digest == weights_digest(Path(written.path))


def test_a_full_disk_ends_the_writing_of_offered_weights(offered, tmp_path, small_files_only):
    with small_files_only(10 << 20), pytest.raises(RefusedError, match=r"no room for .*1\.2"):
        write_offered(offered, {}, tmp_path)
    assert os.listdir(tmp_path) == []


def publish_empty(folder, *names):
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").touch()


def test_the_newest_two_and_those_in_use_stay(tmp_path):
    publish_empty(tmp_path, "1.0", "1.1", "1.2", "1.10", "2.3", "2.4")
    (tmp_path / ".incomplete-2.5").mkdir()
    (tmp_path / "notes.txt").touch()
    assert prune_weights(tmp_path, ["1.1", "", "2.4"]) == [
        PolicyVersion(1, 0),
        PolicyVersion(1, 2),
        PolicyVersion(1, 10),
    ]
    assert sorted(os.listdir(tmp_path)) == ["1.1", "2.3", "2.4", "notes.txt"]
    assert published_versions(tmp_path) == [PolicyVersion(1, 1), PolicyVersion(2, 3), PolicyVersion(2, 4)]


def test_pruning_unpublished_weights_has_no_effect(tmp_path):
    publish_empty(tmp_path, "1.0", "1.1")
    assert prune_weights(tmp_path) == []
    assert prune_weights(tmp_path / "absent") == []


def test_a_full_disk_leaves_no_half_version(make_job, tmp_path, small_files_only):
    policy = build_model(make_job({}))
    policy.files()
    with small_files_only(10_000), pytest.raises(RefusedError, match=r"no room for .*1\.0"):
        write_weights(policy, tmp_path, PolicyVersion(1, 0))
    assert os.listdir(tmp_path) == []
