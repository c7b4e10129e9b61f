"""Writes what the job needs: a tiny policy, a tiny reward model trained on preferences, and prompts.

The reward model is made as reward models are: it sees pairs of answers, one of them preferred, and learns to give the
preferred one the higher logit (Bradley-Terry: ``-log sigmoid(chosen - rejected)``). Preferred is what holds more even
digits, which nobody tells it nor the policy.

``--folder`` says where to; the job file expects the files beside itself.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

HERE = Path(__file__).parent
SYMBOLS = "0123456789=?;"
"""With the tokenizer's three special symbols: a vocabulary of 16."""
POLICY_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}={% endif %}"
)
REWARD_TEMPLATE = (
    "{% for message in messages %}{{ '?' if message['role'] == 'user' else ';' }}{{ message['content'] }}{% endfor %}"
)
"""The reward model's own: its users are marked in another way than the policy's."""
NUM_DIGITS = 6
ROWS = {"train": 2048, "test": 64}
TRAINING_STEPS, PAIRS_PER_STEP = 40, 32


def prepare(folder: Path) -> None:
    """Writes ``model/policy``, ``model/reward`` and ``data/`` into the folder."""
    sys.path.insert(0, str(HERE.parent))
    from tiny_model import make_tiny_classifier, save_tiny_model

    save_tiny_model(folder / "model" / "policy", SYMBOLS, POLICY_TEMPLATE, max_length=256, seed=2)
    model, tokenizer = make_tiny_classifier(SYMBOLS, REWARD_TEMPLATE, max_length=256, seed=1)
    accuracy = train(model, tokenizer, random.Random(1))
    print(f"the reward model agrees with {accuracy:.0%} of the preferences")
    model.save_pretrained(folder / "model" / "reward")
    tokenizer.save_pretrained(folder / "model" / "reward")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    for split, count in ROWS.items():
        rows = [row(split, index, draw) for index in range(count)]
        pa.parquet.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{split}.parquet")


def train(model: Any, tokenizer: Any, draw: random.Random) -> float:
    """Trains on preferences; returns the share of pairs of the last steps that it orders rightly."""
    import torch

    torch.set_num_threads(1)  # the model is so small that a second one would only wait for the first
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    right: list[float] = []
    for _ in range(TRAINING_STEPS):
        pairs = [pair(draw) for _ in range(PAIRS_PER_STEP)]
        texts = [text(tokenizer, one[0], one[side]) for side in (1, 2) for one in pairs]
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        chosen, rejected = model(**batch).logits[:, 0].chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right.append((chosen > rejected).float().mean().item())
    return sum(right[-10:]) / 10


def pair(draw: random.Random) -> tuple[str, str, str]:
    """A prompt, the preferred answer and the other one."""
    prompt = digits(draw)
    while True:
        one, other = digits(draw), digits(draw)
        if evens(one) != evens(other):
            return (prompt, one, other) if evens(one) > evens(other) else (prompt, other, one)


def text(tokenizer: Any, prompt: str, answer: str) -> str:
    """A chat as the reward model reads it."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def digits(draw: random.Random) -> str:
    """Some digits."""
    return "".join(draw.choices("0123456789", k=NUM_DIGITS))


def evens(answer: str) -> int:
    """How many of an answer's digits are even."""
    return sum(digit in "02468" for digit in answer)


def row(split: str, index: int, draw: random.Random) -> dict[str, object]:
    """One row in verl's columns; there is no right answer."""
    return {
        "data_source": "plaudit/preferences",
        "prompt": [{"role": "user", "content": digits(draw)}],
        "ability": "please",
        "reward_model": {"style": "model", "ground_truth": ""},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=HERE, help="where model/ and data/ go (default: here)")
    prepare(parser.parse_args().folder)
