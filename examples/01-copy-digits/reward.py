"""The reward: which share of the six digits was copied rightly."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(written == wanted for written, wanted in zip(solution_str, ground_truth, strict=False))
    return right / len(ground_truth)
