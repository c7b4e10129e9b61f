"""Published weights in several files: balanced, hashed while they are written, read by their index."""

from __future__ import annotations

import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from plaudit_wire.messages import PolicyVersion
from plaudit_workers.training.model.policy_model import build_model
from plaudit_workers.training.model.weight_offer import shapes_of
from plaudit_workers.training.publish import write_weights
from plaudit_workers.weights.files import WeightFiles
from plaudit_workers.weights.published import combined_digest, weights_digest
from plaudit_workers.weights.send import TensorShape
from whole_state import full_state

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def written(files, folder, tensors):
    """The digests of the files that the ranks write."""
    digests = {}
    for rank in range(len(files.files) + 1):
        digests |= files.write_own(folder, rank, ((name, tensors[name]) for name in files.order))
    for name, content in files.index().items():
        (folder / name).write_bytes(content)
    return digests


@given(sizes=st.lists(st.integers(0, 10_000), min_size=1, max_size=40), num_files=st.integers(1, 9))
def test_files_are_balanced_by_bytes_and_hold_each_tensor_once(sizes, num_files):
    tensors = [TensorShape(f"t{number}", "BF16", (size,)) for number, size in enumerate(sizes)]
    files = WeightFiles.plan(tensors, "model.safetensors", num_files)
    assert len(files.files) == min(num_files, len(sizes))
    assert sorted(tensor for file in files.files for tensor in file.tensors) == sorted(tensors)
    of_file = [sum(tensor.num_bytes for tensor in file.tensors) for file in files.files]
    assert max(of_file) - min(of_file) <= 2 * max(sizes)
    assert all(file.tensors for file in files.files)
    assert sorted(files.order) == sorted(tensor.name for tensor in tensors)


@pytest.mark.parametrize("num_files", [1, 2, 5])
def test_the_files_hold_the_tensors_and_have_the_digests(tmp_path, num_files):
    torch.manual_seed(1)
    tensors = {f"t{number}": (torch.rand(number, 3) * 99).to(DTYPES[number % 3]) for number in range(7)}
    tensors["scalar"] = torch.tensor(2.5)
    files = WeightFiles.plan(shapes_of(tensors, torch.bfloat16), "model.safetensors", num_files)
    digests = written(files, tmp_path, tensors)
    assert len(digests) == num_files
    assert weights_digest(tmp_path) == combined_digest(digests)
    found = {name: each for file in digests for name, each in load_file(tmp_path / file).items()}
    expected = {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in tensors.items()}
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_several_files_are_named_by_an_index_and_load_as_a_model(make_job, tmp_path):
    policy = build_model(make_job({}))
    tensors = full_state(policy)
    files = WeightFiles.plan(shapes_of(tensors, torch.float32), "model.safetensors", 3)
    written(files, tmp_path, tensors)
    for name, content in policy.files().items():
        (tmp_path / name).write_bytes(content)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert index["metadata"]["total_size"] == sum(each.numel() * 4 for each in tensors.values())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(dict(loaded.state_dict()), tensors, atol=0, rtol=0)


def test_one_rank_publishes_one_file_without_an_index(make_job, tmp_path):
    announcement = write_weights(build_model(make_job({})), tmp_path, PolicyVersion(1, 0))
    names = os.listdir(tmp_path / "1.0")
    assert [name for name in names if "safetensors" in name] == ["model.safetensors"]
    assert announcement.digest == weights_digest(tmp_path / "1.0")


def test_a_file_that_cannot_be_written_fails_after_all_tensors_were_gathered(tmp_path):
    tensors = {name: torch.rand(4) for name in "abc"}
    files = WeightFiles.plan(shapes_of(tensors, torch.float32), "model.safetensors", 1)
    taken = []

    def gathered():
        for name in files.order:
            taken.append(name)
            yield name, tensors[name]

    with pytest.raises(FileNotFoundError):
        files.write_own(tmp_path / "absent", 0, gathered())
    assert sorted(taken) == ["a", "b", "c"]
