"""Files of a state: any number of readers gets what any number of writers wrote; damage and gaps are found."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from plaudit_workers.weights.files import ShardReader, TensorRows, write_rows
from plaudit_workers.weights.index import ShardError, ShardIndex, StateProgress, merged

PROGRESS = StateProgress(b"random", 3, {"a": 2})
SHAPES = [(), (1,), (0, 4), (7,), (13, 3), (5, 2, 2), (40, 1000)]
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16]


def tensors_of(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {
        f"t{number}": (torch.randn(shape) * 100).to(TYPES[(number + seed) % len(TYPES)])
        for number, shape in enumerate(SHAPES)
    }


def bounds(rows: int, ranks: int) -> list[tuple[int, int]]:
    """Rows of each rank as FSDP2 shards them; the last ranks may have none."""
    size = -(-rows // ranks)
    return [(min(rows, size * rank), min(rows, size * (rank + 1))) for rank in range(ranks)]


def write_state(folder: Path, tensors: dict[str, Tensor], ranks: int) -> None:
    parts = []
    for rank in range(ranks):
        rows = []
        for name, tensor in tensors.items():
            if tensor.dim() == 0:
                first, own = 0, tensor if rank == 0 else tensor[None][:0]
            else:
                first, end = bounds(tensor.shape[0], ranks)[rank]
                own = tensor[first:end].contiguous()
            if own.numel() or rank == 0:
                rows.append(TensorRows(name, own, first, tuple(tensor.shape)))
        parts.append(write_rows(folder / f"rank-{rank}.safetensors", rows))
    (folder / "policy.json").write_bytes(ShardIndex(PROGRESS, merged(parts)).encoded())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plaudit_workers.weights.files.BLOCK_BYTES", 64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("seed", range(12))
def test_any_rows_come_back_bit_by_bit_from_any_number_of_files(tmp_path: Path, seed: int) -> None:
    chance, tensors = random.Random(seed), tensors_of(seed)
    write_state(tmp_path, tensors, chance.randint(1, 9))
    reader = ShardReader(tmp_path)
    assert reader.index.progress == PROGRESS
    for name, tensor in tensors.items():
        assert reader.index.tensors[name].shape == tuple(tensor.shape)
        torch.testing.assert_close(reader.whole(name), tensor, atol=0, rtol=0, equal_nan=True)
        for _ in range(5):
            if tensor.dim():
                first, end = sorted(chance.choices(range(tensor.shape[0] + 1), k=2))
                assert torch.equal(reader.rows(name, first, end - first), tensor[first:end])


def test_each_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    tensors = tensors_of(1)
    write_state(tmp_path, tensors, 2)
    halves = [load_file(tmp_path / f"rank-{rank}.safetensors") for rank in range(2)]
    assert torch.equal(torch.cat([half["t4"] for half in halves]), tensors["t4"])


@pytest.mark.usefixtures("small_blocks")
def test_a_reader_reads_the_blocks_of_its_rows_only(tmp_path: Path) -> None:
    tensors = {"large": torch.randn(1000, 16)}
    write_state(tmp_path, tensors, 2)
    reader = ShardReader(tmp_path)
    reader.rows("large", 490, 20)
    assert reader.read_bytes == 20 * 64
    (tmp_path / "rank-1.safetensors").unlink()
    assert torch.equal(reader.rows("large", 0, 500), tensors["large"][:500])
    with pytest.raises(FileNotFoundError):
        reader.rows("large", 0, 501)


@pytest.mark.usefixtures("small_blocks")
def test_a_changed_byte_is_found_where_it_is_read_and_only_there(tmp_path: Path) -> None:
    tensors = {"large": torch.randn(100, 16)}
    write_state(tmp_path, tensors, 1)
    reader = ShardReader(tmp_path)
    content = bytearray((tmp_path / "rank-0.safetensors").read_bytes())
    content[reader.index.tensors["large"].slices[0].offset + 50 * 64 + 3] ^= 4
    (tmp_path / "rank-0.safetensors").write_bytes(content)
    assert torch.equal(reader.rows("large", 0, 50), tensors["large"][:50])
    with pytest.raises(ShardError, match=r"rank-0.safetensors is damaged at byte [\d,]+ \(large\)"):
        reader.rows("large", 0, 51)


def test_a_state_with_a_gap_or_an_overlap_is_refused(tmp_path: Path) -> None:
    tensor = torch.randn(6, 2)
    parts = [
        write_rows(tmp_path / f"{number}", [TensorRows("a", tensor[first:end].contiguous(), first, (6, 2))])
        for number, (first, end) in enumerate([(0, 2), (2, 4), (4, 6), (1, 3)])
    ]
    assert len(merged(parts[:3])["a"].slices) == 3
    for wrong, message in (
        ([0, 2], "rows 2 to 4 are missing"),
        ([0, 1], "4 of 6 rows"),
        ([0, 1, 2, 3], "written twice"),
    ):
        with pytest.raises(ShardError, match=message):
            merged([parts[number] for number in wrong])


def test_unknown_tensors_and_rows_and_a_damaged_index_are_refused(tmp_path: Path) -> None:
    write_state(tmp_path, {"a": torch.randn(3, 2)}, 1)
    reader = ShardReader(tmp_path)
    with pytest.raises(ShardError, match="b is missing"):
        reader.whole("b")
    with pytest.raises(ShardError, match="a has no rows 2 to 4"):
        reader.rows("a", 2, 2)
    index = msgspec.json.decode((tmp_path / "policy.json").read_bytes())
    index["tensors"]["a"]["slices"][0]["digests"] = []
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(index))
    with pytest.raises(ShardError, match="0 digests for 24 bytes"):
        ShardReader(tmp_path).whole("a")
    (tmp_path / "policy.json").write_text("{")
    with pytest.raises(ShardError, match=r"policy\.json is damaged"):
        ShardReader(tmp_path)


def test_a_rank_without_rows_writes_an_empty_file(tmp_path: Path) -> None:
    assert write_rows(tmp_path / "empty.safetensors", []) == {}
    assert load_file(tmp_path / "empty.safetensors") == {}
