r"""Read what chemists write: formulas, ions, reactions, electron configurations, nuclides and names of substances.

``H2O`` and ``H_2O`` are one formula, ``2H2 + O2 -> 2H2O`` is a reaction however its arrow is spelled, and the order of
the substances on a side has no meaning. A single letter is no formula, because it is a variable far more often.
"""

from __future__ import annotations

import re
from fractions import Fraction

from plaudit_reward.rules.answer_text import WORD, WORD_END
from plaudit_reward.rules.answer_types import Reaction, Shells, Substance, Value, Words

_ELEMENTS = re.findall(
    r"[A-Z][a-z]?",
    "HHeLiBeBCNOFNeNaMgAlSiPSClArKCaScTiVCrMnFeCoNiCuZnGaGeAsSeBrKrRbSrYZrNbMoTcRuRhPdAgCdInSnSbTeIXeCsBaLaCePrNdPmSm"
    "EuGdTbDyHoErTmYbLuHfTaWReOsIrPtAuHgTlPbBiPoAtRnFrRaAcThPaUNpPuAmCmBkCfEsFmMdNoLrRfDbSgBhHsMtDsRgCnNhFlMcLvTsOg",
)
"""In the order of their atomic numbers."""
_ARROW = re.compile(r"\s*(→|⟶|⇒|--?>|⇌|⇄|≤>|<=>|<-+>|=)\s*")
_SUBSCRIPT = re.compile(r"\s*_\s*(?:\{\s*(\d+)\s*\}|(\d+))")
_CHARGE = re.compile(r"\^\s*(?:\{\s*(\d*)\s*([+-])\s*(\d*)\s*\}|(\d?)([+-]))")
_SUBSTANCE = re.compile(
    r"(?:(?P<above>\d+)(?:/(?P<below>\d+))?)?\s*"
    r"(?P<formula>(?:[A-Z][a-z]?(?:_?\d+)?|[(\[](?=[A-Z(\[])|[)\]](?:_?\d+)?|·\d*)+"
    r"|⟦\d+⟧(?:[A-Z][a-z]?|[np])|e(?=\^))"
    r"(?:\^(?P<charge>\d*[+-])|(?P<sign>[+-])(?=\s*(?:\+|\(|\Z)))?"
    r"\s*(?P<state>\((?:s|l|g|aq)\))?"
)
_SIDE = re.compile(rf"{_SUBSTANCE.pattern}(?:\s*\+\s*(?=\S)|\Z)")
_MOST_SUBSTANCES = 20


def reaction(plain: str) -> list[Value]:
    """Read a formula with its charge, ``SO_4^{2-}``, a nuclide, or a reaction, ``CaCO3(s) -> CaO(s) + CO2(g)``."""
    if not re.search("[A-Z]", plain):
        return []
    first, *others = _ARROW.split(_bare(plain))
    if len(others) > 2:
        return []
    sides = [_side(part) for part in (first, *others[1::2])]
    if not all(sides):
        return []
    if not others and (len(sides[0]) > 1 or not re.search(r"\d|\^|[A-Z].*[A-Z]", sides[0][0].formula)):
        return []
    arrow = "=" if "=" in others else "⇌" if others and others[0][0] in "⇌⇄≤<" else "→"
    return [Reaction(arrow if others else "", tuple(sides))]


_NUCLIDE = re.compile(
    r"(?:\{\s*\}\s*|(?<![\w)\]}]))(?:\^\s*\{?(?P<mass>\d+)\}?\s*(?:_\s*\{?(?P<protons>-?\d+)\}?)?"
    r"|_\s*\{?(?P<p>-?\d+)\}?\s*\^\s*\{?(?P<m>\d+)\}?)\s*\{?(?P<name>[A-Z][a-z]?|[nep](?![a-z]))\}?"
    r"|\A(?P<element>[A-Z][a-z]?)-(?P<a>\d+)\Z"
)
_PROTONS = {name: number for number, name in enumerate(_ELEMENTS, 1)} | {"n": 0, "p": 1}


def _nuclide(found: re.Match[str]) -> str:
    """Write ``^{14}_{6}C`` and ``C-14`` as ``⟦14⟧C``; one with the protons of another element stays as it is."""
    name, protons = found["name"] or found["element"], found["protons"] or found["p"]
    mass = found["mass"] or found["m"] or found["a"]
    if name == "e":
        return {"1": "e^+", "-1": "e^-"}.get(protons or "", found[0])
    return f"⟦{mass}⟧{name}" if protons is None or int(protons) == _PROTONS.get(name) else found[0]


def _bare(plain: str) -> str:
    """Return the text without marks of words, braces and most blanks; ``_2`` and ``^2-`` are indices and charges."""
    text = re.sub(r"[↑↓]|\\(?:uparrow|downarrow)(?![a-zA-Z])", "", plain.replace(WORD, "").replace(WORD_END, ""))
    text = re.sub(r"\\frac\s*\{(\d+)\}\s*\{(\d+)\}", r"\1/\2", text)
    text = _NUCLIDE.sub(_nuclide, re.sub(r"\\(?:mathrm|text|mathsf)(?![a-zA-Z])", "", text).strip())
    text = _SUBSCRIPT.sub(lambda found: f"_{found[1] or found[2]}", text)
    text = _CHARGE.sub(lambda found: f"^{_count(found[1] or found[3] or found[4])}{found[2] or found[5]}", text)
    text = re.sub(r"\s*(?:\\cdot|\*)\s*(?=\d*[A-Z])", "·", text)
    return re.sub(r"[{}]|(?<![-+])\s+(?![-+])", "", text)


def _count(digits: str | None) -> str:
    return "" if digits in (None, "1") else str(digits)


def _side(text: str) -> tuple[Substance, ...]:
    """Return the substances of one side in the order of their formulas; none if anything of it is none."""
    found: list[Substance] = []
    position = 0
    while position < len(text) and len(found) < _MOST_SUBSTANCES:
        match = _SIDE.match(text, position)
        if match is None or not _is_formula(match["formula"]):
            return ()
        found.append(_substance(match))
        position = match.end()
    return tuple(sorted(found)) if position == len(text) else ()


def _is_formula(formula: str) -> bool:
    known = all(name in _ELEMENTS for name in re.findall(r"[A-Z][a-z]?", formula))
    return known and all(formula.count(pair[0]) == formula.count(pair[1]) for pair in ("()", "[]"))


def _substance(match: re.Match[str]) -> Substance:
    formula, charge = match["formula"], match["charge"] or ""
    if match["sign"]:
        # In plain text the last digit before the sign is the charge in Cu2+ and SO42-, and an index in NH4+.
        single = re.fullmatch(r"([A-Z][a-z]?|.*\])(\d)|(.*[A-Za-z)\]]\d)(\d)", formula)
        formula, digits = (single[1] or single[3], single[2] or single[4]) if single else (formula, "")
        charge = f"{_count(digits)}{match['sign']}"
    amount = Fraction(int(match["above"] or 1), int(match["below"] or 1) or 1)
    return Substance(formula.replace("_", "") + (f"^{charge}" if charge else ""), amount, (match["state"] or "")[1:-1])


def same_reaction(given: Reaction, truth: Reaction) -> str | None:
    """Return why two formulas or reactions are equal, or None; states count where the truth names any."""
    same_arrow = given.arrow == truth.arrow or "=" in (given.arrow, truth.arrow)
    ours, theirs = given.sides, truth.sides
    if not any(substance.state for side in theirs for substance in side):
        ours, theirs = (tuple(tuple(_stateless(item) for item in side) for side in sides) for sides in (ours, theirs))
    if not same_arrow or ours != theirs:
        return None
    return "the same reaction" if truth.arrow else "the same formula"


def _stateless(substance: Substance) -> Substance:
    return substance._replace(state="")


_SHELL = re.compile(r"([1-7][spdf])\^?(?:\{(\d{1,2})\}|(\d{1,2}?))(?=[1-7][spdf]|\Z)")
_CORES = {
    "He": "1s2",
    "Ne": "[He]2s2 2p6",
    "Ar": "[Ne]3s2 3p6",
    "Kr": "[Ar]3d10 4s2 4p6",
    "Xe": "[Kr]4d10 5s2 5p6",
    "Rn": "[Xe]4f14 5d10 6s2 6p6",
}


def electron_configuration(plain: str) -> list[Value]:
    """Read ``1s^2 2s^2 2p^6 3s^1``, and ``[Ne] 3s^1`` as the same."""
    bare = re.sub(rf"[\s{WORD}{WORD_END}]|\\cdot", "", plain)
    core = re.match(r"\[([A-Z][a-z])\]", bare)
    shells = bare[core.end() :] if core else bare
    found = list(_SHELL.finditer(shells))
    if "".join(shell[0] for shell in found) != shells or (core or ["", ""])[1] not in ("", *_CORES):
        return []
    if len(found) < (1 if core else 2):
        return []
    inner = electron_configuration(_CORES[core[1]]) if core and core[1] != "He" else []
    filled = {f"{shell[1]}{shell[2] or shell[3]}" for shell in found} | ({"1s2"} if core else set())
    filled |= {shell for value in inner if isinstance(value, Shells) for shell in value.filled}
    return [Shells(frozenset(filled))]


_NAME = re.compile(r"(?=.*[A-Za-z]{4})(?=.*(?:\d-[A-Za-z]|[A-Za-z]-\d))[\w,()'\[\] -]{5,80}")


def name_of_substance(plain: str) -> list[Value]:
    """Read a systematic name, such as ``2,2-Dimethylpropane``, in which neither blanks nor the first capital count."""
    bare = plain.replace(WORD, "").replace(WORD_END, "").strip()
    return [Words(re.sub(r"\s", "", bare).casefold(), is_prose=False)] if _NAME.fullmatch(bare) else []
