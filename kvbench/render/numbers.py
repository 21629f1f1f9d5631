"""Values as text: a number with its unit, interval and sample count; facts and text from outside on one line.

A measured zero ("0"), a value that was not measured ("not measured") and a measurement that gave no number
("NaN") are never confused.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import BYTES, NUMBER, STEP, Unit, non_finite

NOT_MEASURED = "not measured"
Ends = tuple[float | None, float | None]


@dataclass(frozen=True)
class Shown:
    """One number as text, in parts, so that a page can style them apart.

    text: the number or NOT_MEASURED; unit: its name; shown_unit: the same where it is printed after the
    number, else ""; also: bytes in MiB and MB; interval: "[low, high]" (95%) or ""; n: "n = 48" or ""; exact:
    the number with full precision, for machines, or ""; state: "measured", "missing" or "nan".
    """

    text: str
    unit: str = ""
    also: str = ""
    interval: str = ""
    n: str = ""
    exact: str = ""
    state: str = "measured"
    shown_unit: str = ""

    @property
    def spread(self) -> str:
        """`[12.12, 12.57], n = 48`"""
        return ", ".join(part for part in (self.interval, self.n) if part)

    @property
    def brief(self) -> str:
        """On one line, without the count: `12.35 ms [12.12, 12.57]`."""
        return " ".join(part for part in (self.text, self.shown_unit, self.also, self.interval) if part)


def shown(
    value: float | None,
    unit: Unit = NUMBER,
    ends: Ends = (None, None),
    n: int | None = None,
    sign: bool = False,
) -> Shown:
    """A value as text. ends: of its interval, whose width sets the decimals."""
    count = "" if n is None else f"n = {n:,}"
    if value is None:
        return Shown(NOT_MEASURED, n=count, state="missing")
    beside = unit.suffix.strip()
    if not math.isfinite(value):
        text = non_finite(value)
        return Shown(text, unit.name, n=count, exact=text, state="nan", shown_unit=beside)
    decimals = _interval_decimals(*ends)
    texts = [unit.number(end, _two_digits(end, decimals), sign) for end in ends if end is not None]
    interval = f"[{', '.join(texts)}]" if len(texts) == 2 else ""
    also = f"({in_megabytes(value)})" if unit is BYTES and value else ""
    text = unit.number(value, _two_digits(value, decimals), sign)
    return Shown(text, unit.name, also, interval, count, exact(value), shown_unit=beside)


def shown_row(row: Row) -> Shown:
    """A row's value; a difference has its sign, a step equal to the number of steps was never reached."""
    if row.unit is STEP and row.value is not None and row.value == row.n:
        return Shown(f"none in {row.n:,}", exact=exact(row.value))
    return shown(row.value, row.unit, (row.low, row.high), row.n, row.unit.signed)


def finite(value: float | None) -> float | None:
    """The value if it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


def exact(value: float) -> str:
    """The shortest text that reads back as the same number; `3604480`, `0.515625`, `NaN`."""
    if isinstance(value, float) and not math.isfinite(value):
        return non_finite(value)
    return repr(value)


def counted_of(n: int, what: str) -> str:
    """The counted thing in the singular or plural: `pair of requests`, `pairs of requests`."""
    first, *rest = what.split(" ")
    return " ".join((first.removesuffix("s"), *rest)) if n == 1 else what


def _two_digits(value: float, decimals: int | None) -> int | None:
    """The interval's decimals, or up to six to keep two digits of a value that they would round away."""
    if decimals is None or not value or not math.isfinite(value):
        return decimals
    return max(decimals, min(1 - math.floor(math.log10(abs(value))), 6))


def _interval_decimals(low: float | None, high: float | None) -> int | None:
    """Decimals that give the interval's width three significant digits; None without a usable interval."""
    if low is None or high is None or not math.isfinite(high - low) or high <= low:
        return None
    return min(12, max(0, 2 - math.floor(math.log10(high - low))))


def in_megabytes(n: float) -> str:
    """`3604480` -> `3.4375 MiB, 3.60 MB`, where MiB = 2^20 B and MB = 10^6 B."""
    mib = f"{n / 2**20:,.4f}".rstrip("0")
    return f"{mib}{'0' if mib.endswith('.') else ''} MiB, {n / 1e6:,.2f} MB"


def bytes_text(n: int | None) -> str:
    """`3,604,480 B (3.4375 MiB, 3.60 MB)`"""
    return shown(n, BYTES).brief


def one_line(text: str, limit: int | None = None) -> str:
    """Untrusted text on one line: characters that are not printable become escapes (newlines, direction
    overrides), and text longer than `limit` characters loses its middle."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    if limit is None or len(line) <= limit:
        return line
    head = (limit - 1) * 2 // 3
    return f"{line[:head]}…{line[len(line) - (limit - 1 - head) :]}"


def plain(value: Any, limit: int | None = None) -> str:
    """A JSON value as one line of text: numbers exact, None as "not measured", containers as JSON."""
    if value is None:
        return NOT_MEASURED
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return exact(value)
    if isinstance(value, str):
        return one_line(value, limit)
    if isinstance(value, Mapping | Sequence):
        return one_line(json.dumps(value, ensure_ascii=False, default=str), limit)
    return one_line(str(value), limit)


def fact(key: str, value: Any) -> tuple[str, str]:
    """A recorded fact as (name, text): bytes in both units, a long list as its length."""
    if key.endswith("bytes") and isinstance(value, int):
        return one_line(key, 60), bytes_text(value)
    long_list = isinstance(value, list | tuple) and len(value) > 8
    return one_line(key, 60), f"{len(value)} values" if long_list else plain(value, 200)


def flatten(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """`{"gpu": {"name": "x"}}` -> `[("gpu.name", "x")]`, in the mapping's order; lists are not flattened."""
    pairs: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
