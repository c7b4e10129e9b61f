"""Count what a forward pass of Qwen2.5-7B's sizes saves for the backward pass: exact, without any device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from plaudit_reward.attention import PACKED_ATTENTION, PackedLayout
from plaudit_workers.training.model.head import TokenHead, forward_logits
from plaudit_workers.training.model.memory import checkpoint_layers
from plaudit_workers.training.model.sequence_parallel import HeadExchange

QWEN_7B = Qwen2Config(
    vocab_size=152_064,
    hidden_size=3584,
    intermediate_size=18_944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=32_768,
    tie_word_embeddings=False,
)


def saved_bytes(checkpointing: str, num_tokens: int, group: dist.ProcessGroup | None = None) -> tuple[float, int]:
    """Bytes a token that a pass over one sequence saves on one rank, and the largest saved tensor.

    Args:
        checkpointing: ``trainer.activationCheckpointing``.
        num_tokens: of the sequence, a multiple of the ranks of the group.
        group: the ranks that compute the sequence together; None: one does.
    """
    further = None if group is None else {"token_exchange": HeadExchange(group, num_tokens)}
    own_tokens = num_tokens if group is None else num_tokens // dist.get_world_size(group)
    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(
            QWEN_7B, attn_implementation=PACKED_ATTENTION, dtype=torch.bfloat16
        ).eval()
        ids = torch.zeros(1, own_tokens, dtype=torch.long)
        places = torch.arange(own_tokens)
    head = TokenHead(model, chunked=True)
    checkpoint_layers(model, checkpointing, torch.device("cuda"))
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor),
        head.reducing(ids[0], 1.0, entropy="figure"),
    ):
        forward_logits(model, ids, places[None], PackedLayout.of([num_tokens]), places, further)
    sizes = [storage.nbytes() for storage in storages.values()]
    return sum(sizes) / num_tokens, max(sizes)
