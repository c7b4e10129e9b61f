"""A tiny policy for vLLM on a CPU, and its log-probabilities computed by transformers."""

from __future__ import annotations

from pathlib import Path

EOS = 14


def save_tiny_model(folder: Path, seed: int, *, tied: bool = False) -> Path:
    """Writes a 2-layer, 128-wide Qwen2 of 16 symbols whose weights are large enough that versions differ visibly."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    symbols = [*"0123456789+=", "<pad>", "<bos>", "<eos>", "<unk>"]
    vocabulary = {symbol: number for number, symbol in enumerate(symbols)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=16,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=tied,
            eos_token_id=EOS,
        )
    )
    with torch.no_grad():
        model.lm_head.weight *= 2.5
        model.lm_head.weight[EOS] = 0.0  # an improbable end at temperature 1: most responses are long
    model.save_pretrained(folder)
    return folder


EOS = 14


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
