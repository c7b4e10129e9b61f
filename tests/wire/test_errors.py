"""What people read of an error."""

import pytest

from plaudit_wire.errors import ConfigurationError, JobFailedError, RefusedError


@pytest.mark.parametrize("kind", [RefusedError, ConfigurationError, JobFailedError])
@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            f"a.npz cannot be read: {ValueError('it is empty.')}. Write it again",
            "a.npz cannot be read: it is empty. Write",
        ),
        ("'x.'. Give another", "'x.'. Give another"),
        ("(see above.). Give", "(see above.). Give"),
        ("it said 'no'.. Give", "it said 'no'. Give"),
        ("and so on... Give", "and so on... Give"),
        ("the folder .. of a/.. is away", "the folder .. of a/.. is away"),
    ],
)
def test_no_message_ends_a_sentence_twice(kind: type[Exception], written: str, read: str) -> None:
    assert str(kind(written)).startswith(read)
