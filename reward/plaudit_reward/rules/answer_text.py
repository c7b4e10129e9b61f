r"""Bring the text of an answer into one spelling: LaTeX, Markdown, Unicode and plain words become the same signs.

In the result, relations and sets are single signs (``≤ ∈ ∪ ∅``), the braces of sets are ``⦃ ⦄``, and words stand
between ``WORD`` and ``WORD_END``, so that ``72\text{ clips}`` and ``72 clips`` are the same, and no word is taken for a
product of letters.
"""

from __future__ import annotations

import re
import unicodedata

from plaudit_reward.rules.units import MULTIPLIERS, UNITS, si_unit, unit_product

WORD, WORD_END = "\x02", "\x03"
_GREEK = ("pi", "theta", "alpha", "beta", "lambda", "phi", "omega")
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—﹣‒", "-"),
        **dict.fromkeys("×⋅·∙•", " \\cdot "),
        **dict.fromkeys("÷∕⁄", "/"),
        **dict.fromkeys("°º", "^\\circ "),
        **dict.fromkeys("′’‘", "'"),
        **dict.fromkeys("“”", '"'),
        **dict(zip("。，；：、⩽⩾⋯", ".,;:,≤≥…", strict=True)),
        **dict(zip("٫٬،؛٪", ".,,;%", strict=True)),
        **{sign: f"\\{name} " for sign, name in zip("πθαβλφω", _GREEK, strict=True)},
        "√": "\\sqrt ",
        "∛": "\\sqrt[3] ",
        "∜": "\\sqrt[4] ",
        "∞": "\\infty ",
        "℃": "^\\circ C",
        "℉": "^\\circ F",
        "＄": "\\$",
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_THIN = re.compile(
    r"(?<=\d)(?:\s*(?:\\[,!]|[\u2009\u202f\u00a0]|\{,\}|\{\\,\}|,\s*\\!|\\(?:text|mathrm)\{,\}|"
    r"\\thinspace\b)\s*)+(?=\d)(?!\d{1,2}\s*/)"
)
_DECIMAL_COMMA = re.compile(r"(?:(?<![\d,}])|(?<=\d\\,))(\d+)\{,\}(?!\d{3}(?!\d))(?=\d)(?!\d*\{,\})")
_SPACES = re.compile(
    r"(?<!\\)\\[,!;: ]|~|\\(?:q?quad|thinspace|hspace\*?\{[^{}]*\}|hfill|noindent|limits|nolimits)(?![a-zA-Z])"
)
_ROW_SPACE = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|e[mx]|[cm]m|in)\s*\]")
_LEFT_OUT = re.compile(
    r"\\(?:checkmark|qed|blacksquare|left|right|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|large|Large|normalsize|mathstrut|boldmath|"
    r"mathop|ensuremath|strut|rm|bf|it|sf|tt)(?![a-zA-Z])\.?|\\(?:label|tag|phantom)\*?\{[^{}]*\}|\\(?:text)?color\{[^{}]*\}"
)
_COMMANDS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "\\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), "\\binom"),
    **dict.fromkeys(("le", "leq", "leqslant"), "≤"),
    **dict.fromkeys(("ge", "geq", "geqslant"), "≥"),
    **dict.fromkeys(("ne", "neq"), "≠"),
    "lt": "<",
    "gt": ">",
    "in": "∈",
    **dict.fromkeys(("approx", "simeq", "sim"), "≈"),
    "equiv": "≡",
    "colon": ":",
    **dict.fromkeys(("cup", "bigcup"), "∪"),
    **dict.fromkeys(("cap", "bigcap"), "∩"),
    **dict.fromkeys(("setminus", "smallsetminus", "backslash"), "∖"),
    **dict.fromkeys(("emptyset", "varnothing"), "∅"),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc", "dotsb", "dotso", "vdots"), "…"),
    "pm": "±",
    "mp": "∓",
    "lbrace": "⦃",
    "rbrace": "⦄",
    "langle": "⟨",
    "rangle": "⟩",
    "lbrack": "[",
    "rbrack": "]",
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("R", "reals", "Reals"), "ℝ"),
    **dict.fromkeys(("deg", "degree", "degrees"), "^\\circ "),
    "div": "/",
    **dict.fromkeys(("implies", "therefore", "Longrightarrow", "Rightarrow"), " "),
    **dict.fromkeys(("land", "wedge"), "∧"),
    **dict.fromkeys(("lor", "vee"), "∨ "),
    "percent": "%",
    "triangle": "△",
    "pounds": "£",
    "yen": "¥",
    "rupee": "₹",
    "euro": "€",
    "operatorname": "",
    "overrightarrow": "\\vec",
    "top": "T",
    **dict.fromkeys(("to", "rightarrow", "longrightarrow"), "→"),
    "tg": "\\tan ",
    **dict.fromkeys(("ctg", "cotg"), "\\cot "),
    "arctg": "\\arctan ",
    **dict.fromkeys(("rightleftharpoons", "leftrightharpoons"), "⇌"),
}
_COMMAND = re.compile(r"\\([a-zA-Z]+)(?![a-zA-Z])[ ]?")
_TEXTS = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|up|normal)?|mbox|hbox|mathrm|mathsf|mathtt|operatorname\*?)\s*\{((?:[^{}]|\^\{-?\d\})*)\}"
)
_BOLD = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|mathit|mathnormal|mathcal|mathscr|underline|"
    r"cancel|emph|boxed|fbox|uline)\s*(?=\{)|\\vec\s*(?=\{\s*[A-Za-z]\s*\}|[A-Za-z])"
)
_BRACED_NAME = re.compile(r"(?<![A-Za-z^_}\]])\{([A-Za-z])\}(?=_)")
_BLACKBOARD = re.compile(r"\\mathbb\s*\{?\s*([A-Z])\s*\}?|(?:\A|(?<=\\in)|(?<=\\in )|(?<=∈))\\mathbf\s*\{([A-Z])\}")
_SETS = {"R": "ℝ", "Z": "ℤ", "N": "ℕ", "Q": "ℚ", "C": "ℂ"}
_PLAIN_SET = re.compile(r"(?<=∈)\s*([RZNQ])(?![A-Za-z])")
_UNION = re.compile(r"(?<=[)\]])\s*U\s*(?=[(\[])")
_MARK = r"\\(?:mathbf|boldsymbol|bm|textbf|vec|hat|widehat)\s*"
_UNIT_VECTOR = re.compile(
    rf"{_MARK}(?:\{{\s*)?(?:{_MARK}(?:\{{\s*)?)?(?:\\(?=[ij]math))?(?P<name>[ijk])(?:math)?(?![a-zA-Z])\s*\}}{{0,2}}"
)
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_RECURRING = re.compile(r"(?<!\d)(\d{0,40})\.(\d{0,40}?)(?:(\d{1,6}?)\3{2,}|(\d{2,8})\4)\d{0,5}\s*…")
_DOTTED_RECURRING = re.compile(r"(?<=\.)(\d*)\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?(?!\d)")
_CUT_DECIMALS = re.compile(r"(?<=\d)(\.\d+)\s*…\s*\Z")
_RAISED_FRACTION = re.compile(r"\^\s*\{?(\d+)\}?\s*/\s*_\s*\{?(\d+)\}?")
_OF_COUNTING = r"(?:\\(?:mathrm|text|rm|mathbf)\s*\{\s*[CPA]\s*\}|\{?[CPA]\}?)"
_COUNTING = re.compile(
    rf"(?<![\w}})])(?:\{{\}}|\\,)?\s*[_^]\s*\{{?(?P<a>\w+)\}}?\s*(?P<n>{_OF_COUNTING})\s*_\s*\{{?(?P<b>\w+)\}}?"
    rf"|(?P<m>{_OF_COUNTING})\s*_\s*\{{?(?P<c>\d+)\}}?\s*\^\s*\{{?(?P<d>\d+)\}}?"
    rf"|(?P<l>{_OF_COUNTING})\s*\^\s*\{{?(?P<f>\d+)\}}?\s*_\s*\{{?(?P<e>\d+)\}}?"
    r"|(?<![\w.\\])(?P<g>\d+)\s?(?P<o>[CP])\s?(?P<h>\d+)(?!\w)"
)
"""Numbers of choices and of arrangements, such as ``{}_{10}C_3``, ``C_{10}^3``, ``10C3``."""
_BRACKETED_RECURRING = re.compile(r"(?<![\d)])(\d*\.\d*)\((\d+)\)")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d]| *\\?/)")
_SHORT_IN_BRACKETS = re.compile(r"\(.{0,2}|\([iv]{1,4}\)")
_MATH_IN_TEXT = re.compile(r"[\s\d.,+\-*/^=()\[\]%:;$]*")
_OVER = re.compile(r"(?:\{|\A)([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)(?:\}|\Z)")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_THOUSANDS = re.compile(r"(?<![\w.'])\d{1,3}(?:(?:'\d{3})+|(?:_\d{3})+|(?:\.\d{3}){2,})(?![\w'])")
_UNIT_POWERS = re.compile(
    r"[A-Za-z]+(?:\^(?:-?\d|\{-?\d\}))?(?:\s*(?:/|\\cdot|\s)\s*[A-Za-z]+(?:\^(?:-?\d|\{-?\d\}))?)*"
)
_UNIT_FRACTION = re.compile(
    rf"\\frac\s*\{{\s*({WORD}[^{WORD_END}]*{WORD_END})\s*\}}\s*\{{\s*({WORD}[^{WORD_END}]*{WORD_END}(?:\^\{{?\d\}}?)?)\s*\}}"
)
_OHM = re.compile(
    r"(?<=[\d}])(?:\\[ ,;:]|[\s~])*(?:\\(?:text|mathrm)\{\s*([kM]?)\s*(?:\\Omega|[ΩΩ])\s*\}"
    r"|(?:\\(?:text|mathrm)\{([kM])\}|([kM]))?\s*(?:\\Omega(?![a-zA-Z])|[ΩΩ]))"
)
_LITRES = re.compile(r"(?<=\d)(?:\\[ ,;:]|[\s~])*\\ell(?![a-zA-Z])")
_MICRO = re.compile(r"\\mu\s*(\\(?:text|mathrm)\{)")
_CURRENCY_NAMES = re.compile(r"(?<![A-Za-z])(?:(USD|US(?=¤))|(Rs\.?|INR)|(EUR)|(GBP))\s*(?=¤?\s*\d)")
_CURRENCIES = {**{sign: sign for sign in "¤€£¥₹"}, "US¤": "¤", "USD": "¤", "EUR": "€", "GBP": "£"}
_CURRENCIES |= dict.fromkeys(("INR", "Rs", "Rs."), "₹")
"""Signs by what stands in ``\\text{…}`` before or behind an amount."""
_FUNCTION_NAMES = frozenset(
    re.findall(
        r"\w+",
        "sin cos tan sec csc cot sinh cosh tanh arcsin arccos arctan tg ctg cotg arctg asin acos atan exp floor ceil "
        "ln log lg sqrt cbrt cis gcd lcm max min pi abs inf infinity mod bmod",
    )
)
_LETTERS = re.compile(r"[A-Za-z]+")
_UNIT_LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]+")
_CONSTANT = re.compile(rf"(?<=\+)\s*{WORD}(?:(?:an? )?(?:arbitrary )?(?:constant|const)){WORD_END}")
_LETTER_OF_UNIT = re.compile(rf"(?<=[\d ])([a-zA-Z])(?=\s*/\s*{WORD})")
_POLAR = re.compile(r"(?<=[\d})])\s*\\angle(?![a-zA-Z])\s*(?=-?[\d\\({])")
_LAST_CONDITION = re.compile(r"(?<=[\w)}])(?:\s+(?=\([a-z]\s*[<>≤≥≠])|\s*(?=\([a-z]\s*∈))\(([^()]+)\)\Z")
_MINUS = re.compile(rf"{WORD}(?i:minus|negative){WORD_END}\s*(?=[\d\\(])")
_OTHER_SCRIPTS = "\u0400-\u04ff\u0600-\u06ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_PLAIN_WORD = re.compile(
    rf"(?<![\\A-Za-zÀ-ÿ\x02])[A-Za-zÀ-ÖØ-öø-ÿ]{{2,}}(?:'[a-z]{{1,2}}(?![A-Za-z])|-[A-Za-z]{{2,}})*|[{_OTHER_SCRIPTS}]+"
)
_SHORT_WORDS = frozenset(re.findall(r"\w+", "or and no is of by to at an up am pm we if on as so us it do"))
_PROSE = frozenset(
    re.findall(r"\w+", "and any way ways day days man part may bad sad mad mat tan yard bar car dad ant cat")
)
_PRODUCT = re.compile(r"[abcdkmnpqrstuvwxyz]{3,4}")


_NUM = re.compile(r"\\num\s*\{([^{}]*)\}")
_QUANTITY = re.compile(r"\\(?:SI|qty)\s*\{([^{}]*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_CHEMISTRY = re.compile(r"\\ce\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_DEGREES_OF = re.compile(
    r"(?:\{\}\s*)?\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*(?:\\(?:text|mathrm|rm)\s*\{\s*([CF])\s*\}|([CF]))(?![a-zA-Z])"
)
_UPRIGHT = r"\\(?:text|mathrm|mathsf|rm)\s*\{((?:[^{}]|\{-?\d?\})*)\}"
_UNIT_NAMES = re.compile(_UPRIGHT + r"(?!\s*\^)")
_UNITS_OVER = re.compile(
    r"\\[dt]?frac\s*\{((?:[^{}]|\{[^{}]*\})*)\}\s*\{((?:[^{}]|\{[^{}]*\})*)\}"
    rf"|{_UPRIGHT}\s*/\s*\(((?:[^(){{}}]|\{{[^{{}}]*\}})*)\)"
)


def _units(text: str) -> str:
    """Mark products and quotients of units, such as those of a heat capacity, as one word."""

    def upright(found: re.Match[str]) -> str:
        units = unit_product(found[1])
        return f"{WORD}{units}{WORD_END}" if units else found[0]

    def over(found: re.Match[str]) -> str:
        above, below = (re.sub(_UPRIGHT, r" \1 ", part) for part in found.groups() if part is not None)
        names = re.search(_UPRIGHT, found[0]) is not None
        units = unit_product(f"{above}/({below})") if names else ""
        return f"{WORD}{units}{WORD_END}" if units else found[0]

    text = _DEGREES_OF.sub(lambda found: f"°{found[1] or found[2]}", text)
    return _UNIT_NAMES.sub(upright, _UNITS_OVER.sub(over, text))


_CIRCLED = re.compile(r"(?<=[①-⑳])\s*(?:[、,，;；和]|\\text\s*\{\s*和\s*\})\s*(?=[①-⑳])")
"""Between the numbers of statements, as in ``①、③``."""
_JOINTS = {**dict.fromkeys(("或", "或者", "または", "또는"), "or"), **dict.fromkeys("和与及且", "and")}
_JOINT = re.compile(
    rf"\\(?:text|mathrm|mbox)\s*\{{\s*(?P<marked>{'|'.join(_JOINTS)})\s*\}}"
    r"|(?<=[A-Za-z0-9)}\])）$%°π])\s*(?P<bare>或者?|または|또는|[和与及且])\s*(?=[A-Za-z0-9({\[（\\$+−√π-])"
)
"""The words "or" and "and" of other languages, between formulas: between words they are a part of these."""
_PLAIN_MATRIX = re.compile(r"\\([pbv]?matrix)\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_SMALL_MATRIX = re.compile(r"\\(begin|end)\{([pbBvV])smallmatrix\*?\}")
_END_OF_ROW = re.compile(r"\\cr(?![a-zA-Z])")


def _one_dialect(text: str) -> str:
    """Write matrices of plain TeX and of mathtools, and what joins answers in other languages, as in LaTeX."""
    text = _PLAIN_MATRIX.sub(r"\\begin{\1}\2\\end{\1}", text)
    text = _END_OF_ROW.sub(r"\\\\", _SMALL_MATRIX.sub(r"\\\1{\2matrix}", text))
    text = _CIRCLED.sub("", text)
    return _JOINT.sub(lambda found: f" \\text{{ {_JOINTS[found['marked'] or found['bare']]} }} ", text)


def plain_text(text: str) -> str:
    """Return the answer in the one spelling that this module's first lines describe."""
    text = _one_dialect(text)
    text = _QUANTITY.sub(lambda found: f"{found[1]}\\text{{ {si_unit(found[2])}}}", _NUM.sub(r"\1", text))
    text = _CHEMISTRY.sub(lambda found: _of_chemistry(found[1]), text)
    text = _POLAR.sub(r"\\operatorname{cis} ", text)
    text = _units(_without_dollars(_unicode(text.strip())))
    text = _OVER.sub(lambda found: f"\\{'frac' if found[2] == 'over' else 'binom'}{{{found[1]}}}{{{found[3]}}}", text)
    text = _CURRENCY_NAMES.sub(lambda found: "¤₹€£"[(found.lastindex or 1) - 1], text).replace("¤¤", "¤")
    text = _COUNTING.sub(_counted, _RAISED_FRACTION.sub(r"\\frac{\1}{\2}", _ROW_SPACE.sub(r"\\\\", text)))
    text = re.sub(r"\^?\s*\{?\s*\\prime(\s*\\prime)?\s*\}?", lambda found: "''" if found[1] else "'", text)
    text = _DECIMAL_COMMA.sub(r"\1.", text)
    text = _LITRES.sub(r"\\text{ L}", text)
    text = _OHM.sub(lambda found: f"\\text{{{found[1] or found[2] or found[3] or ''}Ω}}", _MICRO.sub(r"\1μ", text))
    text = _words_of_commands(_THIN.sub("", text))
    text = text.replace("\\(", " ").replace("\\)", " ").replace("\\[", " ").replace("\\]", " ")
    text = text.replace("\\{", "⦃").replace("\\}", "⦄").replace("\\|", "|")
    text = re.sub(r"\{([:;=])\}", r"\1", _SPACES.sub(" ", text))
    text = _LEFT_OUT.sub("", text)
    text = _UNIT_VECTOR.sub(r"\\hat{\g<name>}", text) if len(set(_UNIT_VECTOR.findall(text))) > 1 else text
    text = _BLACKBOARD.sub(lambda found: _SETS.get(found[1] or found[2], found[0]), text)
    text = _COMMAND.sub(lambda found: _COMMANDS.get(found[1], found[0]), _BRACED_NAME.sub(r"\1", _BOLD.sub("", text)))
    text = _PLAIN_SET.sub(lambda found: _SETS[found[1]], _UNION.sub("∪", text))
    text = text.replace("\\%", "%").replace("**", "^") if not text.startswith("**") else text.strip("*")
    text = re.sub(
        r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)", "°", text.replace("<=", "≤").replace(">=", "≥").replace("!=", "≠")
    )
    text = _numbers(_with_determinants(text))
    text = _UNIT_FRACTION.sub(r"\1/\2", _marked_words(text))
    text = _LETTER_OF_UNIT.sub(lambda found: f"{WORD}{found[1]}{WORD_END}" if found[1] in UNITS else found[1], text)
    text = _COMPARED.sub(lambda found: " ≥≤><"[found.lastindex or 0], text)
    text = _MINUS.sub("-", _CONSTANT.sub(" C", text))
    return _trimmed(_LAST_CONDITION.sub(r", \1", re.sub(r"\s+", " ", text)))


def _of_chemistry(text: str) -> str:
    r"""Write what ``\ce{…}`` holds as a formula: ``SO4^2-`` is ``SO_4^{2-}``."""
    text = re.sub(r"\s[v^](?=\s|\Z)", "", text)  # a solid that falls, a gas that rises
    text = re.sub(r"(?<=[\w)])\s*[.*]\s*(?=\d*[A-Z])", "·", text.replace("<=>", " ⇌ ").replace("->", " → "))
    return re.sub(r"\^(\d*[+-])", r"^{\1}", re.sub(r"(?<=[A-Za-z)\]])(\d+)", r"_\1", text))


_DETERMINANT = re.compile(
    r"(?:(?:\\det|\x02det\x03)\s*(?P<bracket>[(\[])?\s*|(?P<bar>\|)\s*|)\\begin\{(?P<kind>(?:[pbvV]|small)?matrix|array)\}(?:\{[clr]*\})?"
    r"(?P<inside>(?:(?!\\begin).)*?)\\end\{(?P=kind)\}(?(bracket)\s*[)\]])(?(bar)\s*\|)",
    re.DOTALL,
)
_LARGEST_DETERMINANT = 4


def _with_determinants(text: str) -> str:
    """Write each small determinant as the sum that it stands for, and the norm of a column as a root."""

    def expression(found: re.Match[str]) -> str:
        rows = [[cell.strip() for cell in row.split("&")] for row in re.split(r"\\\\", found["inside"]) if row.strip()]
        is_square = 2 <= len(rows) <= _LARGEST_DETERMINANT and all(len(row) == len(rows) for row in rows)
        has_bars = found["kind"] == "vmatrix" or (found["bar"] and found["kind"] in ("matrix", "smallmatrix", "array"))
        if is_square and (has_bars or (not found["bar"] and found[0].lstrip()[:4] in ("\\det", f"{WORD}det"))):
            return _expanded(rows)
        cells = [cell for row in rows for cell in row]
        if found["kind"] == "Vmatrix" and len(cells) == len(rows) > 1:
            return f"\\sqrt{{{'+'.join(f'({cell})^2' for cell in cells)}}}"
        return found[0]

    return _DETERMINANT.sub(expression, text)


def _expanded(rows: list[list[str]]) -> str:
    """Return the expansion of a determinant by its first row."""
    if len(rows) == 1:
        return f"({rows[0][0]})"
    minors = [_expanded([row[:column] + row[column + 1 :] for row in rows[1:]]) for column in range(len(rows))]
    terms = [f"{'+-'[column % 2]}({rows[0][column]})*{minor}" for column, minor in enumerate(minors)]
    return f"({''.join(terms).removeprefix('+')})"


def _unicode(text: str) -> str:
    for vulgar in set(text):
        if (form := unicodedata.normalize("NFKC", vulgar)) != vulgar and "⁄" in form:
            above, _, below = form.partition("⁄")
            text = text.replace(vulgar, f"\\frac{{{above}}}{{{below}}}")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    text = "".join(sign for sign in text.translate(_SIGNS) if unicodedata.category(sign) != "Cf")
    text = "".join(str(unicodedata.decimal(sign)) if sign.isdecimal() else sign for sign in text)
    text = "".join(
        unicodedata.normalize("NFKC", sign) if "\uff00" <= sign <= "\uffef" or sign in "ℓ" or sign.isdigit() else sign
        for sign in unicodedata.normalize("NFC", text)
    )
    return text.replace("...", "…").replace("\\cdot\\cdot\\cdot", "…")


def _without_dollars(text: str) -> str:
    """Remove the dollar signs of formulas; those of money become ``¤``."""
    text = text.replace("\\$", "¤").replace("\\textdollar", "¤").replace("$$", "$")
    if text.count("$") % 2:
        return re.sub(r"\$\s*(?=-?[\d.(])", "¤", text).replace("$", "")
    return text.replace("$", " " if text.startswith("$") or " $" in text else "")


def _counted(found: re.Match[str]) -> str:
    """Write a number of choices as a binomial coefficient, one of arrangements as a quotient of factorials."""
    of, taken = (next(found[name] for name in names if found[name]) for names in ("aceg", "bdfh"))
    if of.isdecimal() and taken.isdecimal() and int(of) < int(taken):
        return found[0]  # a power of a variable, such as A_1^2
    name = next(found[group] for group in "nmlo" if found[group])
    if "C" in name:
        return f"\\binom{{{of}}}{{{taken}}}"
    return f"\\frac{{({of})!}}{{(({of})-({taken}))!}}"


def _words_of_commands(text: str) -> str:
    r"""Mark what stands in ``\text{…}`` as words, unless it is mathematics."""

    def words(found: re.Match[str]) -> str:
        inside = _SPACES.sub(" ", found[1])
        bare = inside.strip()
        if _MATH_IN_TEXT.fullmatch(bare) or _SHORT_IN_BRACKETS.fullmatch(bare):
            return f" {inside} "
        if bare in _CURRENCIES:
            return _CURRENCIES[bare]
        if bare in _FUNCTION_NAMES and bare not in UNITS:
            return f"\\{bare} "
        if len(bare) == 1 and bare not in UNITS:
            return f" {bare} "
        if (
            "^" in bare
            and _UNIT_POWERS.fullmatch(bare)
            and all(word in UNITS for word in _LETTERS.findall(bare.replace("\\cdot", "")))
        ):
            return _UNIT_LETTERS.sub(rf"{WORD}\g<0>{WORD_END}", f" {bare} ")
        if "\\" in bare or any(sign.isdigit() for sign in bare):
            return f" {inside} "
        parts = [f"{WORD}{' '.join(part.split())}{WORD_END}" for part in re.split("[,;]", bare) if part.strip()]
        return f"{', ' if bare[0] in ',;' else ''}{', '.join(parts)}{', ' if bare[-1] in ',;' else ''}"

    for _ in range(3):
        text = _TEXTS.sub(words, text)
    return text


def _numbers(text: str) -> str:
    r"""Write numbers in one way: ``3e8``, ``0.333…``, ``0.(3)`` and ``1 234 567``."""
    text = _THOUSANDS.sub(lambda found: re.sub(r"\D", "", found[0]), _TIMES_TEN.sub(r" \\cdot ", text))
    text = _SCIENTIFIC.sub(r"(\1 \\cdot 10^{\2})", text)
    text = _DOTTED_RECURRING.sub(r"\1\\overline{\2\3\4}", text)
    text = _RECURRING.sub(lambda found: rf"{found[1]}.{found[2]}\overline{{{found[3] or found[4]}}}", text)
    text = _CUT_DECIMALS.sub(r"\1", text)
    text = _BRACKETED_RECURRING.sub(r"\1\\overline{\2}", text)
    return _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)


_COMPARED = re.compile(
    rf"(?<=[A-Za-z)}}])\s*{WORD}(?:is |are |must be |should be )?(?:(at least|no less than|greater than or equal to)|"
    rf"(at most|no more than|less than or equal to)|((?:strictly )?(?:greater|more) than)|((?:strictly )?less than))"
    rf"{WORD_END}"
)
"""As in ``k \text{ is at least } 4``."""


def _marked_words(text: str) -> str:
    """Mark the plain words, and leave functions, variables and their products."""
    pieces = re.split(f"({WORD}[^{WORD_END}]*{WORD_END})", text)
    pieces[::2] = [_PLAIN_WORD.sub(_marked_word, piece) for piece in pieces[::2]]
    text = "".join(pieces)
    return re.sub(
        f"{WORD_END}(?:\\s+(an?|be)\\s+|\\s*){WORD}", lambda found: f" {found[1]} " if found[1] else " ", text
    )


def _marked_word(found: re.Match[str]) -> str:
    return f"{WORD}{found[0]}{WORD_END}" if _is_word(found) else found[0]


_NAME_FOLLOWS = ("_{", "_", "\\overline{", "\\overrightarrow{", "\\vec{", "\\begin{", "\\end{")
_COUNTED = re.compile(r"(?:[\d})¤°]|\\pi| sq| cu)\s*\Z")
"""What stands before a unit, or before what is counted."""


def _is_word(found: re.Match[str]) -> bool:
    """Return True for a word of prose or a unit, False for a function, a name, or variables side by side."""
    word, before, behind = found[0], found.string[: found.start()], found.string[found.end() :]
    if before.endswith(_NAME_FOLLOWS):
        return False
    if not word.isascii():
        return True
    counted = _COUNTED.search(before) is not None
    if word.lower() in _FUNCTION_NAMES:
        return word.lower() == "mod" or (counted and word in UNITS)
    if "-" in word:  # ab-cd is a difference of products
        return any(len(part) > 2 and not _PRODUCT.fullmatch(part) for part in word.split("-"))
    behind_blank = before[-1:].isspace()
    if len(word) == 2:
        return _is_word_of_two_letters(word, counted, behind_blank)
    if _PRODUCT.fullmatch(word):
        alone = not (before.strip() or behind) and bool(set(word) & set("aeiou"))
        known = word in _PROSE or word in UNITS or word in MULTIPLIERS
        return alone or known or (counted and behind_blank)
    names_points = word.isupper() and len(word) <= 4
    return not (names_points and (before.rstrip()[-1:] in ("=", "+", "-", "∠") or behind[:1] in ("=", "+", "^")))


def _is_word_of_two_letters(word: str, counted: bool, behind_blank: bool) -> bool:
    lower = word.lower()
    if counted and (word in UNITS or lower in ("sq", "cu") or (lower in UNITS and behind_blank)):
        return True
    return lower in _SHORT_WORDS and not word.isupper()


_QUOTED = re.compile(r"""\A(["'])([^"']+)\1\Z""")


def _trimmed(text: str) -> str:
    text = _QUOTED.sub(r"\2", text.strip().strip("`").strip()).strip()
    while text and (text[-1] in ".,;:?*\\" or text.endswith(f"{WORD_END}!")):
        text = text[:-1].rstrip()
    while text and text[0] in "≈=:*≡":
        text = text[1:].lstrip()
    return text


def words_of(text: str) -> str:
    """Return the text in small letters, without signs and articles, with single blanks."""
    text = text.replace(WORD, " ").replace(WORD_END, " ").casefold()
    text = re.sub(r"[^\w+\-*/^=<>≤≥≠∈∪∅…|'%°]+", " ", text)
    words = text.split()
    # The a of "a, b" is a letter, not an article.
    articles = {i for i, word in enumerate(words[:-1]) if word == "a" and len(words[i + 1]) > 1}
    return " ".join(word for i, word in enumerate(words) if i not in articles and word not in ("an", "the"))


OPENING, CLOSING = "([{⦃⟨", ")]}⦄⟩"


def closes(text: str) -> int:
    """Return where the bracket closes with which the text begins; -1 if it does not. Ends of intervals may differ."""
    depth = 0
    for index, sign in enumerate(text):
        depth += (sign in OPENING) - (sign in CLOSING)
        if depth == 0:
            return index
    return -1


def split(text: str, signs: str, words: tuple[str, ...] = ()) -> list[str]:
    """Split a text at signs and words that stand outside of brackets."""
    parts, depth, start, index = [], 0, 0, 0
    while index < len(text):
        sign = text[index]
        if sign == WORD:
            end = text.find(WORD_END, index)
            end = len(text) - 1 if end < 0 else end
            if depth <= 0 and words:
                inner = re.split(rf"(?<![\w-])(?:{'|'.join(words)})(?![\w-])", text[index + 1 : end])
                if len(inner) > 1:
                    marked = [f"{WORD}{part.strip()}{WORD_END}" if part.strip() else "" for part in inner]
                    parts.append(text[start:index] + marked[0])
                    parts += marked[1:-1]
                    text = marked[-1] + text[end + 1 :]
                    start, index = 0, len(marked[-1])
                    continue
            index = end + 1
            continue
        depth += (sign in OPENING) - (sign in CLOSING)
        if depth == 0 and sign in signs and sign not in CLOSING:
            parts.append(text[start:index])
            start = index + 1
        index += 1
    return [*parts, text[start:]]
