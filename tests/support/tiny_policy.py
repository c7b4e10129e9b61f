"""A tiny policy for vLLM on a CPU, and its log-probabilities computed by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

EOS = 14


def make_tiny_policy(
    symbols: Sequence[str], seed: int, *, bos: str | None = None, **sizes: Any
) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a random 2-layer Qwen2 and its tokenizer, not saved yet (both are made in milliseconds).

    Args:
        symbols: one token each; among them ``<pad>``, ``<unk>``, ``<eos>`` at ``EOS``, and ``bos``.
        seed: of the weights.
        bos: the symbol at the beginning of a text.
        **sizes: of the model's configuration.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"} | ({"bos_token": bos} if bos else {})
    config = Qwen2Config(
        vocab_size=len(symbols),
        num_hidden_layers=2,
        num_attention_heads=4,
        eos_token_id=EOS,
        bos_token_id=None,
        **sizes,
    )
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(config), PreTrainedTokenizerFast(tokenizer_object=words, **special)


def save_tiny_model(folder: Path, seed: int, *, tied: bool = False) -> Path:
    """Writes a 2-layer, 128-wide Qwen2 of 16 symbols whose weights are large enough that versions differ visibly."""
    import torch
    from tokenizers import decoders

    model, tokenizer = make_tiny_policy(
        [*"0123456789+=", "<pad>", "<bos>", "<eos>", "<unk>"],
        seed,
        bos="<bos>",
        hidden_size=128,
        intermediate_size=256,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()
    with torch.no_grad():
        model.lm_head.weight *= 2.5
        model.lm_head.weight[EOS] = 0.0  # an improbable end at temperature 1: most responses are long
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def reference_logprobs(
    folder: Path, prompt: list[int], response: list[int], temperature: float = 1.0, top_k: int = -1
) -> list[float]:
    """Return transformers\' log-probabilities of a response after a prompt under a folder\'s weights."""
    import torch
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    if top_k > 0:
        smallest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    chosen = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(response)[:, None])
    found: list[float] = chosen[:, 0].tolist()
    return found
