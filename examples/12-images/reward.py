"""The reward: 1 if the answer is the letter of the colour. As in verl, a reward function does not get the images."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth)
