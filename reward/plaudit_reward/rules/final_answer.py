r"""Find the final answer in a response, and in a ground truth that is more than an answer.

The last mark that a person would look for decides: a box (``\boxed{5}``, also unclosed), ``<answer>``, GSM8K's
``####``, a line like ``Answer: 5``. Without a mark it is the whole text if that is short, the last formula, the last
bold text, or the last number. What stands before ``</think>`` does not count. At the end stand the simpler readers of
the rules that are named after verl's.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from plaudit_wire.errors import DataError
from plaudit_wire.records import Sample


class FinalAnswer(NamedTuple):
    """Hold the text of an answer, and the mark by which it was found."""

    text: str
    mark: str
    adjacent: str = ""
    """The contents of all boxes that stand side by side at the end, as a list; empty for a single one."""


MOST_CHARACTERS = 100_000
"""Of a longer response the end is read."""
_TURN_END = re.compile(
    r"(?:<[|｜][\w▁-]{1,30}[|｜]>|</s>|<(?:seed:)?eos>|<end_of_(?:turn|utterance)>|<turn\|>|(?:\[EOS\]|\[e~\[))\Z"
)
_THOUGHT = re.compile(
    r"</(?:think|thinking|thought|reasoning|seed:think)>|<\|(?:/think|end_of_thought)\|>|◁/think▷|\[/THINK\]"
    r"|<\|channel\|>final<\|message\|>|(?<![a-z])assistantfinal",
    re.IGNORECASE,
)
_BOX = re.compile(r"(?:(?<!\\)\\+|/)(?:boxed|f(?:rame)?box)\s*(?=\S)|(?<![A-Za-z\\])boxed(?=\{)")
_ESCAPED = re.compile(r"\\[\\{}]")
_BOX_END = re.compile(r"\\[)\]]|\n\s*\n|\$|<\|")
_BETWEEN_BOXES = re.compile(r"[\s$\\()\[\]*]{0,20}(?:,|;|and|or|,\s*and|,\s*or)?[\s$\\()\[\]*]{0,20}")
_BARE_BOX = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})*|[^\s$\\{}]+")
_TAG = "<answer>"
_HASHES = re.compile(r"(?m)####[ \t]*(.*)$")
_STRONG = re.compile(
    r"(?i)(?<![a-z])(?:(?:final\s+|correct\s+)?answers?(?:\s+(?:is|are))?|"
    r"(?:réponse|respuesta|resposta|risposta)(?:\s+finale?)?|antwort|"
    r"đáp\s+(?:án|số)|cevap|jawaban|odpowiedź|उत्तर|پاسخ|(?:الإجابة|الجواب)(?:\s+(?:النهائية?|الصحيحة?|هي|هو))*|"
    r"ответ|答案(?:是|为)?|答え(?:は)?|(?:정|최종\s*)?답(?:은)?)[ \t]*(?:\*\*|__)?[ \t]*[:：=–—][ \t]*(?:\*\*|__)?"
    r"|(?<![a-z])ans[.:]\s"
    r"|(?:\*\*|\#)\s*final\s+answer\s*(?:\*\*)?\s*\n|(?:故|应|所以|因此)选择?[:：]?\s*"
)
_JSON = re.compile(
    r"""["'](?:final[_ ]?)?answer["']\s*:\s*(?:"(?P<text>(?:[^"\\\n]|\\.)+)"|["']?(?P<bare>[^"'\n}]+))""", re.IGNORECASE
)
_ESCAPES = re.compile(r"\\+")
_SPOKEN = re.compile(
    r"(?i)(?<![a-z])(?:(?:answers?|result|solutions?|value|total)(?:\s+(?:to|of|for)[^.\n]{1,80}?)?"
    r"|(?:the\s+)?(?:correct|right)\s+(?:option|choice))\s+(?:is|are|equals|(?:would|must|should|could|may|might|can)\s+be)"
    r"(?:\s+(?:therefore|thus|then|simply|just|exactly|approximately|about))?\s*[:：]?\s*|答案(?:是|为)\s*|答えは\s*|답은\s*"
    r"|(?<![a-z])(?:option|choice)\s+(?=[*(]*[A-J][*)]*\s+is\s+(?:the\s+)?(?:correct|right|best|answer))"
    r"|(?:\A|(?<=\s))(?=[*(]*[A-J][*)]*\s+is\s+the\s+(?:correct|right|best)\s+(?:answer|option|choice)\b)"
    r"|(?<![a-z])i\s+(?:choose|pick|select)\s+(?:option\s+)?(?=[*(]*[A-J][*)]*\.?\s*\Z)"
    r"|(?<![a-z])(?:(?:actually|rather|instead),?\s+(?:it|that)(?:['’]s|\s+is)|(?:it|that)\s+should\s+be)\s+(?=[*_]*[-−$\\\d])"
)
_FORMULA = re.compile(
    r"\$\$(?P<a>.{1,1000}?)\$\$|\\\[(?P<b>.{1,1000}?)\\\]|\\\((?P<c>.{1,1000}?)\\\)|(?<![\\$])\$(?P<d>(?:\\.|[^$\\\n]){1,1000})\$",
    re.DOTALL,
)
_FORMULAS_JOINED = re.compile(r"\s*(?:,?\s*and|,?\s*or|,|;)\s*")
_REASON = re.compile(r",?\s+(?:since|because|as)\s+")
_NO_SOLUTION = re.compile(
    r"(?i)\b(?:there (?:is|are)|(?:equation|system|inequality) has)\s+"
    r"(no (?:real |integer |such )?(?:solutions?|roots?))\.?\Z"
)
_PARTS = re.compile(
    r"(?i)(?<![\w.])\d+\s*(?:hours?|hrs?|h|minutes?|mins?|days?|weeks?|months?|years?|feet|foot|ft|pounds?|lbs?)\b"
    r"(?:,?\s+(?:and\s+)?\d+(?:\.\d+)?\s*(?:hours?|hrs?|minutes?|mins?|seconds?|secs?|s|days?|weeks?|months?|"
    r"inch(?:es)?|in|ounces?|oz)\b)+"
)
"""As in "3 hours and 20 minutes"."""
_NUMBERS_JOINED = re.compile(r",?\s+(?:and|or)\s+|,\s+")
_BOLD = re.compile(r"\*\*(?P<bold>[^*\n]{1,200})\*\*")
_EQUATION = re.compile(
    r"[A-Za-z](?:\([a-z]\))?\s*=(?:(?:(?![A-Za-z]{3}).)+|\s*[-−]?[\d.,]+(?=.*[⁻^/])(?:\s+[A-Za-zμ]{1,4}[-⁻^/{}\w¹²³]*){1,5}\.?)"
)
"""As in ``x = 5`` and ``R = 8.3 J mol^-1 K^-1``."""
_ENDS_BOLD = re.compile(r"(?i)\b(?:is|are|be|was|were)\s+\*\*[^*\n]{1,50}\*\*\.?\Z")
"""As in "The day is **Saturday**."."""
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9.^_])[-−]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[/:]\d+)*(?:\s?\\?%|°|π|\\pi(?![a-z]))?|(?<![\w.])[-−]?\.\d+"
)
_NUMBER_THEN_WORDS = re.compile(r"([-−]?[$€£]?\d[\d,]*(?:\.\d+)?%?)\s+(?:[a-z]+\s+){2,}")
_SENTENCE_END = re.compile(
    r",\s+(?:not|that is)\s|,?\s+and not\s|\s\((?:since|because|as|which|where|i\.e\.)\s"
    r"|\**\s+is\s+(?:the\s+)?(?:correct|right|best)\b|,?\s+(?:because|since|as|so that|which|where)\s"
    r"|(?<!\b[ap]\.m)(?<!\d\.)(?:[.?]|(?<!\d)!)(?=\s+[A-Z\W]|\s*\Z)(?!\.)"
    r"|(?<=\d!)\s"
    r"|(?<=\d)\.(?=\s|\Z)|\n|<\|"
)
_LABEL = re.compile(r"[A-Za-z][a-z]{2,20}:\s+|[\u3040-\u9fff]+[,，:：]?\s*(?=[A-Za-z\d\\$-].*\d)")
_MOST_WHOLE = 200
_UNMARKED_CHARACTERS = 5_000


def final_answer(response: str) -> FinalAnswer | None:
    """Return the response's final answer; None where it gives none, or leaves its last box empty."""
    text = response[-MOST_CHARACTERS:].rstrip()
    text = text.replace("<|begin_of_box|>", "\\boxed{").replace("<|end_of_box|>", "}")
    while ending := _TURN_END.search(text, max(0, len(text) - 40)):
        text = text[: ending.start()].rstrip()
    text = behind_thoughts(text)
    return _marked(text) or _unmarked(text)


_SENTENCE = re.compile(
    r"(?:[A-Za-z]|,)\s+[^\n]*\b(?:is|are|was|were|equals|be)\s+((?:[-−]?[\d.]|\\?\$|\\(?!text))[^.!?\n]*(?:\.\d+)?[^.!?\n]{0,40})\.?\Z"
)
"""A truth that is a sentence about a number, such as "The sum is 6."."""


def final_truth(truth: str) -> FinalAnswer | None:
    """Return the answer that a ground truth is, or ends with when it is a worked solution; None if it is blank."""
    text = behind_thoughts(truth[-MOST_CHARACTERS:].strip())
    found = _marked(text, lenient=False)
    if found is None and len(text) <= _MOST_WHOLE and (told := _SENTENCE.search(text)):
        return FinalAnswer(told[1], "ground truth")
    if found is None and text:
        return FinalAnswer(text, "ground truth")
    return found


_MIXED = re.compile(
    r"(-?\d+)\s*(?:\\text\s*\{\s*and\s*\}|and)\s*(\d+\s*/\s*\d+|\\[dt]?frac\s*\{?\d+\}?\s*\{?\d+\}?)(\D*)"
)
_DECIMAL_COMMA = re.compile(
    r"([-−]?€?\d+),(\d{1,2}|\d{4,})((?:\s|\\[,;: ]|~)*"
    r"(?:\\?%|[€$£]|\\(?:text|mathrm)\{[^{}]*\}(?:\^\S+)?|[a-zA-Z]{1,12}\b)?)"
)
_GERMAN = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+),(\d+)(?![\d.,])")
_LETTERS_OF_CHOICES = re.compile(r"[A-J]{2,6}")


def other_spellings(found: FinalAnswer) -> list[str]:
    """Return the answer's text, and what else it may mean, which a truth never does.

    ``20!`` may end a sentence, ``3,14`` have a decimal comma, ``1 and 3/4`` be a mixed number; the letters of several
    choices have no order.
    """
    text = found.text
    texts = [text]
    if found.mark not in ("last box", "last formula") and text.endswith("!"):
        texts.append(text.rstrip("!"))
    if mixed := _MIXED.fullmatch(text):
        texts.append(f"{mixed[1]} {mixed[2]}{mixed[3]}")
    if comma := _DECIMAL_COMMA.fullmatch(text):
        texts.append(f"{comma[1]}.{comma[2]}{comma[3]}")
    if _GERMAN.search(text):
        texts.append(_GERMAN.sub(lambda found: f"{found[1].replace('.', '')}.{found[2]}", text))
    if _LETTERS_OF_CHOICES.fullmatch(text):
        texts.append("".join(sorted(set(text))))
    return texts


def behind_thoughts(text: str) -> str:
    """Return what follows the last ``</think>``; the whole text without one, or when nothing follows."""
    ends = list(_THOUGHT.finditer(text))
    return text[ends[-1].end() :] if ends and text[ends[-1].end() :].strip() else text


def _marked(text: str, *, lenient: bool = True) -> FinalAnswer | None:
    """Return the answer at the last mark: box, tag, ``####`` or ``Answer:``; spoken marks where nothing else is."""
    found: list[tuple[int, FinalAnswer]] = []
    box = _last_box(text)
    inside = range(0)
    if box is not None:
        found.append((box[0].start, box[1]))
        inside = box[0]
    before, tag, tagged = text.rpartition(_TAG if _TAG in text else _TAG.upper())
    tagged = re.split(r"</answer>", tagged, maxsplit=1, flags=re.IGNORECASE)[0].strip()
    if tag and tagged and (box is None or inside.start < len(before)):
        found.append((len(before), _marked(tagged) or FinalAnswer(tagged, "<answer>")))
    for pattern, mark in ((_HASHES, "####"), (_STRONG, "Answer")):
        marks = [told for told in pattern.finditer(text) if told.start() not in inside]
        if marks and (answer := _line(text, marks[-1].start(1) if mark == "####" else marks[-1].end())):
            alone = _NUMBER_THEN_WORDS.match(answer) if mark == "####" else None
            found.append((marks[-1].start(), FinalAnswer(alone[1] if alone else answer, mark)))
    if members := list(_JSON.finditer(text)):
        found.append((members[-1].start(), FinalAnswer(_member(members[-1]), "Answer")))
    if found:
        last = max(found, key=lambda item: item[0])[1]
        return last if last.text else None if last.mark != "last box" else FinalAnswer("", "last box")
    spoken = list(_SPOKEN.finditer(text)) if lenient or len(text) < _MOST_WHOLE else []
    for told in reversed(spoken):
        if answer := _line(text, told.end()):
            return FinalAnswer(answer, "answer is")
    return None


def _member(found: re.Match[str]) -> str:
    r"""Return a member's text. Models escape TeX for JSON (``\\frac``) or do not (``\frac``)."""
    text = (found["text"] or found["bare"]).strip()
    escaped = all(len(run) % 2 == 0 for run in _ESCAPES.findall(text))
    return text.replace("\\\\", "\\") if escaped else text


def _unmarked(text: str) -> FinalAnswer | None:
    whole = text[-_UNMARKED_CHARACTERS:].strip()
    formulas = list(_FORMULA.finditer(whole))
    if len(formulas) > 1 and _REASON.fullmatch(whole, formulas[-2].end(), formulas[-1].start()):
        formulas.pop()
    if formulas:
        return FinalAnswer(_joined_formulas(whole, formulas), "last formula")
    bold = list(_BOLD.finditer(whole))
    if bold and (any(character.isdigit() for character in bold[-1]["bold"]) or _ENDS_BOLD.search(whole)):
        return FinalAnswer(_unwrapped(bold[-1]["bold"]), "last bold text")
    told = re.search(r"[a-z]{2,}\s+[-−]?\\?[$€£]?\d|[\u3040-\u9fff]{3}\d", whole)
    if (
        whole
        and not told
        and "\n" not in whole
        and len(whole) <= _MOST_WHOLE
        and (len(whole.split()) <= 3 or "\\" in whole or _EQUATION.fullmatch(whole))
    ):
        return FinalAnswer(_LABEL.sub("", whole), "whole response")
    numbers = list(_NUMBER.finditer(whole))
    if told := _NO_SOLUTION.search(whole):
        return FinalAnswer(told[1], "last words")
    if not numbers:
        return None
    begin = numbers[-1]
    if parts := next((part for part in _PARTS.finditer(whole) if part.start() <= begin.start() < part.end()), None):
        return FinalAnswer(parts[0], "last number")
    for number in reversed(numbers[:-1]):
        if not _NUMBERS_JOINED.fullmatch(whole, number.end(), begin.start()):
            break
        begin = number
    return FinalAnswer(whole[begin.start() : numbers[-1].end()], "last number")


def _last_box(text: str) -> tuple[range, FinalAnswer] | None:
    """Return where the last box stands, the innermost of nested ones, and what it holds."""
    marks = list(_BOX.finditer(text))
    if not marks:
        return None
    last = _inside_box(text, marks[-1].end(), len(text))
    run, begins = [last[1]], marks[-1].start()
    for mark in reversed(marks[:-1]):
        end, inside = _inside_box(text, mark.end(), begins)
        if not _BETWEEN_BOXES.fullmatch(text[end:begins]) or not inside:
            break
        run.append(inside)
        begins = mark.start()
    adjacent = ", ".join(reversed(run)) if len(run) > 1 else ""
    return range(marks[-1].start(), last[0]), FinalAnswer(last[1], "last box", adjacent)


def _inside_box(text: str, start: int, limit: int) -> tuple[int, str]:
    """Return the end and the contents of a box; one that stays open holds the rest of its formula."""
    if text.startswith("{", start):
        unescaped = _ESCAPED.sub("  ", text[start:limit])
        end = closing_brace(unescaped, 0) or closing_brace(text[start:limit], 0)
        if end is not None:
            return start + end + 1, text[start + 1 : start + end].strip()
        stop = _BOX_END.search(text, start, limit)
        stays_open = stop.start() if stop else limit
        return stays_open, text[start + 1 : stays_open].strip()
    bare = _BARE_BOX.match(text, start, limit)
    return (bare.end(), bare[0].rstrip(".,;")) if bare else (start, "")


def _line(text: str, start: int) -> str:
    """Return the answer that begins at ``start``: its formula, or the rest of its sentence on that line."""
    rest = text[start : start + 4000].lstrip(" \t\r\n*_:：#")
    formula = _FORMULA.match(rest)
    if formula:
        formulas = [formula]
        while (joint := _FORMULAS_JOINED.match(rest, formulas[-1].end())) and (
            following := _FORMULA.match(rest, joint.end())
        ):
            formulas.append(following)
        after = re.match(
            r"[ \t]*(?:\\?%|(?!and\b|or\b|is\b|so\b|since\b|which\b|where\b)[a-z]{1,12}\b)(?=[.\s]|\Z)",
            rest[formulas[-1].end() :],
        )
        return ", ".join(_inside(item) for item in formulas) + (
            f" \\text{{{after[0]}}}" if after and len(formulas) == 1 and "\\text" not in formula[0] else ""
        )
    end = _SENTENCE_END.search(rest)
    return _unwrapped(rest[: end.start()] if end else rest)


def _joined_formulas(text: str, formulas: list[re.Match[str]]) -> str:
    """Return the last formula, with those before it that commas and "and" join to it."""
    run = [formulas[-1]]
    for formula in reversed(formulas[:-1]):
        if not _FORMULAS_JOINED.fullmatch(text[formula.end() : run[-1].start()]):
            break
        run.append(formula)
    return ", ".join(_inside(formula) for formula in reversed(run))


def _inside(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None).strip()


def _unwrapped(text: str) -> str:
    """Return the text without Markdown around it."""
    text = text.strip().strip("`").strip()
    if (bold := _BOLD.match(text)) and bold["bold"][:1].isdigit():
        text = bold["bold"] + text[bold.end() :]
    elif text.count("**") == 1:  # the bold text began before the answer
        text = text.replace("**", "")
    for mark in ("**", "__", "*"):
        text = text.removeprefix(mark)
        text = text.removesuffix(mark)
    return text.strip()


# What the rules with verl's names read:


def text_truth(ground_truth: Any, rule: str) -> str:
    """Return the ground truth; raise ``DataError`` if it is not text.

    verl compares the answer with a ground truth of any type, and so scores such rows 0 or ends the run.
    """
    if isinstance(ground_truth, str):
        return ground_truth
    raise DataError(f"ground_truth is {ground_truth!r} ({type(ground_truth).__name__}); {rule} needs it as text")


_OPENED = re.compile(r"<(?:think|thinking|thought|reasoning|reason|scratchpad)>\s*\Z")


def with_opened_thought(sample: Sample) -> str:
    """Return the response, with the ``<think>`` that the chat template wrote at the end of the prompt."""
    opened = None if sample.completion else _OPENED.search(sample.prompt[-100:])
    if opened is None or sample.response.lstrip().startswith(opened[0].strip()):
        return sample.response
    return opened[0] + sample.response


_BOXED = "\\boxed{"
_BRACE = re.compile(r"[{}]")
_SIMPLE_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=[^a-zA-Z\s])|\\boxed\s+(?=\S)")


def closing_brace(text: str, start: int) -> int | None:
    """Return the index of the brace that closes the first one from ``start`` on; None if it stays open."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0 and brace[0] == "}":
            return brace.start()
    return None


def last_braced(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{…}``; None without one, or if the last one is not closed."""
    start = text.rfind(_BOXED)
    end = closing_brace(text, start) if start >= 0 else None
    return None if end is None else text[start + len(_BOXED) : end]


def last_box(text: str) -> str | None:
    r"""Return the contents of the last box of any form: ``\boxed{5}``, ``\boxed {5}``, ``\boxed 5``, ``\fbox{5}``.

    Without braces the box ends at the next blank, ``$`` or line end. None if there is no box, or it stays open.
    """
    boxes = list(_SIMPLE_BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if text[start] != "{":
        return re.split(r"[\s$]", text[start:], maxsplit=1)[0]
    end = closing_brace(text, start)
    return None if end is None else text[start + 1 : end]
