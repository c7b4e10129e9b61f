import hashlib

import pytest

from plaudit_workers.weights.published import combined_digest, weights_digest


def test_the_digest_is_over_the_digests_of_the_files_in_the_order_of_their_names(tmp_path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"second")
    (tmp_path / "a.safetensors").write_bytes(b"first")
    (tmp_path / "config.json").write_bytes(b"not counted")
    first, second = (hashlib.sha256(content).hexdigest() for content in (b"first", b"second"))
    lines = f"{first}  a.safetensors\n{second}  b.safetensors\n"
    assert weights_digest(tmp_path) == hashlib.sha256(lines.encode()).hexdigest()
    assert weights_digest(tmp_path) == combined_digest({"b.safetensors": second, "a.safetensors": first})


def test_files_that_exchange_their_contents_have_another_digest(tmp_path) -> None:
    digests = []
    for contents in ((b"1", b"2"), (b"2", b"1")):
        for name, content in zip("ab", contents, strict=True):
            (tmp_path / f"{name}.safetensors").write_bytes(content)
        digests.append(weights_digest(tmp_path))
    assert digests[0] != digests[1]


def test_a_folder_without_weights_has_no_digest(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        weights_digest(tmp_path)
