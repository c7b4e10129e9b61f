"""A reward file as it is written for verl (``custom_reward_function.path``). Nothing in it knows of Plaudit."""

import re

_FINAL = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]*[0-9]")


def extract_solution(solution_str, method="strict"):
    found = (_FINAL if method == "strict" else _NUMBER).findall(solution_str)
    return found[-1].replace(",", "") if found else None


def compute_score(
    data_source, solution_str, ground_truth, extra_info=None, method="strict", format_score=0.0, score=1.0, **kwargs
):
    """GSM8K: ``score`` for the right answer, ``format_score`` for any other number, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == ground_truth else format_score
