"""A tiny model with a vision tower, and its processor: a Qwen2.5-VL of 2 + 2 layers with random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tiny_model import character_tokenizer
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils.logging import disable_progress_bar

IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
PATCH = 14
"""Pixels of a patch's side; 2 x 2 patches are one token of the language model."""
_WIDTH = 128


def save_tiny_vision_model(
    folder: Path, symbols: Sequence[str], *, seed: int, spread: float = 0.02, tied: bool = False
) -> None:
    """Writes the model, its tokenizer of single characters and its processor, the way ``save_pretrained`` does.

    Args:
        folder: made if it is not there; what is in it is replaced.
        symbols: the characters that the model knows; all others are left out.
        seed: of the weights.
        spread: standard deviation of the weights.
        tied: the output head is the embedding.
    """
    tokenizer = character_tokenizer(symbols, TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    configuration = Qwen2_5_VLConfig(
        text_config=_language(len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id, spread, tied=tied),
        vision_config=_vision(spread),
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    disable_progress_bar()
    Qwen2_5_VLForConditionalGeneration(configuration).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _save_image_processor(folder)


def _language(vocabulary: int, bos: int, eos: int, spread: float, *, tied: bool) -> dict[str, object]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": _WIDTH,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "initializer_range": spread,
        # Of the 16 pairs of a head: how many turn by an image's time, height and width.
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": tied,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }


def _vision(spread: float) -> dict[str, object]:
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": _WIDTH,
        "patch_size": PATCH,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [1],
        "initializer_range": spread,
    }


def _save_image_processor(folder: Path) -> None:
    side = 4 * PATCH
    Qwen2VLImageProcessorPil(min_pixels=side * side, max_pixels=16 * side * side).save_pretrained(folder)
    path = folder / "preprocessor_config.json"
    names = {"processor_class": "Qwen2_5_VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    path.write_text(json.dumps(json.loads(path.read_text()) | names, indent=2))
