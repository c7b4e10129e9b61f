"""Train a tiny random model by TRL's GRPOTrainer on a CPU, with rewards from the service."""

from __future__ import annotations

import inspect
import pickle
import tempfile
from typing import Any

from datasets import Dataset
from report import progress, report
from rewards import expected
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from plaudit_client.adapters.trl import reward

STEPS, PROMPTS, GENERATIONS = 8, 5, 4
SEEN: list[tuple[str, int, float | None]] = []


class Progress(TrainerCallback):
    """Prints each finished step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        progress(state.global_step)


def tiny() -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Return a random model and a tokenizer of single digits."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<pad>", "<eos>", *"0123456789+=?"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), eos_token_id=2, pad_token_id=1, bos_token_id=2, **sizes)
    return LlamaForCausalLM(config), tokenizer


async def recorded(prompts: list[Any], completions: list[str], ground_truth: list[int], **columns: Any) -> list[Any]:
    """Score by the service, and keep the result of each completion."""
    scores = await service(prompts=prompts, completions=completions, ground_truth=ground_truth, **columns)
    SEEN.extend(zip(completions, ground_truth, scores, strict=True))
    return list(scores)


def local(completions: list[str], ground_truth: list[int], **columns: Any) -> list[float | None]:
    """Score here: TRL logs the same mean for both functions."""
    return [expected(*each) for each in zip(completions, ground_truth, strict=True)]


if __name__ == "__main__":
    service = reward(data_source="numbers")
    assert inspect.iscoroutinefunction(pickle.loads(pickle.dumps(service)))
    model, tokenizer = tiny()
    rows = [{"prompt": f"{i % 10}+{i % 7}=?", "ground_truth": i, "data_source": "numbers"} for i in range(40)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=PROMPTS * GENERATIONS,
            num_generations=GENERATIONS,
            max_completion_length=6,
            reward_weights=[1.0, 0.0, 0.0],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            shuffle_dataset=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=[service, recorded, local],
            args=settings,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Progress()],
        )
        trainer.train()
    steps = [log for log in trainer.state.log_history if "rewards/plaudit/mean" in log]
    same = all(abs(log["rewards/plaudit/mean"] - log["rewards/local/mean"]) < 1e-5 for log in steps)
    report(SEEN, steps=len(steps), same_means=same, no_score=max(log["plaudit/no_score"] for log in steps))
