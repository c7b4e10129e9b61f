"""Pass a served model to a function as verl passes its reward model: the address of its router, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plaudit_reward.functions.target import ServedModel
from plaudit_wire.errors import ConfigurationError

ADDRESS, TOKENIZER = "reward_router_address", "reward_model_tokenizer"
SERVED_PARAMETERS = (ADDRESS, TOKENIZER)
"""verl's names. The address is ``host:port``; ``http://{reward_router_address}/v1/chat/completions`` answers."""


def served_arguments(served: ServedModel, accepted: Iterable[str]) -> dict[str, Any]:
    """Return the values of the parameters that a function accepts; the tokenizer is loaded only where it is accepted.

    Raises:
        ConfigurationError: the tokenizer cannot be loaded.
    """
    values: dict[str, Any] = {}
    for name in accepted:
        values[name] = served.address if name == ADDRESS else _tokenizer(served)
    return values


def _tokenizer(served: ServedModel) -> Any:
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            served.source, revision=served.revision, trust_remote_code=served.trust_remote_code
        )
    except Exception as error:  # transformers raises errors of many kinds
        raise ConfigurationError(
            f"{TOKENIZER}: the tokenizer of {served.source} cannot be loaded: {type(error).__name__}: {error}. It is "
            "that of python.serve, and transformers must be installed where the reward workers run"
        ) from error
