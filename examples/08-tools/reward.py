"""The reward for the last turn: 1 for the number in the safe, 0.1 for another number."""


def compute_score(sample):
    if sample.num_turns is None or sample.num_turns < 4:
        return 0.0  # it answered without opening the safe
    if sample.answer == sample.ground_truth:
        return 1.0
    return 0.1 if sample.answer.isdigit() else 0.0
