"""Deltas of published weights: what is restored is bit by bit what was published."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import save_file

from plaudit_workers.weights.deltas import DeltaError, TensorDelta, as_bits, encode_deltas, read_deltas, restore
from plaudit_workers.weights.files import DTYPE_NAMES, bytes_of
from plaudit_workers.weights.published import weights_digest

BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SPECIAL = {
    torch.bfloat16: [0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F80],  # 0.0, -0.0, three NaNs, infinity
    torch.float16: [0x0000, 0x8000, 0x7E00, 0x7E01, 0xFFFF, 0x7C00],
    torch.float32: [0x0, 0x80000000, 0x7FC00000, 0x7FC00001, 0xFFFFFFFF, 0x7F800000],
}


@st.composite
def versions_of_a_tensor(draw):
    """A tensor of any published type and shape in four versions."""
    dtype = draw(st.sampled_from(sorted(DTYPE_NAMES, key=str)))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40))
    width = torch.empty((), dtype=dtype).element_size()
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    top = 2 if dtype is torch.bool else 1 << (8 * width - 1)
    bits = generator.integers(0, top, size=int(np.prod(shape)), dtype=np.uint64).astype(BITS[width])
    found = []
    for _ in range(4):
        found.append(torch.from_numpy(bits.copy().view(np.uint8)).view(dtype).reshape(shape))
        share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
        changed = generator.random(bits.size) < share
        news = SPECIAL.get(dtype, list(range(min(top, 256))))
        bits = np.where(changed, generator.choice(np.array(news, dtype=BITS[width]), bits.size), bits)
    return found


def publish(folder, tensors, before=None):
    """Writes whole files and, beside them, the delta to the version before."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    if before is not None:
        deltas = {name: delta_of(before[name], tensors[name]) for name in tensors}
        content = encode_deltas({name: delta for name, delta in deltas.items() if delta is not None})
        (folder / "model.safetensors.delta").write_bytes(content)
    return folder


def delta_of(old, new):
    return TensorDelta.between(*(as_bits(bytes_of(each), each.element_size()) for each in (old, new)))


@given(tensors=st.lists(versions_of_a_tensor(), min_size=1, max_size=4))
def test_any_tensors_are_restored_bit_by_bit_over_several_versions(tmp_path_factory, tensors):
    folder = tmp_path_factory.mktemp("weights")
    versions = [{f"t{number}": each[version] for number, each in enumerate(tensors)} for version in range(4)]
    folders = [
        publish(folder / str(number), version, versions[number - 1] if number else None)
        for number, version in enumerate(versions)
    ]
    local = folder / "local"
    local.mkdir()
    # A new copy from the first version, then in place to the last one.
    assert restore(folders[0], folders[1:3], local) == weights_digest(folders[2])
    assert restore(local, folders[3:], local) == weights_digest(folders[3])
    assert (local / "model.safetensors").read_bytes() == (folders[3] / "model.safetensors").read_bytes()


@pytest.mark.parametrize("distance", [1, 254, 255, 256, 510, 65_534, 65_535, 65_536, 200_000])
def test_positions_of_any_distance_are_kept(distance):
    old = np.zeros(3 * distance + 1, dtype=np.uint16)
    new = old.copy()
    new[::distance] = 0x8000
    delta = TensorDelta.between(old, new)
    delta.patch(old.size, old.itemsize).apply(old)
    np.testing.assert_array_equal(old, new)


def test_equal_tensors_have_no_delta_even_where_numbers_compare_as_different():
    nan = torch.tensor([float("nan"), 1.0])
    assert delta_of(nan, nan.clone()) is None
    assert delta_of(torch.tensor(0.0), torch.tensor(-0.0)) is not None


def test_one_changed_element_of_a_hundred_takes_about_three_bytes():
    old = np.arange(1_000_000, dtype=np.uint16)
    new = old.copy()
    new[np.random.default_rng(1).random(old.size) < 0.01] ^= 1
    delta = TensorDelta.between(old, new)
    assert delta.num_bytes < 3.5 * 0.0105 * old.size


def test_tensors_of_many_blocks_are_restored_and_unchanged_blocks_stay(tmp_path):
    old = {"long": torch.zeros(7_000_000, dtype=torch.bfloat16), "short": torch.ones(3)}
    new = {name: each.clone() for name, each in old.items()}
    new["long"][[0, 2_097_151, 2_097_152, 6_999_999]] = 1.0  # around the end of the first block of 4 MiB
    folders = publish(tmp_path / "1.0", old), publish(tmp_path / "1.1", new, old)
    assert restore(folders[0], [folders[1]], folders[0]) == weights_digest(folders[1])
    assert weights_digest(folders[0]) == weights_digest(folders[1])


@pytest.fixture
def two_versions(tmp_path):
    torch.manual_seed(1)
    old = {"a": torch.rand(50, 40).to(torch.bfloat16), "b": torch.rand(7)}
    new = {name: torch.where(torch.rand(each.shape) < 0.1, -each, each) for name, each in old.items()}
    return publish(tmp_path / "1.0", old), publish(tmp_path / "1.1", new, old)


def test_a_delta_of_other_weights_gives_another_digest(two_versions, tmp_path):
    old, new = two_versions
    other = publish(tmp_path / "other", {"a": torch.zeros(50, 40, dtype=torch.bfloat16), "b": torch.zeros(7)})
    (tmp_path / "local").mkdir()
    assert restore(old, [new], tmp_path / "local") == weights_digest(new)
    assert restore(other, [new], tmp_path / "local") != weights_digest(new)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-5]), id="torn"),
        pytest.param(lambda path: path.write_bytes(b""), id="empty"),
        pytest.param(lambda path: path.write_bytes(b"\xff" * 64), id="other bytes"),
        pytest.param(lambda path: path.write_bytes(encode_deltas(longer(read_deltas(path)))), id="beyond the tensor"),
        pytest.param(lambda path: path.write_bytes(encode_deltas(wider(read_deltas(path)))), id="of another type"),
        pytest.param(lambda path: path.unlink(), id="missing"),
    ],
)
def test_a_damaged_delta_is_refused(two_versions, tmp_path, damage):
    old, new = two_versions
    damage(new / "model.safetensors.delta")
    (tmp_path / "local").mkdir()
    with pytest.raises((DeltaError, OSError)):
        restore(old, [new], tmp_path / "local")


def longer(deltas):
    return {
        name: TensorDelta(np.append(each.gaps, np.uint8(255)), np.append(each.values, each.values[:1]))
        for name, each in deltas.items()
        if name == "a"
    }


def wider(deltas):
    return {name: TensorDelta(each.gaps, each.values.astype(np.uint64)) for name, each in deltas.items()}


def test_weights_cut_short_are_refused(two_versions, tmp_path):
    old, new = two_versions
    shutil.copytree(old, tmp_path / "short")
    path = tmp_path / "short" / "model.safetensors"
    for length in (3, 20, path.stat().st_size - 1):
        path.write_bytes((old / "model.safetensors").read_bytes()[:length])
        with pytest.raises(DeltaError):
            restore(tmp_path / "short", [new], tmp_path / "short")
