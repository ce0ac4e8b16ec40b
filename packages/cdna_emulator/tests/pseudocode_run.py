"""Translates a pseudo-code text to Python and runs it; see `pseudocode`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
from pseudocode import FLOATS, NARROW, Denormal, Number, SignedZero, decode, number, of_float, width_of

_TYPES = {"U": "u", "I": "i", "F": "f", "B": "b"}


class Bytes(dict[int, Number]):
    """An array of the pseudo-code."""

    def __getitem__(self, key: Any) -> Number:
        return super().__getitem__(int(key))


class Power:
    """A power of two of any size, as a factor."""

    def __init__(self, exponent: int) -> None:
        self.exponent = min(max(exponent, -5000), 5000)

    def __mul__(self, x: Number) -> Number:
        value = x.value
        if math.isfinite(value) and value != 0:
            value = Fraction(value) * Fraction(2) ** self.exponent
        return of_float(value, x.kind)

    __rmul__ = __mul__


def cast(kind: str, value: Any) -> Any:
    """`32'U(x)` and the like; of an integer literal, `32'F` takes the bits."""
    if isinstance(value, Power):
        return value
    if kind[0] == "f":
        if isinstance(value, int):
            return Number(value, kind)
        value = number(value)
        is_bits = value.kind[0] == "b" and value.kind[1:].isdigit()
        return Number(value.bits, kind) if is_bits else of_float(float(value), kind)
    value = number(value)
    return Number(value.bits if value.floating or kind[0] == "b" else value.value, kind)


def _convert(source: str, target: str, *, scaled: bool, down: bool = False) -> Callable[..., Number]:
    def convert(x: Number, scale: Any = None) -> Number:
        value = getattr(x, source).value if x.kind != source else x.value
        if target in ("snorm", "unorm"):
            low, limit = (-1.0, 32767) if target == "snorm" else (0.0, 65535)
            value = 0.0 if math.isnan(value) else min(max(value, low), 1.0)
            return Number(round(Fraction(value) * limit), "i16" if target == "snorm" else "u16")
        if scaled:
            field = int(number(scale)) & 255
            exponent = field - 127 if source in NARROW else 127 - field
            if field == 255:
                value = math.nan
            elif math.isfinite(value) and value:
                value = Fraction(value) * Fraction(2) ** exponent
        if target in FLOATS or target in NARROW:
            return of_float(value if isinstance(value, float) else Fraction(value), target, down=down)
        bits = width_of(target)
        least, most = (
            (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if target[0] == "i" else (0, (1 << bits) - 1)
        )
        if math.isnan(value):
            value = 0
        elif math.isinf(value):
            value = most if value > 0 else least
        return Number(min(max(int(value), least), most), target)

    return convert


def _float_function(function: Callable[[float], float]) -> Callable[[Number], Number]:
    def apply(x: Number) -> Number:
        value = x.value
        return x if not math.isfinite(value) else of_float(math.copysign(function(value), value), x.kind)

    return apply


def _in_double(function: Callable[[Any], Any]) -> Callable[..., Number]:
    def apply(*arguments: Number) -> Number:
        with np.errstate(all="ignore"):
            return of_float(float(function(*(np.float64(float(a)) for a in arguments))), arguments[-1].kind)

    return apply


def _floor(x: Number) -> Number:
    return x if not math.isfinite(x.value) else of_float(float(np.floor(x.value)), x.kind)


def _fma(x: Number, y: Number, z: Number) -> Number:
    a, b, c = x.value, y.value, z.value
    if not all(map(math.isfinite, (a, b, c))):
        with np.errstate(all="ignore"):
            return of_float(float(np.float64(a) * np.float64(b) + np.float64(c)), x.kind)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return of_float(a * b + c if a == 0 or b == 0 else 0.0, x.kind)
    return of_float(exact, x.kind)


def _exponent(x: Number) -> Number:
    exponent_bits, mantissa_bits = FLOATS[x.kind]
    return Number(x.bits >> mantissa_bits & ((1 << exponent_bits) - 1), "i32")


def _is_nan(x: Number, quiet: bool | None = None) -> bool:
    if not math.isnan(x.value):
        return False
    return quiet is None or bool(x.bits >> (FLOATS[x.kind][1] - 1) & 1) == quiet


def _sign_from(x: Any, count: Any) -> Number:
    x, bits = number(x), int(count)
    if bits == 0:
        return Number(0, x.kind)
    if bits >= x.width:
        return x
    low = x.bits & ((1 << bits) - 1)
    return Number(low - (1 << bits) if low >> (bits - 1) else low, x.kind)


def _extreme(largest: bool) -> Callable[[Number, Number], Number]:
    def pick(x: Number, y: Number) -> Number:
        if math.isnan(x.value) or math.isnan(y.value):
            return of_float(math.nan, x.kind)
        key = lambda n: (n.value, -(n.bits >> (n.width - 1)))  # noqa: E731
        return (max if largest else min)(x, y, key=key)

    return pick


def _concatenate(*pieces: Any) -> Number:
    bits, width = 0, 0
    for piece in pieces:
        piece = number(piece)
        bits, width = bits << piece.width | piece.bits, width + piece.width
    return Number(bits, f"b{width}")


_FUNCTIONS: dict[str, Any] = {
    "cast": cast, "lit": lambda value, kind: Number(value, kind), "flit": of_float, "cat": _concatenate,
    "PLUS_ZERO": SignedZero(False), "MINUS_ZERO": SignedZero(True), "DENORM": Denormal(), "PI": math.pi,
    "trunc": _float_function(lambda v: float(np.trunc(v))), "floor": _floor, "fma": _fma,
    "fract": lambda x: x - _floor(x), "sqrt": _in_double(np.sqrt), "log2": _in_double(np.log2),
    "pow": _in_double(np.power), "exponent": _exponent, "sign": lambda x: bool(x.bits >> (x.width - 1)),
    "mantissa": lambda x: of_float(math.frexp(x.value)[0], x.kind),
    "abs": lambda x: Number(x.bits & ~(1 << (x.width - 1)), x.kind), "isNAN": _is_nan,
    "isSignalNAN": lambda x: _is_nan(x, False), "isQuietNAN": lambda x: _is_nan(x, True),
    "isEven": lambda x: math.isfinite(x.value) and int(x) % 2 == 0, "cvtToQuietNAN": lambda x: x,
    "power": lambda n: Power(int(number(n))), "ldexp": lambda x, n: Power(n) * x,
    "signext": lambda x: Number(x.value, "i64"), "signext_from_bit": _sign_from,
    "v_maximum_f32": _extreme(True), "v_minimum_f32": _extreme(False),
    "range": range, "int": int, "Bytes": Bytes,
    "v_maximum3_f16": lambda x, y, z: _extreme(True)(_extreme(True)(x, y), z),
    "v_minimum3_f16": lambda x, y, z: _extreme(False)(_extreme(False)(x, y), z),
    "WAVE_MODE": SimpleNamespace(IEEE=True), "ROUND_MODE": 0, "ROUND_NEAREST_EVEN": 0, "ROUND_TOWARD_ZERO": 0,
    "BYTE1": Number(1, "b3"), "BYTE2": Number(2, "b3"), "BYTE3": Number(3, "b3"), "WORD1": Number(5, "b3"),
}  # fmt: skip

_LITERALS = [
    (r"\b(?:is)(Signal|Quiet)NAN\(64'F\((S\d\.f\d+)\)\)", r"is\1NAN(\2)"),
    (r"== \+0\.0\b", "== PLUS_ZERO"), (r"== -0\.0\b", "== MINUS_ZERO"),
    (r"\bDENORM\.f\d+", "DENORM"),
    (r"\bNAN\.(f\d+)", r"flit(nan, 'K\1')"), (r"\bINF\.(f\d+)", r"flit(inf, 'K\1')"),
    (r"\bINF\b", "flit(inf, 'Kf64')"),
    (r"\b2\.0F? \*\* ([\w.']+\([\w.]+\)|[\w.]+)", r"power(\1)"),
    (r"\b(\d+)'([UIFB])\(", lambda m: f"cast('K{_TYPES[m[2]]}{m[1]}', "),
    (r"\b(\d+)'(0x[0-9a-f]+|\d+)U?\b(?!\.)", r"lit(\2, 'Kb\1')"),
    (r"\b(\d+)'(\d+\.\d+)", r"flit(\2Z, 'Kf\1')"),
    (r"(?<![\w.'])(0x[0-9a-fA-F]+?|\d+)ULL\b", r"lit(\1, 'Ku64')"),
    (r"(?<![\w.'])(0x[0-9a-fA-F]+?|\d+)LL\b", r"lit(\1, 'Ki64')"),
    (r"(?<![\w.'])(\d+)U\b", r"lit(\1, 'Ku32')"), (r"(?<![\w.'])(\d+\.\d+)F\b", r"flit(\1Z, 'Kf32')"),
    (r"(?<![\w.'])(\d+\.\d+)\b(?!Z)", r"flit(\1, 'Kf64')"), (r"'K", "'"), (r"(\d)Z", r"\1"),
    (r"\{", "cat("), (r"\}", ")"), (r"&&", " and "), (r"\|\|", " or "), (r"!(?!=)", " not "), (r"<>", "!="),
    (r"VGPR\[laneId\]\[SRC0\.u32\]", "S0"), (r"VGPR\[laneId\]\[VDST\.u32\]", "D0"), (r"\bin\b", "in_"),
]  # fmt: skip


def _ternary(text: str) -> str:
    """`c ? a : b` as Python, innermost brackets first."""
    held: list[str] = []

    def inner(match: re.Match[str]) -> str:
        held.append(match[0][0] + _flat(match[0][1:-1]) + match[0][-1])
        return f"\x00{len(held) - 1}\x01"

    before = None
    while before != text:
        before = text
        text = re.sub(r"\([^()\[\]]*\)|\[[^()\[\]]*\]", inner, text)
    text = _flat(text)
    while "\x00" in text:
        text = re.sub("\x00(\\d+)\x01", lambda m: held[int(m[1])], text)
    return text


def _flat(text: str) -> str:
    pieces = []
    for piece in text.split(","):
        found = re.match(r"^(.*?) \? (.*) : (.*)$", piece)
        pieces.append(f"(({_flat(found[2])}) if ({found[1]}) else ({_flat(found[3])}))" if found else piece)
    return ",".join(pieces)


def expression(text: str) -> str:
    """An expression as Python."""
    for pattern, new in _LITERALS:
        text = re.sub(pattern, new, text)  # type: ignore[arg-type]
    return _ternary(text).strip()


def translate(text: str) -> str:
    """The statements as Python; assignments call `put`."""
    out, depth = [], 0
    for raw in text.split("\n"):
        line = re.sub(r"//.*", "", raw).strip().rstrip(";").strip()
        closes = line.endswith(")") and line.startswith("endif")
        if not line:
            continue
        if found := re.match(r"^(\w+) = lambda\(([\w, ]+)\) \($", line):
            out.append(f"{'  ' * depth}def {found[1]}({found[2]}):")
            depth += 1
        elif found := re.match(r"^(if|elsif) (.*) then$", line):
            depth -= found[1] == "elsif"
            out.append(f"{'  ' * depth}{'elif' if found[1] == 'elsif' else 'if'} {expression(found[2])}:")
            depth += 1
        elif line == "else":
            out.append(f"{'  ' * (depth - 1)}else:")
        elif line.startswith(("endif", "endfor")):
            depth -= 1 + closes
        elif found := re.match(r"^for (\w+) in (\d+) : (\d+) do$", line):
            out.append(f"{'  ' * depth}for {found[1]} in range({found[2]}, {int(found[3]) + 1}):")
            depth += 1
        elif found := re.match(r"^declare (\w+) : (.*)$", line):
            start = "Bytes()" if "[" in found[2] else f"lit(0, 'b{found[2].split(chr(39))[0]}')"
            name = "in_" if found[1] == "in" else found[1]
            out.append(f"{'  ' * depth}{name} = {start}" if depth else f"put({name!r}, {start})")
        elif line == "break" or line.startswith("return"):
            out.append("  " * depth + ("break" if line == "break" else "return " + expression(line[7:])))
        else:
            out.append("  " * depth + _assignment(line))
    return "\n".join(out)


def _assignment(line: str) -> str:
    *targets, value = re.split(r" (?:[-+]?)= (?!=)", line)
    operator = re.search(r" ([-+])= ", line)
    value = expression(value)
    if operator:
        value = f"({expression(targets[0])}) {operator[1]} ({value})"
    if targets[0].startswith("in["):  # bytes in a function of the pseudo-code
        return f"in_[{targets[0][3:-1]}] = {value}"
    places = []
    for target in targets:
        if target.startswith("{"):
            return f"put_pair({value})"
        name, rest = re.match(r"^(\w+)(.*)$", expression(target)).groups()  # type: ignore[union-attr]
        bounds = re.search(r"\[(.*)\]", rest)
        kind = re.findall(r"\.(\w+)", re.sub(r"\[.*\]", "", rest))
        at = "None"
        if bounds:
            has_two = " : " in re.sub(r"\[.*?\]", "", bounds[1])
            at = f"({bounds[1].replace(' : ', ',') if has_two else bounds[1] + ','})"
        places.append(f"put({name!r}, {value}, {kind[-1] if kind else ''!r}, {at})")
    return "; ".join(places)


class Lane:
    """One evaluation: `values` holds registers and variables, `written` the pieces of D0."""

    def __init__(self, code: Any, table: dict[str, Any], inputs: dict[str, Any]) -> None:
        self.written: list[tuple[int, int, str]] = []
        self.values: dict[str, Any] = {**_FUNCTIONS, "nan": math.nan, "inf": math.inf, **inputs}
        self.values |= {"put": self.put, "put_pair": self.put_pair}
        for part in (code, *(c for c in code.co_consts if hasattr(c, "co_names"))):
            for name in part.co_names:
                self._define(name, table)
        exec(code, self.values)

    def _define(self, name: str, table: dict[str, Any]) -> None:
        if name in self.values:
            return
        if found := re.match(r"^(\w+?)_to_(\w+?)(_scale)?$", name):
            down = "ROUND_TOWARD_ZERO" in self.values.get("TEXT", "")
            self.values[name] = _convert(found[1], found[2], scaled=bool(found[3]), down=down)
        elif name.startswith("v_") and name in table:
            self.values[name] = lambda *args: _call(name, table, args)

    def put(self, name: str, value: Any, kind: str = "", at: Any = None) -> None:
        """Assigns to a register, to bits of it, or to a variable."""
        value = number(value)
        old = self.values.get(name)
        register = name in ("D0", "VCC", "EXEC")
        if at is None and not register:
            self.values[name] = _typed(value, kind) if kind else value
            return
        base = old if isinstance(old, Number) else Number(0, "b64")
        if at is None:
            low, width = 0, width_of(kind) if kind else 64
            width = 32 if name == "D0" and not kind else width
        else:
            high, low = int(at[0]), int(at[-1])
            if high < low:
                high, low = low, high
            width = high - low + 1
        target = kind if kind and width_of(kind) == width else value.kind if value.floating else f"b{width}"
        bits = _typed(value, target).bits & ((1 << width) - 1)
        mask = ((1 << width) - 1) << low
        self.values[name] = Number(base.bits & ~mask | bits << low, base.kind)
        if name == "D0":
            self.written = [piece for piece in self.written if piece[0] != low] + [(low, width, target)]

    def put_pair(self, value: Number) -> None:
        """`{ D1, D0 } =` a number of 65 bits."""
        self.values["D1"] = Number(value.bits >> 64, "u1")
        self.put("D0", Number(value.bits, "b64"), "b64")


def _typed(value: Number, kind: str) -> Number:
    if kind in FLOATS or kind in NARROW:
        if value.floating:
            return value if value.kind == kind else of_float(value.value, kind)
        return Number(value.bits, kind)
    return Number(value.bits if value.floating else value.value, kind)


def _call(name: str, table: dict[str, Any], arguments: tuple[Number, ...]) -> Number:
    kind = arguments[0].kind
    lane = Lane(table[name], table, {f"S{k}": x for k, x in enumerate(arguments)} | {"D0": Number(0, "b64")})
    return Number(lane.values["D0"].bits, kind)


def show(bits: int, kind: str) -> str:
    """Bits for a message."""
    return f"{bits:#x}" + (f" ({decode(bits, kind)})" if kind in FLOATS or kind in NARROW else "")
