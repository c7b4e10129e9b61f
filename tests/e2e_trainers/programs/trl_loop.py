"""Play scripts in TRL's own generation and tool loop, inside its GRPOTrainer; only sampling is replaced.

The argument is a JSON file: folder of the tokenizer, file and class of the environment, data row, and for each script
the policy's turns. Prints one JSON line: what the trainer would train on, for each script.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

GENERATIONS = 2
PASSED: list[Any] = []
"""The environments that TRL passed to the reward function."""


class ScriptedTrainer(GRPOTrainer):
    """GRPOTrainer whose policy writes the turns of a script."""

    turns: list[list[int]]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *arguments: Any, **named: Any) -> tuple[Any, None]:
        turn = self.turns.pop(0)
        return [list(turn) for _ in prompt_ids], None

    def _calculate_rewards(self, *arguments: Any, **named: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*arguments, **named)
        self.seen_rewards = rewards
        return rewards


def held(completions: list[Any], environments: list[Any], **columns: Any) -> list[float]:
    """Keep the environments, whose public attributes reward functions read."""
    PASSED[:] = environments
    return [0.0] * len(completions)


def played(trainer: ScriptedTrainer, row: dict[str, Any], turns: list[list[int]]) -> dict[str, Any]:
    """Play one script; return the first of its equal samples."""
    trainer.turns = list(turns)
    output = trainer._generate_and_score_completions([dict(row) for _ in range(GENERATIONS)])
    assert not trainer.turns, f"TRL asked for {len(trainer.turns)} turns fewer"
    kept = output["completion_mask"][0].bool()
    return {
        "prompt_ids": output["prompt_ids"][0][output["prompt_mask"][0].bool()].tolist(),
        "response_ids": output["completion_ids"][0][kept].tolist(),
        "loss_mask": output["tool_mask"][0][kept].int().tolist(),
        "reward": trainer.seen_rewards[0, 1].item(),
        "attributes": {name: value for name, value in vars(PASSED[0]).items() if name[0] != "_"},
    }


def main() -> None:
    """Play all scripts."""
    given = json.loads(Path(sys.argv[1]).read_text())
    tokenizer = AutoTokenizer.from_pretrained(given["tokenizer"])
    tokenizer.pad_token = "<|endoftext|>"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=8192, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=4000,
            report_to="none",
            use_cpu=True,
            bf16=False,
        )
        trainer = ScriptedTrainer(
            model=LlamaForCausalLM(config),
            processing_class=tokenizer,
            reward_funcs=[held],
            args=settings,
            train_dataset=Dataset.from_list([given["row"]] * GENERATIONS),
            environment_factory=runpy.run_path(given["file"])[given["class"]],
        )
        trainer.model.train()
        eos = tokenizer.eos_token_id
        scripts = [
            [[*tokenizer(turn, add_special_tokens=False)["input_ids"], eos] for turn in script]
            for script in given["scripts"]
        ]
        print(json.dumps([played(trainer, given["row"], script) for script in scripts]))


if __name__ == "__main__":
    main()
