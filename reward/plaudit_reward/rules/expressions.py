r"""Read a mathematical expression, in LaTeX or plain text, into a tree; compute its value with bounded work.

The parser is strict: ``4+``, ``7\sqrt`` and an unknown command are no expressions, so that nothing of an answer is
dropped in silence. Nothing is ever evaluated as code. Rational values are exact (``exact``), others have ``DIGITS``
decimal digits (``numeric``). Whatever is too large to compute raises ``NoValueError``.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import mpmath  # type: ignore[import-untyped]

DIGITS = 60
"""Decimal digits of values that are not rational."""
MAX_CHARACTERS = 2000
"""A longer answer is no expression."""
_MAX_DEPTH = 60
_MAX_BITS = 200_000
_MAX_FACTORIAL = 5_000


class NotAnExpressionError(ValueError):
    """The text is no expression that this parser knows."""


class NoValueError(ValueError):
    """The expression has no value: it is undefined there, or too large to compute."""


class Node(NamedTuple):
    """Hold one operation of an expression, its operands in ``parts``; leaves are ``number`` and ``symbol``."""

    kind: str
    parts: tuple[Any, ...]


PI, INFINITY = Node("constant", ("pi",)), Node("constant", ("oo",))
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(mpmath, name) for name in ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh")},
    **{name: getattr(mpmath, name) for name in ("exp", "floor", "ceil")},
    **{f"arc{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    **{f"a{name}": getattr(mpmath, f"a{name}") for name in ("sin", "cos", "tan", "sinh", "cosh", "tanh")},
    "ln": mpmath.log,
    "cis": mpmath.expj,
    "abs": abs,
    "max": max,
    "min": min,
}
_LISTED: dict[str, Callable[..., Any]] = {"max": max, "min": min, "gcd": math.gcd, "lcm": math.lcm}
_NAMES = sorted((*_FUNCTIONS, "log", "lg", "sqrt", "gcd", "lcm", "cbrt"), key=len, reverse=True)
_COMMANDS = {"lfloor": ("\\rfloor", "floor"), "lceil": ("\\rceil", "ceil")}
_GREEK = frozenset(
    re.findall(
        r"\w+",
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau "
        "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell",
    )
)
_NAMED_MARKS = frozenset(("overline", "bar", "vec", "hat", "tilde", "overrightarrow", "widehat", "dot"))
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.(?!\.)\d*)?|\.\d+)|(?P<command>\\[a-zA-Z]+)|(?P<name>"
    + "|".join(_NAMES)
    + r"|pi(?![a-z])|infinity|inf(?![a-z]))|(?P<sign>\*\*|[-+*/^_!(){}\[\]⦃⦄|,'°])|(?P<letter>[A-Za-z]))"
)


def number(value: Fraction | int, digits: int | None = None) -> Node:
    """Return the leaf of a number; ``digits`` are the significant digits of a decimal fraction, None: it is exact."""
    return Node("number", (Fraction(value), digits))


def parsed(text: str) -> Node:
    """Return the tree of an expression; raise ``NotAnExpressionError`` if any part of the text is none."""
    if len(text) > MAX_CHARACTERS:
        raise NotAnExpressionError("it is too long")
    parser = _Parser(list(_tokens(text)))
    node = parser.sum()
    if parser.peek():
        raise NotAnExpressionError(f"{parser.peek()!r} is left over")
    return node


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    position, end = 0, len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        if found is None:
            raise NotAnExpressionError(f"{text[position : position + 10]!r} cannot be read")
        kind = str(found.lastgroup)
        token = found[kind]
        if kind == "command" and token[1:] in _NAMES:
            kind, token = "name", token[1:]
        yield kind, "^" if token == "**" else token
        position = found.end()


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0

    def peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _kind(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self.peek()
        if not token:
            raise NotAnExpressionError("it ends too early")
        self._at += 1
        return token

    def _take(self, *tokens: str) -> str:
        """Take the next token if it is one of these."""
        if self.peek() in tokens:
            return self._next()
        return ""

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise NotAnExpressionError(f"{token} is missing")

    def sum(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise NotAnExpressionError("it is nested too deeply")
        node = self._product()
        while sign := self._take("+", "-"):
            right = self._product()
            node = Node("+", (node, right if sign == "+" else Node("neg", (right,))))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        if sign := self._take("+", "-"):
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise NotAnExpressionError("it is nested too deeply")
            node = self._product()
            self._depth -= 1
            return Node("neg", (node,)) if sign == "-" else node
        node = self._power()
        while True:
            if self._take("*", "\\cdot", "\\times", "\\ast"):
                node = Node("*", (node, self._signed_power()))
            elif self._take("/", "\\div"):
                node = Node("/", (node, self._signed_power()))
            elif self._take("\\bmod", "\\mod"):
                node = Node("mod", (node, self._signed_power()))
            elif self._begins_factor():
                node = self._adjacent(node)
            else:
                return node

    def _signed_power(self) -> Node:
        """Read a power with its sign: a factor, or what one ``^`` raises to, as in ``2^-3`` and ``2^3^2``."""
        sign = self._take("+", "-")
        node = self._power()
        return Node("neg", (node,)) if sign == "-" else node

    def _adjacent(self, left: Node) -> Node:
        """Multiply with the factor that follows; an integer before a proper fraction is a mixed number."""
        mixes = left.kind == "number" and left.parts[1] is None and left.parts[0].denominator == 1
        begins, is_digit = self.peek(), self._kind() == "number"
        if is_digit and left.kind == "number":
            if not (self._at + 1 < len(self._tokens) and self._tokens[self._at + 1][1] == "/"):
                raise NotAnExpressionError("two numbers stand side by side")
            above = self._primary()
            self._expect("/")
            right = Node("/", (above, self._primary()))
            begins = "\\frac"
        else:
            right = self._power()
        if (
            mixes
            and begins in ("\\frac", "{")
            and right.kind == "/"
            and all(part.kind == "number" for part in right.parts)
        ):
            above, below = (part.parts[0] for part in right.parts)
            if 0 < above < below:
                return Node("+", (left, right))
        if is_digit and left.kind == "number":
            raise NotAnExpressionError("two numbers stand side by side")
        return Node("*", (left, right))

    def _begins_factor(self) -> bool:
        token, kind = self.peek(), self._kind()
        if kind in ("number", "letter", "name"):
            return True
        if token == "|":
            return not self._bars
        known = token[1:] in _GREEK or token[1:] in _NAMED_MARKS or token[1:] in _COMMANDS
        return token in ("(", "{", "[", "\\frac", "\\binom", "\\pi", "\\infty") or (kind == "command" and known)

    def _power(self) -> Node:
        base = self._primary()
        while True:
            if self._take("!"):
                base = Node("!", (base,))
            elif self._take("°"):
                base = Node("/", (Node("*", (base, PI)), number(180)))
            elif self._take("^"):
                return Node("^", (base, self._signed_power()))
            else:
                return base

    def _primary(self) -> Node:
        kind, token = self._kind(), self._next()
        if kind == "number":
            return self._number(token)
        if kind == "letter":
            return (self._counting(token) if token in ("C", "P") else None) or self._subscripted(token)
        if kind == "name":
            return self._named(token)
        for opening, closing in (("(", ")"), ("{", "}"), ("[", "]")):
            if token == opening:
                bars, self._bars = self._bars, 0
                node = self.sum()
                self._expect(closing)
                self._bars = bars
                return node
        if token == "|":
            self._bars += 1
            node = self.sum()
            self._expect("|")
            self._bars -= 1
            return Node("function", ("abs", node))
        return self._command(token)

    def _number(self, token: str) -> Node:
        repeated = self._repeated() if "." in token else ""
        if repeated:
            whole, _, fixed = token.partition(".")
            shift = 10 ** len(fixed)
            value = Fraction(int((whole or "0") + fixed), shift)
            return number(value + Fraction(int(repeated), shift * (10 ** len(repeated) - 1)))
        if "." not in token:
            return self._with_base(token)
        digits = token.replace(".", "").lstrip("0")
        return number(Fraction(token.rstrip(".") if token[0] != "." else f"0{token}"), max(1, len(digits)))

    def _repeated(self) -> str:
        r"""Take ``\overline{3}`` behind a decimal point."""
        start = self._at
        if self._take("\\overline", "\\bar", "\\dot"):
            braced = self._take("{")
            token = self._next()
            if token.isdecimal() and (not braced or self._take("}")):
                return token
        self._at = start
        return ""

    def _with_base(self, token: str) -> Node:
        if not self._take("_"):
            return number(int(token))
        braced = self._take("{")
        base = int(text) if (text := self._next()).isdecimal() and len(text) < 3 else 0
        if braced:
            self._expect("}")
        if not 2 <= base <= 36:
            raise NotAnExpressionError(f"{base} is no base")
        try:
            return number(int(token, base))
        except ValueError as error:
            raise NotAnExpressionError(str(error)) from error

    def _counting(self, name: str) -> Node | None:
        """Take the arguments of ``C(10, 3)``, a number of choices, or ``P(10, 3)``, one of arrangements."""
        start = self._at
        if self._take("("):
            of = self.sum()
            if self._take(","):
                taken = self.sum()
                self._expect(")")
                return Node("binomial", (of, taken)) if name == "C" else arrangements(of, taken)
        self._at = start
        return None

    def _subscripted(self, name: str) -> Node:
        subscript = self._subscript()
        while self._take("'"):
            subscript += "'"
        return Node("symbol", (f"{name}_{subscript}" if subscript else name,))

    def _subscript(self) -> str:
        if not self._take("_"):
            return ""
        if not self._take("{"):
            return self._next()
        inside = ""
        while (token := self._next()) != "}":
            if token == "{":
                raise NotAnExpressionError("a subscript holds braces")
            inside += token
        return inside

    def _named(self, name: str) -> Node:
        if name in ("pi", "infinity", "inf"):
            return PI if name == "pi" else INFINITY
        if name == "sqrt":
            return self._root()
        if name in ("gcd", "lcm", "max", "min"):
            return self._of_list(name)
        base: Node | None = None
        if name in ("log", "lg"):
            base = number(10) if name == "lg" else None
            if self._take("_"):
                base = self._primary()
        power = self._signed_power() if self._take("^") else None
        node = Node("function", (name, self._argument()))
        if base is not None:
            node = Node("/", (Node("function", ("ln", node.parts[1])), Node("function", ("ln", base))))
        if power is None:
            return node
        if power == Node("neg", (number(1),)) and f"arc{name}" in _FUNCTIONS:
            return Node("function", (f"arc{name}", node.parts[1]))
        return Node("^", (node, power))

    def _argument(self) -> Node:
        r"""Return the argument of a function: in brackets, or the factors up to the next sign, as in ``\sin 2x``."""
        if self.peek() in ("(", "{", "["):
            return self._primary()
        sign = self._take("-")
        node = self._power()
        while self._kind() in ("number", "letter") or self.peek() in ("\\pi", "\\frac") or self.peek()[1:] in _GREEK:
            node = self._adjacent(node)
        while self._take("/"):
            node = Node("/", (node, self._power()))
        return Node("neg", (node,)) if sign else node

    def _root(self) -> Node:
        degree: Node = number(2)
        if self._take("["):
            degree = self.sum()
            self._expect("]")
        inside = self._one()
        if inside.kind == "number" and inside.parts[0] >= 0 and degree == number(2):
            root = math.isqrt(inside.parts[0].numerator), math.isqrt(inside.parts[0].denominator)
            if Fraction(*root) ** 2 == inside.parts[0]:
                return number(Fraction(*root), inside.parts[1])
        return Node("^", (inside, Node("/", (number(1), degree))))

    def _of_list(self, name: str) -> Node:
        if not (closing := {"(": ")", "{": "}", "⦃": "⦄"}.get(self._next())):
            raise NotAnExpressionError(f"{name} has no arguments")
        items = [self.sum()]
        while self._take(","):
            items.append(self.sum())
        self._expect(closing)
        return Node("function", (name, *items))

    def _one(self) -> Node:
        r"""Return one argument of a command as TeX takes it: a group, or one token (``\frac12``)."""
        kind, token = self._kind(), self.peek()
        if kind == "number" and len(token) > 1:
            self._tokens[self._at : self._at + 1] = [("number", token[0]), ("number", token[1:])]
        if token == "{":
            return self._primary()
        if kind == "number":
            return number(int(self._next())) if token[0] != "." else self._number(self._next())
        return self._primary()

    def _command(self, token: str) -> Node:
        name = token[1:]
        if name == "frac":
            above = self._one()
            return Node("/", (above, self._one()))
        if name == "binom":
            above = self._one()
            return Node("binomial", (above, self._one()))
        if name in ("pi", "infty"):
            return PI if name == "pi" else INFINITY
        if name in _GREEK:
            return self._subscripted(token)
        if name in _COMMANDS:
            closing, function = _COMMANDS[name]
            node = self.sum()
            self._expect(closing)
            return Node("function", (function, node))
        if name in _NAMED_MARKS:
            marked = self._next() if self.peek() != "{" else self._marked()
            return self._subscripted(f"{token} {marked}")
        raise NotAnExpressionError(f"{token} is unknown")

    def _marked(self) -> str:
        self._expect("{")
        inside = ""
        while (token := self._next()) != "}":
            inside += token
        return inside


def nodes_of(node: Node) -> Iterator[Node]:
    """Yield an expression and all that it consists of."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [part for part in node.parts if isinstance(part, Node)]


def symbols(node: Node) -> set[str]:
    """Return the names of the variables; ``e`` and ``i`` are numbers."""
    return {each.parts[0] for each in nodes_of(node) if each.kind == "symbol"} - {"e", "i"}


def has_symbol(node: Node, name: str) -> bool:
    """Return True if the expression contains the symbol of that name."""
    return Node("symbol", (name,)) in nodes_of(node)


def names_pi(node: Node) -> bool:
    """Return True if the expression contains pi, as an angle in radians does."""
    return PI in nodes_of(node)


def functions(node: Node) -> set[str]:
    """Return the names of the functions."""
    return {each.parts[0] for each in nodes_of(node) if each.kind == "function"}


def renamed(node: Node, name: str, other: str) -> Node:
    """Return the expression with another name for a symbol."""
    return replaced(node, name, Node("symbol", (other,)))


def replaced(node: Node, name: str, value: Node) -> Node:
    """Return the expression with a value in place of a symbol."""
    if node == Node("symbol", (name,)):
        return value
    return Node(
        node.kind, tuple(replaced(part, name, value) if isinstance(part, Node) else part for part in node.parts)
    )


def scaled(node: Node, factor: Fraction | int) -> Node:
    """Return so many times the expression."""
    return node if factor == 1 else Node("*", (node, number(factor)))


def arrangements(of: Node, taken: Node) -> Node:
    """Return the number of ways to arrange so many of that many things."""
    return Node("/", (Node("!", (of,)), Node("!", (Node("+", (of, Node("neg", (taken,)))),))))


def decimal_digits(node: Node) -> int | None:
    """Return the fewest significant digits of the decimal fractions in the expression; None if there are none."""
    found = (each.parts[1] for each in nodes_of(node) if each.kind == "number")
    return min((digits for digits in found if digits is not None), default=None)


def exact(node: Node) -> Fraction | None:
    """Return the value if it is computed with rational numbers alone; None: it is not rational, or not known to be.

    Raises ``NoValueError`` for a division by zero, and where the value would be too large to hold.
    """
    if node.kind == "number":
        value: Fraction = node.parts[0]
        return value
    if node.kind in ("symbol", "constant"):
        return None
    values = [exact(part) for part in node.parts if isinstance(part, Node)]
    if any(value is None for value in values):
        return None
    result = _rational(node, [value for value in values if value is not None])
    if result is not None and max(result.numerator.bit_length(), result.denominator.bit_length()) > _MAX_BITS:
        raise NoValueError("it is too large")
    return result


_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "neg": operator.neg,
    "*": operator.mul,
    "/": operator.truediv,
    "mod": operator.mod,
}


def _rational(node: Node, values: list[Fraction]) -> Fraction | None:
    if node.kind in ("/", "mod") and values[1] == 0:
        raise NoValueError("it divides by zero")
    if node.kind in _ARITHMETIC:
        return Fraction(_ARITHMETIC[node.kind](*values))
    match node.kind:
        case "^":
            return _rational_power(*values)
        case "!":
            return Fraction(math.factorial(_natural(values[0], _MAX_FACTORIAL)))
        case "binomial":
            return Fraction(math.comb(_natural(values[0], _MAX_FACTORIAL), _natural(values[1], _MAX_FACTORIAL)))
    return _rational_function(node.parts[0], values)


def _rational_function(name: str, values: list[Fraction]) -> Fraction | None:
    if name in ("gcd", "lcm") and all(value.denominator == 1 for value in values):
        return Fraction(_LISTED[name](*(value.numerator for value in values)))
    if name in ("max", "min"):
        return Fraction(_LISTED[name](values))
    simple: dict[str, Callable[[Fraction], Fraction | int]] = {"abs": abs, "floor": math.floor, "ceil": math.ceil}
    return Fraction(simple[name](values[0])) if name in simple else None


def _rational_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1:
        return _rational_root(base, exponent)
    if base == 0 and exponent < 0:
        raise NoValueError("it divides by zero")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base in (0, 1, -1):
        return base if exponent % 2 else Fraction(abs(base) if exponent or base else 1)
    if bits * abs(exponent) > _MAX_BITS:
        raise NoValueError("it is too large")
    return Fraction(base ** int(exponent))


def _rational_root(base: Fraction, exponent: Fraction) -> Fraction | None:
    """Return a root that is rational, such as the cube root of 8/27; None for others."""
    degree = exponent.denominator
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if base < 0 or degree > 64 or bits > 4096:
        return None
    with mpmath.workdps(bits // 3 + 20):
        roots = [int(mpmath.nint(mpmath.root(part, degree))) for part in (base.numerator, base.denominator)]
    root = Fraction(*roots) if roots[1] else None
    return _rational_power(root, Fraction(exponent.numerator)) if root is not None and root**degree == base else None


def _natural(value: Fraction, most: int) -> int:
    if value.denominator != 1 or not 0 <= value <= most:
        raise NoValueError("it is too large, or no natural number")
    return value.numerator


def numeric(node: Node, at: Mapping[str, Fraction] | None = None) -> Any:
    """Return the value to ``DIGITS`` digits, with the variables' values ``at``; raise ``NoValueError`` without one."""
    with mpmath.workdps(DIGITS + 15):
        try:
            value = _numeric(node, at or {})
        except (ValueError, ArithmeticError, TypeError, KeyError, mpmath.libmp.NoConvergence) as error:
            raise NoValueError(str(error)) from error
        if mpmath.isnan(value):
            raise NoValueError("it is undefined")
        return value


def _numeric(node: Node, at: Mapping[str, Fraction]) -> Any:
    if node.kind == "number":
        return mpmath.mpf(node.parts[0].numerator) / node.parts[0].denominator
    if node.kind == "constant":
        return +mpmath.pi if node.parts[0] == "pi" else mpmath.inf
    if node.kind == "symbol":
        name = node.parts[0]
        if name not in at and name in ("e", "i"):
            return mpmath.e + 0 if name == "e" else mpmath.mpc(0, 1)
        return mpmath.mpf(at[name].numerator) / at[name].denominator
    values = [_numeric(part, at) for part in node.parts if isinstance(part, Node)]
    return _operation(node, values)


def _operation(node: Node, values: list[Any]) -> Any:
    if node.kind in _ARITHMETIC:
        return _ARITHMETIC[node.kind](*values)
    match node.kind:
        case "^":
            return _numeric_power(*values)
        case "!":
            return mpmath.gamma(_bounded(values[0] + 1))
        case "binomial":
            return mpmath.binomial(_bounded(values[0]), _bounded(values[1]))
    name = node.parts[0]
    if name in ("gcd", "lcm"):
        raise NoValueError(f"{name} needs integers")
    if name in ("sinh", "cosh", "tanh", "exp"):
        values = [_bounded(value) for value in values]
    if name in ("log", "lg"):
        return mpmath.log(values[0])
    return _FUNCTIONS[name](*values)


def _bounded(value: Any) -> Any:
    if abs(value) > 100_000:
        raise NoValueError("it is too large")
    return value


def _numeric_power(base: Any, exponent: Any) -> Any:
    if base != 0 and abs(exponent * mpmath.log(abs(base) or 1)) > 1e6:
        raise NoValueError("it is too large")
    real = all(isinstance(value, mpmath.mpf) or value.imag == 0 for value in (base, exponent))
    if real and base < 0:
        # An odd root of a negative number is the real one, as in school.
        ratio = Fraction(str(mpmath.nstr(1 / exponent, 20))) if exponent else Fraction(0)
        if ratio.denominator == 1 and ratio.numerator % 2 and abs(ratio) > 1:
            return -((-base) ** exponent)
    return base**exponent
