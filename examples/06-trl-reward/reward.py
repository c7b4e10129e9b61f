"""Reward functions as they are written for TRL's ``GRPOTrainer(reward_funcs=[...])``. Nothing here knows of Plaudit."""

import re


def _text(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]


def accuracy(prompts, completions, solution, **kwargs):
    """1 for the right number, 0 for another; None where there is none: then only the format counts."""
    rewards = []
    for completion, right in zip(completions, solution, strict=True):
        numbers = re.findall(r"\d+", _text(completion))
        rewards.append(float(numbers[-1] == right) if numbers else None)
    return rewards


def brevity(completions, **kwargs):
    """The shortest completion of the batch has 1, one twice as long 0.5."""
    lengths = [max(len(_text(completion)), 1) for completion in completions]
    return [min(lengths) / length for length in lengths]
