"""A tokenizer made for tests: single bytes and the special tokens of a model family, with any chat template."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = r"""
{%- if tools %}
{{- '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\n' }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""ChatML with Hermes's tool calls, as Qwen2.5 writes them."""

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def chat_tokenizer(
    template: str = CHATML, special: Sequence[str] = SPECIAL, eos: str = "<|im_end|>", bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are bytes, pairs of common letters, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("e", "r"), ("th", "e"), ("i", "n"), ('"', "}"), ('"}', "}"), ("Ċ", "Ċ"), (">", "Ċ")]
    vocabulary = {symbol: number for number, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    fast.chat_template = template
    return fast
