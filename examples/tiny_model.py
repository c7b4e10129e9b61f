"""A tiny language model, a tiny reward model and a tokenizer of single characters: what the examples use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

SPECIAL = ("<pad>", "<bos>", "<eos>")
AGENT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
"""Conversations with tools, without the tools' descriptions: only trying shows the model what its calls are worth."""


def tool_call(name: str, **arguments: object) -> str:
    """Return a call as models write it.

    As one of the ``whole_tokens`` of a tiny model it can be chosen and not misspelled.
    """
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def save_tiny_model(
    folder: Path,
    symbols: Sequence[str],
    template: str,
    *,
    max_length: int,
    seed: int,
    whole_tokens: Sequence[str] = (),
) -> None:
    """Writes a Qwen2 of 2 layers, 128 wide, with random weights, and its tokenizer, the way ``save_pretrained`` does.

    Args:
        folder: made if it is not there; what is in it is replaced.
        symbols: the characters that the model knows; all others are left out.
        template: Jinja, from messages to text.
        max_length: tokens of prompt and response together.
        seed: of the weights.
        whole_tokens: texts that are one token each.
    """
    tokenizer = character_tokenizer(symbols, template)
    tokenizer.add_tokens(list(whole_tokens))
    torch.manual_seed(seed)
    # Tied embeddings leave vLLM's CPU backend with a stale head after new weights are loaded.
    configuration = _configuration(tokenizer, max_length, tie_word_embeddings=False)
    disable_progress_bar()
    Qwen2ForCausalLM(configuration).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny_classifier(
    symbols: Sequence[str], template: str, *, max_length: int, seed: int
) -> tuple[Qwen2ForSequenceClassification, Qwen2Tokenizer]:
    """A model of the same size with one output in place of a vocabulary, random, and its tokenizer; not saved yet.

    Args:
        symbols: the characters that the model knows; all others are left out.
        template: Jinja, from messages to text.
        max_length: tokens of prompt and response together.
        seed: of the weights.
    """
    tokenizer = character_tokenizer(symbols, template)
    torch.manual_seed(seed)
    return Qwen2ForSequenceClassification(_configuration(tokenizer, max_length, num_labels=1)), tokenizer


def _configuration(tokenizer: Qwen2Tokenizer, max_length: int, **further: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **further,
    )


def character_tokenizer(symbols: Sequence[str], template: str) -> Qwen2Tokenizer:
    """A Qwen2 tokenizer without merges: one symbol, one token; what is not in its vocabulary is left out."""
    in_its_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    letters = [in_its_alphabet(symbol)[0][0] for symbol in symbols]
    vocabulary = {letter: number for number, letter in enumerate([*letters, *SPECIAL])}
    pad, bos, eos = SPECIAL
    return Qwen2Tokenizer(
        vocab=vocabulary, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=None, chat_template=template
    )
