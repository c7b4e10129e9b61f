import hashlib

import pytest

from plaudit_workers.published_weights import weights_digest


def test_the_digest_is_over_the_files_in_the_order_of_their_names(tmp_path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_bytes(b"not counted")
    assert weights_digest(tmp_path) == hashlib.sha256(b"firstsecond").hexdigest()


def test_a_folder_without_weights_has_no_digest(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        weights_digest(tmp_path)
