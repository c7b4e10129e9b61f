"""The model, batch and settings that all sides of ``train_step`` compute, without the packages that read a job.

The settings are the defaults of a job (a test compares them), in the form in which the trainer's functions read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from plaudit_job.model_shape import ModelShape
from plaudit_workers.commands.sizing import trainer_parts
from plaudit_workers.training.model.losses import TokenInputs, policy_loss


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
    }


SIZES = {
    "tiny": _sizes(64, 128, 2, 4, 2),
    "0.5b": _sizes(896, 4864, 24, 14, 2),
    "1.5b": _sizes(1536, 8960, 28, 12, 2),
    "3b": _sizes(2048, 11_008, 36, 16, 2),
    "7b": _sizes(3584, 18_944, 28, 28, 4),
}
"""Of Qwen2.5. A parameter takes 18 bytes: ``3b`` fits 80 GB, ``7b`` no single GPU of up to 141 GB."""
LOSS = SimpleNamespace(
    kind="ppo",
    clip_low=0.2,
    clip_high=0.28,
    clip_ratio_c=3.0,
    aggregation="token",
    kl_coefficient=0.0,
    entropy_coefficient=0.0,
    correction="tis",
    correction_cap=2.0,
    correction_floor=0.0,
    correction_level="token",
    has_kl_term=False,
    penalises_reward=False,
)
"""``algorithm.loss``."""
OPTIMIZER = SimpleNamespace(
    learning_rate=1e-6,
    max_grad_norm=1.0,
    warmup_steps=0,
    schedule="constant",
    min_rate_share=0.0,
    weight_decay=0.01,
    beta1=0.9,
    beta2=0.999,
)
"""``algorithm.optimizer``."""
ALGORITHM: Any = SimpleNamespace(steps=1000, updates_per_step=1, loss=LOSS, optimizer=OPTIMIZER)
"""``algorithm``: one update a step."""


@dataclass(frozen=True)
class Case:
    """The model and batch that all sides compute: whole sequences of equal lengths, in one pass."""

    size: str
    length: int
    """Tokens of each sequence."""
    prompt: int
    """Tokens of it that are not trained."""
    sequences: int
    device: torch.device
    dtype: torch.dtype = torch.float32
    """Of the passes; parameters are float32."""

    @property
    def config(self) -> Qwen2Config:
        """Return the model's configuration."""
        return Qwen2Config(
            **SIZES[self.size],
            vocab_size=512 if self.size == "tiny" else 151_936,
            max_position_embeddings=max(4096, self.length),
            tie_word_embeddings=False,
        )

    @property
    def shape(self) -> ModelShape:
        """Return the model's sizes."""
        return ModelShape.from_config(self.config.to_dict())

    def model(self, attention: str) -> PreTrainedModel:
        """Return a model with random float32 weights."""
        torch.manual_seed(0)
        with self.device:
            model: PreTrainedModel = Qwen2ForCausalLM._from_config(
                self.config, attn_implementation=attention, dtype=torch.float32
            )
        return model

    def ids(self, model: PreTrainedModel) -> Tensor:
        """Return int64[sequences, length]."""
        return torch.randint(0, model.config.vocab_size, (self.sequences, self.length), device=self.device)

    def autocast(self) -> torch.autocast:
        """Return the context of a forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def loss_of(self, logprobs: Tensor) -> Tensor:
        """Return the loss of an update.

        Args:
            logprobs: float32[sequences · (length - prompt)], with gradient.
        """
        trained = self.length - self.prompt
        advantages = torch.linspace(-1, 1, self.sequences, device=self.device).repeat_interleave(trained)
        tokens = TokenInputs(
            logprobs=logprobs,
            proximal=logprobs.detach(),
            behaviour=logprobs.detach(),
            advantages=advantages,
            weights=torch.full((logprobs.numel(),), 1 / logprobs.numel(), device=self.device),
            lengths=torch.tensor([trained] * self.sequences),
        )
        settings: Any = LOSS
        return policy_loss(tokens, settings).total

    def planned(self) -> dict[str, float]:
        """Return the bytes of each part of the GPU's memory that ``plaudit plan`` computes for this update."""
        return {part.name: float(part.num_bytes) for part in trainer_parts(self.spec(), self.shape)}

    def spec(self) -> Any:
        """Return what the plan reads of a job: one rank, recomputed layers, all sequences in one row."""
        trainer = SimpleNamespace(
            ranks=1,
            shards=1,
            sequence_parallel_size=1,
            micro_batch_tokens=self.length * self.sequences,
            activation_checkpointing="layers",
            activation_offload=False,
            cpu_offload=False,
            lora=None,
        )
        rollout = SimpleNamespace(
            engine=SimpleNamespace(max_model_length=self.length),
            sampling=SimpleNamespace(max_tokens=self.length - self.prompt),
        )
        return SimpleNamespace(
            model=SimpleNamespace(dtype=str(self.dtype).removeprefix("torch.")),
            data=SimpleNamespace(train=SimpleNamespace(max_prompt_length=self.prompt)),
            algorithm=ALGORITHM,
            rollout=rollout,
            trainer=trainer,
        )
