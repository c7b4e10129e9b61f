"""Choose the text whose log-probabilities show whether a rollout loaded the published weights.

A text, not arbitrary ids: a language model gives arbitrary ids logits far apart, and bfloat16 rounds a logit of 16 to
32 in steps of 0.125. Mean differences between two bfloat16 forward passes of a 16-layer model with logits up to 37 were
0.05-0.08 nats over likely tokens and 0.09 over arbitrary ones; a replaced layer gave 0.6 and more, a replaced head 11.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

PROBE_LIMITS = {"bfloat16": 0.3, "float16": 0.05, "float32": 0.05}
"""``model.dtype`` → mean absolute difference in nats above which weights are refused: several times the rounding of two
correct passes, half of a wrong layer."""

MAX_PROBE_TOKENS = 64
_MIN_PROBE_TOKENS = 16
_STRIDE = 7919
"""A prime: arbitrary ids are spread over the vocabulary."""
_TEXT = (
    "Tom has 12 apples. He gives 5 of them to his sister and buys 8 more at the market. How many apples does he have "
    "now? After the gift he has 12 - 5 = 7 apples, and 7 + 8 = 15. So the answer is 15."
)


def probe_ids(tokenizer: PreTrainedTokenizerBase, vocabulary: int, longest: int) -> list[int]:
    """Return the token ids of the text, at most ``MAX_PROBE_TOKENS``.

    Args:
        tokenizer: one that makes fewer than 16 tokens of the text gets arbitrary ids.
        vocabulary: rows of the embedding.
        longest: tokens that the engine accepts.
    """
    ids = [token for token in tokenizer(_TEXT)["input_ids"] if token < vocabulary]
    if len(ids) < _MIN_PROBE_TOKENS:
        ids = [(number * _STRIDE + 1) % min(len(tokenizer), vocabulary) for number in range(_MIN_PROBE_TOKENS)]
    return ids[: min(MAX_PROBE_TOKENS, longest)]
