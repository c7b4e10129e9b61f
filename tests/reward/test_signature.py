"""The signatures that users bring: each is called its own way, and what does not fit is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from plaudit_reward.functions.function import UserFunction
from plaudit_reward.functions.result import Target
from plaudit_wire.errors import ConfigurationError
from plaudit_wire.records import Sample
from reward_samples import make_sample

FITTING = [
    # source, scope, arguments, form
    ("def f(data_source, solution_str, ground_truth, extra_info=None): pass", "sample", {}, "verl"),
    ("def f(data_source, solution_str, ground_truth, extra_info, k): pass", "sample", {"k": 1}, "verl"),
    ("def f(solution_str, ground_truth, method='strict'): pass", "sample", {}, "verl"),
    ("def f(**kwargs): pass", "sample", {"anything": 1}, "verl"),
    ("def f(data_source, solution_str, ground_truth, **kwargs): pass", "sample", {"x": 1}, "verl"),
    ("async def f(data_source, solution_str, ground_truth, extra_info): pass", "sample", {}, "verl"),
    ("def f(data_sources, solution_strs, ground_truths, extra_infos, k=1): pass", "group", {"k": 2}, "verl batch"),
    ("def f(solution_strs, **kwargs): pass", "sample", {"x": 1}, "verl batch"),
    ("def f(prompts, completions, **kwargs): pass", "group", {}, "trl"),
    ("def f(completions, solution, **kwargs): pass", "group", {}, "trl"),
    ("def f(completions, trainer_state=None, log_extra=None): pass", "group", {}, "trl"),
    ("def f(prompts, completions, **kwargs): pass", "sample", {}, "trl"),
    ("def f(sample): pass", "sample", {}, "sample"),
    ("def f(s, threshold): pass", "sample", {"threshold": 2}, "sample"),
    ("f = lambda s: 1.0", "sample", {}, "sample"),
    ("def f(sample, /): pass", "sample", {}, "sample"),
    ("def f(values, sample, /): pass", "combine", {}, "combine"),
    ("def f(samples): pass", "group", {}, "samples"),
    ("def f(rewards): pass", "group", {}, "values"),
    ("def f(values, sample): pass", "combine", {}, "combine"),
    ("def f(values, scale): pass", "combine", {"scale": 2}, "combine"),
]


@pytest.mark.parametrize(("source", "scope", "arguments", "form"), FITTING)
def test_forms_are_recognised(
    reward_file: Callable[[str], str], source: str, scope: Any, arguments: dict[str, Any], form: str
) -> None:
    function = UserFunction(Target(reward_file(source), "f", arguments, scope))
    assert function.prepare().form == form


REFUSED = [
    ("def f(solution_str): pass", "group", {}, "remove 'scope: group'"),
    ("def f(rewards): pass", "sample", {}, "set 'scope: group'"),
    ("def f(): pass", "sample", {}, "takes no sample"),
    ("def f(solution_str, ground_truth, /): pass", "sample", {}, "'solution_str' is positional-only"),
    ("def f(data_source, /, solution_str): pass", "sample", {}, "'data_source' is positional-only"),
    ("def f(solution_strs, /): pass", "group", {}, "'solution_strs' is positional-only"),
    ("def f(solution_strs, prompts): pass", "group", {}, "python.arguments.prompts"),
    ("def f(completions, /, **columns): pass", "group", {}, "remove the '/' from the parameters"),
    ("def f(sample, k, /): pass", "sample", {"k": 1}, "'k' is positional-only"),
    ("def f(*, sample): pass", "sample", {}, "takes no sample"),
    ("def f(sample, threshold): pass", "sample", {}, "python.arguments.threshold"),
    ("def f(solution_str, reward_router_address): pass", "sample", {}, "add python.serve: {source: …}"),
    ("async def f(solution_str, reward_model_tokenizer): pass", "sample", {}, "and the job serves it"),
    ("def f(sample): pass", "sample", {"threshold": 1}, "no parameter 'threshold'"),
    ("def f(solution_str): yield 1.0", "sample", {}, "it is a generator, which no score comes from"),
    ("async def f(completions): yield [1.0]", "group", {}, "it is a generator"),
    ("def f(solution_str): pass", "sample", {"solution_str": "x"}, "is filled with the sample"),
    ("def f(completions, completion_ids): pass", "group", {}, "'completion_ids'"),
    ("class f:\n    def __init__(self): self.x = 1", "sample", {}, "has no method compute_score or score"),
    (
        "class f:\n    def __init__(self): raise OSError('no')\n    def score(self, s): pass",
        "sample",
        {},
        "OSError: no",
    ),
]


@pytest.mark.parametrize(("source", "scope", "arguments", "words"), REFUSED)
def test_an_unsupported_signature_is_refused_with_file_function_and_remedy(
    reward_file: Callable[[str], str], source: str, scope: Any, arguments: dict[str, Any], words: str
) -> None:
    path = reward_file(source)
    with pytest.raises(ConfigurationError) as refusal:
        UserFunction(Target(path, "f", arguments, scope)).prepare()
    assert words in str(refusal.value)
    assert f"f in {path}" in str(refusal.value)


def test_async_functions_run_inline_and_others_in_processes_by_default(
    reward_file: Callable[[str], str],
) -> None:
    path = reward_file("async def a(sample): pass\ndef b(sample): pass")
    assert UserFunction(Target(path, "a")).prepare().isolation == "inline"
    assert UserFunction(Target(path, "b")).prepare().isolation == "process"
    assert UserFunction(Target(path, "b", isolation="thread")).prepare().isolation == "thread"


def call(path: str, function: str, samples: list[Sample], values: Any = None, **target: Any) -> Any:
    loaded = UserFunction(Target(path, function, **target))
    loaded.prepare()
    return loaded.call(samples, values)


def test_verl_functions_receive_verls_keywords(reward_file: Callable[[str], str]) -> None:
    path = reward_file("def f(**kwargs): return kwargs")
    seen = call(path, "f", [make_sample("r", extra_info={"index": 3})], arguments={"k": 1})
    assert seen == {
        "data_source": "openai/gsm8k",
        "solution_str": "r",
        "ground_truth": "4",
        "extra_info": {"index": 3, "num_turns": None, "rollout_reward_scores": {}},
        "k": 1,
    }


@pytest.mark.parametrize(
    "parameters",
    ["data_sources, solution_strs, ground_truths, extra_infos, k", "solution_strs, k, **columns"],
    ids=["named", "keywords"],
)
def test_functions_for_verls_batch_manager_receive_its_lists_and_return_a_score_for_each(
    reward_file: Callable[[str], str], parameters: str
) -> None:
    path = reward_file(
        f"def f({parameters}):\n"
        "    given = {**locals(), **locals().get('columns', {})}\n"
        "    rows = zip(*(given[name] for name in ('data_sources', 'ground_truths', 'extra_infos')), strict=True)\n"
        "    described = [f\"{source} {truth} {extra['index']}\" for source, truth, extra in rows]\n"
        "    return [{'score': k * len(t), 'row': row} for t, row in zip(solution_strs, described, strict=True)]\n"
    )
    loaded = UserFunction(Target(path, "f", {"k": 2}, "group"))
    loaded.prepare()
    samples = [make_sample(text, extra_info={"index": index}) for index, text in enumerate(("ab", "c"))]
    scores = loaded.scores(loaded.call(samples, None), 2)
    assert [(score.value, score.extra["row"]) for score in scores] == [
        (4.0, "openai/gsm8k 4 0"),
        (2.0, "openai/gsm8k 4 1"),
    ]


def test_verl_functions_get_only_the_keywords_they_name(reward_file: Callable[[str], str]) -> None:
    path = reward_file("def f(solution_str, ground_truth): return [solution_str, ground_truth]")
    assert call(path, "f", [make_sample("r")]) == ["r", "4"]


def test_trl_functions_see_text_or_messages_and_columns(reward_file: Callable[[str], str]) -> None:
    path = reward_file("def f(prompts, completions, **columns): return prompts, completions, columns")
    plain = [make_sample("a", 0, extra_info={"level": 1, "only": 2}), make_sample("b", 1, extra_info={"level": 3})]
    prompts, completions, columns = call(path, "f", plain, scope="group")
    assert (prompts, completions) == (["2 + 2?", "2 + 2?"], ["a", "b"])
    assert columns["level"] == [1, 3]
    assert columns["ground_truth"] == columns["solution"] == columns["answer"] == ["4", "4"]
    assert "only" not in columns
    chat = [make_sample("a", messages=[{"role": "user", "content": "2 + 2?"}])]
    prompts, completions, _ = call(path, "f", chat, scope="group")
    assert prompts == [[{"role": "user", "content": "2 + 2?"}]]
    assert completions == [[{"role": "assistant", "content": "a"}]]


def test_a_column_that_the_data_lacks_is_named(reward_file: Callable[[str], str]) -> None:
    path = reward_file("def f(completions, difficulty): return [1.0]")
    loaded = UserFunction(Target(path, "f", scope="group"))
    loaded.prepare()
    with pytest.raises(Exception, match="no column difficulty; it has answer, completions"):
        loaded.call([make_sample()], None)


def test_columns_of_the_data_win_over_aliases(reward_file: Callable[[str], str]) -> None:
    path = reward_file("def f(completions, solution): return solution")
    assert call(path, "f", [make_sample(extra_info={"solution": "own"})], scope="group") == ["own"]


def test_values_and_combining_functions_get_their_values(reward_file: Callable[[str], str]) -> None:
    path = reward_file(
        """
        def spread(rewards): return [r - sum(rewards) / len(rewards) for r in rewards]
        def both(values, sample): return values["a"], sample.response
        def sum_of(values): return sum(values.values())
        """
    )
    assert call(path, "spread", [make_sample(), make_sample()], [1.0, 3.0], scope="group") == [-1.0, 1.0]
    assert call(path, "both", [make_sample("r")], {"a": 2.0}, scope="combine") == (2.0, "r")
    assert call(path, "sum_of", [make_sample()], {"a": 2.0, "b": 1.0}, scope="combine") == 3.0


def test_a_class_takes_its_own_arguments_and_leaves_the_rest_to_the_call(reward_file: Callable[[str], str]) -> None:
    path = reward_file(
        """
        class Agent:
            def __init__(self, url): self.url = url
            def compute_score(self, data_source, solution_str, ground_truth, extra_info, scale=1):
                return self.url, scale
            def post_process_scores(self, rewards): return rewards
        """
    )
    target = Target(path, "Agent", {"url": "u", "scale": 2})
    loaded = UserFunction(target)
    assert loaded.prepare().post_processes
    assert loaded.call([make_sample()], None) == ("u", 2)
    assert loaded.call([], [1.0, 2.0], post_process=True) == [1.0, 2.0]


def test_callable_objects_and_their_methods_can_be_named(reward_file: Callable[[str], str]) -> None:
    path = reward_file(
        """
        class _Length:
            def __call__(self, sample): return len(sample.response)
            def twice(self, sample): return 2 * len(sample.response)
        length = _Length()
        """
    )
    assert call(path, "length", [make_sample("abc")]) == 3
    assert call(path, "length.twice", [make_sample("abc")]) == 6
