r"""What is asked of verl's scorers and of ours: own cases, nasty ones on purpose.

``CASES`` is a list; whoever adds a rule adds rows. ``make_table.py`` writes what verl gives for each,
``test_parity.py`` holds ours against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One response to be scored."""

    data_source: str
    response: str
    ground_truth: Any
    rule: str | None = None
    """Rule of ours; None: by data source."""
    arguments: Arguments = field(default_factory=dict)
    """Of our rule."""
    verl: tuple[str, Arguments] | None = None
    """Function of ``verl.utils.reward_score`` with arguments; None: ``default_compute_score``."""
    corrected: tuple[Arguments, float] | None = None
    """verl's result is wrong: the arguments that correct it, and the right result."""


PAIRS: Sequence[tuple[str, str]] = [
    ("42", "42"),
    ("-42", "42"),
    ("42.0", "42"),
    ("1,234", "1234"),
    ("1,234,567", "1234567"),
    ("1234", "1,234"),
    (r"1{,}234", "1234"),
    (r"1,\!234", "1234"),
    ("0.5", r"\frac{1}{2}"),
    (".5", "0.5"),
    ("1/2", r"\frac{1}{2}"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\frac1{2}", r"\frac{1}{2}"),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"3\frac{1}{2}", r"\frac{7}{2}"),
    ("3 1/2", "7/2"),
    (r"\sqrt2", r"\sqrt{2}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"50\%", "50"),
    ("50%", "50"),
    ("0.5", r"50\%"),
    ("500", "5"),
    ("0.05", "5"),
    (r"\$12.50", "12.50"),
    ("$12.50$", "12.50"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    (r"5 \text{ cm and } 6\text{ cm}", "5"),
    ("5 cm", "5"),
    ("12 inches", "12"),
    (r"\text{east}", "east"),
    (r"\text{(A)}", "A"),
    (r"\mathrm{A}", "A"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", "90"),
    ("90 degrees", "90"),
    ("x = 5", "5"),
    ("x=5", "5"),
    (r"y = 2x + 1", "2x+1"),
    ("abc = 5", "5"),
    ("x+1", "1+x"),
    ("(x+1)^2", "x^2+2x+1"),
    ("x^{2}", "x^2"),
    (r"2 \cdot 3", "6"),
    (r"2\pi", r"2\pi"),
    ("6.283185", r"2\pi"),
    (r"\pi", "3.14"),
    (r"\frac{\pi}{2}", "1.5708"),
    (r"3\pi/2", r"\frac{3\pi}{2}"),
    ("(1, 2)", "(1,2)"),
    ("(1,2)", "[1,2]"),
    ("(1, 2)", "(2, 1)"),
    ("1, 2", "1,2"),
    ("2, 1", "1,2"),
    (r"(-\infty, 3]", r"(-\infty,3]"),
    (r"[0, 1) \cup (2, 3]", r"[0,1)\cup(2,3]"),
    (r"\left(\frac{1}{2}, 3\right)", r"(\frac12,3)"),
    (r"\{1, 2, 3\}", r"\{1,2,3\}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("[[1, 2], [3, 4]]", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("[1, 2]", r"\begin{pmatrix}1\2\end{pmatrix}"),
    ("101_2", "101"),
    ("101_2", "5"),
    ("2 or 3", "2,3"),
    ("2 and 3", "2, 3"),
    ("3 million", "3000000"),
    ("1e3", "1000"),
    ("0.333333", r"\frac{1}{3}"),
    ("0.33333", "0.33334"),
    ("٣", "3"),
    ("½", r"\frac{1}{2}"),
    ("\u22123", "-3"),
    ("3²", "9"),
    ("", "5"),
    ("5", ""),
    (r"\frac", "5"),
    (r"\sqrt", r"\sqrt"),
    (r"\frac{1}{2", r"\frac{1}{2}"),
    ("inf", "inf"),
    ("nan", "nan"),
    ("i", "-i"),
    ("x^10^2", "x^100"),
    ("7!", "5040"),
    ("the the", "the"),
    ("None", "None"),
    ("True", "1"),
    ("Interval(0, 1)", "[0,1]"),
]
"""Answer and ground truth: each goes through every rule for mathematics, in the form that the rule looks for."""


def mathematics() -> Iterator[Case]:
    """Every pair through every rule for mathematics."""
    for answer, truth in PAIRS:
        boxed = rf"So the result is $\boxed{{{answer}}}$."
        yield Case("lighteval/MATH", boxed, truth)
        yield Case("math_dapo", f"Let me think.\nAnswer: {answer}", truth)
        yield Case("numina_olympiads", f"Step 1: think. The answer is: {answer}", truth)
        yield Case("hiyouga/geometry3k", rf"<think>hm</think> \boxed{{{answer}}}", truth)
        yield Case("math", boxed, truth, rule="math_verify", verl=("math_verify.compute_score", {}))


def gsm8k() -> Iterator[Case]:
    """GSM8K: the number after the marks."""
    for response, truth in (
        ("She sold 72 clips.\n#### 72", "72"),
        ("#### 71\n#### 72", "72"),
        ("#### 72\n#### 71", "72"),
        ("#### -72", "-72"),
        ("####72", "72"),
        ("The answer is 72", "72"),
        ("#### 7 2", "72"),
        ("", "72"),
        ("#### ", "72"),
        ("#### .", "."),
        ("#### 1,072", "1072"),
        ("#### 72" + "x" * 293, "72"),
        ("#### 72" + "x" * 294, "72"),
        ("#### \uff17\uff12", "72"),
        ("#### $72", "72"),
    ):
        yield Case("openai/gsm8k", response, truth)
        flexible = ("gsm8k.compute_score", {"method": "flexible"})
        yield Case("openai/gsm8k", response, truth, rule="gsm8k_flexible", verl=flexible)
    numeric = {"gsm8k": {"numeric": True}}
    for response, truth in (("#### 1,072", "1,072"), ("#### 72.", "72"), ("#### 72.0", "72")):
        yield Case("openai/gsm8k", response, truth, corrected=(numeric, 1.0))
    for truth in (72, None, ["72"]):
        yield Case("openai/gsm8k", "#### 72", truth)


def math_reward() -> Iterator[Case]:
    """MATH: which box counts."""
    right = ({"math_reward": {"lastBoxWins": True}}, 1.0)
    for response, corrected in (
        (r"\boxed{4} no, \boxed{5}", None),
        (r"\boxed{5} no, \boxed{4}", None),
        (r"$\boxed 5$ is it", None),
        (r"\boxed 5", None),
        (r"\boxed 5 is the answer", right),
        (r"\boxed 4$ no, \boxed{5}", right),
        (r"$\boxed {5}$", right),
        ("\\boxed\n{5}", right),
        (r"\fbox{5}", right),
        (r"\boxed{\boxed{5}}", None),
        (r"\boxed{5", None),
        (r"\boxed{", None),
        (r"\boxed", None),
        (r"\boxed5", right),
        (r"} \boxed{5} {", None),
        ("five", None),
        ("5", None),
    ):
        yield Case("HuggingFaceH4/MATH-500", response, "5", corrected=corrected)
    for truth in (5, None, ["5"]):
        yield Case("DigitalLearningGmbH/MATH-lighteval", r"\boxed{5}", truth)


def math_dapo() -> Iterator[Case]:
    """DAPO: the marked line, or else the box."""
    half, right = r"\frac{1}{2}", ({"math_dapo": {"normalizeBoxed": True}}, 1.0)
    for response, truth, corrected in (
        ("Answer: 4\nAnswer: 5", "5", None),
        ("answer :   5", "5", None),
        ("ANSWER:5", "5", None),
        ("Answer:\n5", "5", None),
        ("Answer: ", "5", None),
        (r"Answer: \boxed{5}", "5", None),
        (r"Answer: $\boxed{\frac12}$", half, None),
        ("Answer: 5\n" + "x" * 290, "5", None),
        ("Answer: 5\n" + "x" * 291, "5", None),
        ("Answer: [INVALID]", "5", None),
        ("nothing", "[INVALID]", None),
        ("nothing", "5", None),
        ("", "5", None),
        (r"\boxed{5}", "5", None),
        (r"\boxed{4} \boxed{5}", "5", None),
        (r"\boxed{5", "5", None),
        (r"\boxed{\dfrac{1}{2}}", r"\dfrac{1}{2}", None),
        (r"\boxed{5 \text{ cm}}", "5", right),
        (r"\boxed{1,234}", "1234", right),
        (r"\boxed{5}" + "x" * 92, "5", right),
        (r"\boxed{" + "1+" * 50 + "1}", "1+" * 50 + "1", right),
        (r"\boxed{5} so the final answer: see above", "5", None),
        ("Answer: x = y = 5", "5", None),
        ("Answer: a square of 5 units", "of5", None),
        ("Answer: $5$ or $6$", "5", None),
        ('Answer: "5"', "5", None),
        (r"Answer: \text{Monday}", "Monday", None),
        (r"Answer: 10^{\circ}", "10", None),
        ("Answer: 1,2", "12", None),
        ("Answer: 5.", "5", None),
    ):
        yield Case("aime_2024", response, truth, corrected=corrected)
    for name in ("math", "math_dapo_reasoning", "aime", "aimeish"):
        yield Case(name, "Answer: 5", "5")
    strict = ("math_dapo.compute_score", {"strict_box_verify": True})
    for response in ("Answer: 5", r"\boxed{5}", r"Answer: 4 \boxed{5}", r"\boxed{ 5 }", "", r"\boxed{}"):
        yield Case("math_dapo_reasoning", response, "5", "math_dapo", {"strictBoxed": True}, strict)
    for truth in (5, None):
        yield Case("aime25", "Answer: 5", truth)


def prime_math() -> Iterator[Case]:
    """NuminaMath: where the answer is, and what verl's graders miss."""
    symbolic, no_percent = {"prime_math": {"symbolic": True}}, {"prime_math": {"percentages": False}}
    for response, truth, corrected in (
        ("The answer is 5. ", "5", None),
        ("The answer is 5. Thank you. Bye.", "5", None),
        ("Answer: 4. No, the answer is: 5", "5", None),
        ("5 is the answer", "5", None),
        ("5 and 6 are the answers", "5, 6", None),
        ("We get x = 5", "5", None),
        ("So the value must be\n5", "5", None),
        (r"The answer is \boxed{5}. Indeed.", "5", None),
        (r"\fbox{5}", "5", None),
        (r"\boxed {5}", "5", None),
        (r"\boxed 5", "5", None),
        (r"\boxed{x = 5}", "5", None),
        ("no number here", "no number here", None),
        ("", "5", None),
        ("5", 5, None),
        ("5.5", 5.5, None),
        ("5", None, None),
        (r"The answer is \frac{x^{2}-1}{x-1}", "x+1", (symbolic, 1.0)),
        (r"The answer is 2^{10}", "1024", (symbolic, 1.0)),
        (r"The answer is \sin^2 x + \cos^2 x", "1", (symbolic, 1.0)),
        ("The answer is 500", "5", (no_percent, 0.0)),
        ("The answer is 0.05", "5", (no_percent, 0.0)),
        ("The answer is Point(1, 2)", "(1, 2)", None),
        ("The answer is __import__('os').getpid()", "1", None),
        (r"The answer is [__import__('os').getpid(), \pi]", r"[1, \pi]", None),
    ):
        yield Case("numina_cn_k12", response, truth, corrected=corrected)
    for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc"):
        yield Case(f"numina_{name}", r"The answer is \boxed{\frac{1}{2}}", "1/2")


def geo3k() -> Iterator[Case]:
    """Geometry3K: the form, and the box."""
    for response in (
        r"<think>a</think>\boxed{5}",
        r"<think></think>\boxed{5} indeed",
        r"\boxed{5}",
        r"<think>a\boxed{5}",
        r"<think>a</think>5",
        r" <think>a</think>\boxed{5}",
        r"\boxed{5}<think>a</think>",
        r"<think>\boxed{5}</think>",
        "<think>a\nb</think>\n\\boxed{\n5\n}\n",
        r"<think>a</think>\boxed{4}",
        r"<think>a</think>\boxed{5",
        r"<think>a</think>\boxed {5}",
        "",
    ):
        yield Case("hiyouga/geometry3k", response, "5")
    plain = ("geo3k.compute_score", {"use_boxed": False})
    yield Case("hiyouga/geometry3k", "5", "5", "geo3k", {"boxed": False}, plain)
    half = ("geo3k.compute_score", {"format_score": 0.5})
    yield Case("hiyouga/geometry3k", r"\boxed{5}", "5", "geo3k", {"formatScore": 0.5}, half)
    yield Case("hiyouga/geometry3k", "5", "None")
    for truth in (5, None):
        yield Case("hiyouga/geometry3k", r"\boxed{5}", truth)


def search_r1() -> Iterator[Case]:
    """Search-R1: exact match between tags."""
    one, several = {"target": "Paris"}, {"target": ["Paris", "The City of Light"]}
    substring = ("search_r1_like_qa_em.compute_score_subem", {})
    for response, truth in (
        ("<answer>Paris</answer>", one),
        ("<answer> paris. </answer>", one),
        ("<answer>the Paris</answer>", one),
        ("<answer>Paris, France</answer>", one),
        ("<answer>city of light</answer>", several),
        ("<answer>Rome</answer><answer>Paris</answer>", several),
        ("<answer>Paris</answer><answer>Rome</answer>", several),
        ("<answer>Rome <answer>Paris</answer>", one),
        ("<answer>Paris</answer></answer>", one),
        ("<answer>Paris", one),
        ("</answer>Paris<answer>", one),
        ("Paris", one),
        ("", one),
        ("<answer></answer>", one),
        ("<answer></answer>", {"target": "The"}),
        ("<answer>Pa\nris</answer>", {"target": "pa ris"}),
        ("<answer>Paris</answer>" * 10, one),
        ("<answer>Paris</answer>" * 11, one),
        ("<answer>Rome</answer>" * 11, one),
        ("<answer>Café</answer>", {"target": "cafe"}),
        ("<answer>“Paris”</answer>", one),
        ("<answer>anthem</answer>", {"target": "them"}),
        ("<answer>Paris</answer>", {"target": []}),
    ):
        yield Case("searchR1_nq", response, truth)
        yield Case("searchR1_nq", response, truth, "search_r1_like_qa_em", {"substring": True}, substring)
    for name in ("triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"):
        yield Case(f"searchR1_{name}", "<answer>Paris</answer>", one)
    for truth in ({"target": 5}, {"answer": "Paris"}, "Paris"):
        yield Case("searchR1_nq", "<answer>Paris</answer>", truth)


def math_verify() -> Iterator[Case]:
    """Math-Verify: where the answer is."""
    function = ("math_verify.compute_score", {})
    for response, truth in (
        ("The answer is 5.", "5"),
        ("So $x = 5$", "5"),
        ("5 apples and 6 pears", "6"),
        (r"\boxed{4}, \boxed{5}", "5"),
        (r"$\frac{10}{2}$", "5"),
        ("", "5"),
        ("nothing", "5"),
        (r"\boxed{5", "5"),
    ):
        yield Case("math", response, truth, "math_verify", {}, function)


CASES: list[Case] = [
    case
    for source in (gsm8k, mathematics, math_reward, math_dapo, prime_math, geo3k, search_r1, math_verify)
    for case in source()
]
