"""Units of metric values. A unit's name is written in CSV, JSON and gates, so it never changes."""

import math
from dataclasses import dataclass
from math import inf

EXACT_DIGITS = 8  # a bare number that is exact in this many digits is printed whole (a ratio of bytes)


@dataclass(frozen=True)
class Unit:
    """What a number counts, and how it is printed.

    low, high: the possible values; a limit outside decides nothing. plausible: closed interval outside
    which a measured value is a fault, unless the metric names its own; None: the possible values. digits:
    significant digits of a value without an interval. counts: printed whole where it is whole. bare: the name
    is not printed after the value. signed: printed with its sign. padded: trailing zeros are kept."""

    name: str
    meaning: str
    low: float = 0.0
    high: float = inf
    plausible: tuple[float, float] | None = None
    digits: int = 6
    counts: bool = False
    bare: bool = False
    signed: bool = False
    padded: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def suffix(self) -> str:
        """The text after a value: " ms", or "" for a bare number."""
        return "" if self.bare else f" {self.name}"

    @property
    def range(self) -> tuple[float, float]:
        """The plausible values of a metric that names no range of its own."""
        return self.plausible or (self.low, self.high)

    def number(self, value: float, decimals: int | None = None, signed: bool = False) -> str:
        """A value as text, without the unit's name. decimals: None for the unit's significant digits."""
        if not math.isfinite(value):
            return non_finite(value)
        sign = "+" if signed else ""
        if isinstance(value, int) or (self.counts and decimals is None and value == int(value)):
            return f"{int(value):{sign},d}"
        if decimals is not None:
            return f"{value:{sign},.{decimals}f}"
        if value == 0:
            return f"{value:{sign}.0f}"
        whole = (self.bare or self.counts) and float(f"{value:.{EXACT_DIGITS}g}") == value
        digits = EXACT_DIGITS if whole else self.digits
        exponent = math.floor(math.log10(abs(value)))
        if not -5 < exponent < 15:
            mantissa, power = f"{value:{sign}.{digits - 1}e}".split("e")
            return f"{mantissa.rstrip('0').rstrip('.')}e{power}"
        text = f"{value:{sign},.{max(0, digits - 1 - exponent)}f}"
        return text if self.padded or "." not in text else text.rstrip("0").rstrip(".")

    def text(self, value: float, digits: int = 6) -> str:
        """A value in a sentence: `12.5 ms`, `3,604,480 B`, `0.95`."""
        if self is BYTES and float(value).is_integer():
            return f"{int(value):,} B"
        return f"{value:.{digits}g}{'' if self is STEP else self.suffix}"


def non_finite(value: float) -> str:
    """`NaN`, `Infinity` or `-Infinity`: the words of JSON's Python dialect, which the records use."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


BYTES = Unit("B", "bytes", counts=True)
BYTES_PER_TOKEN = Unit("B/token", "bytes per token", counts=True, plausible=(1.0, inf))
RATIO = Unit("ratio", "candidate divided by what the definition names; 1 is no change", bare=True)
# No token leaves a model within a microsecond: the clock was read before the work was done.
MS = Unit("ms", "milliseconds", plausible=(1e-3, inf), digits=4, padded=True)
TOKENS_PER_S = Unit("tok/s", "tokens per second", plausible=(1e-6, 1e9), digits=4, padded=True)
GB_PER_S = Unit("GB/s", "10^9 bytes per second", digits=4, padded=True)
SHARE = Unit("share", "from 0 to 1", high=1.0, bare=True)
P_VALUE = Unit("p-value", "from 0 to 1", high=1.0, bare=True)
COSINE = Unit("cosine", "from -1 to 1", -1.0, 1.0, plausible=(-1.0001, 1.0001), bare=True)
ERROR = Unit("error", "absolute, or relative to a norm where the definition says so", bare=True)
LOGIT = Unit("logit", "difference of two logits", digits=4)
STEP = Unit("step", "index of a generated token, from 0", counts=True)
QUESTIONS = Unit("questions", "a count", counts=True)
REQUESTS = Unit("requests", "a count", counts=True)
TOKENS = Unit("tokens", "a count, or a position", counts=True)
US_PER_TOKEN = Unit("us/token", "microseconds per token of context", low=-inf)
PATHS = Unit("paths", "a count", plausible=(1.0, inf), counts=True, bare=True)
CODES = Unit("codes", "a count", high=256.0, plausible=(1.0, 256.0), counts=True)
MAGNITUDE = Unit("magnitude", "of K or V, in the model's own numbers")
SECONDS = Unit("s", "seconds", digits=4, padded=True)
# A model that is certain and right about every token has seen the answer (a missing causal mask).
PERPLEXITY = Unit("ppl", "perplexity", low=1.0, plausible=(1.0001, inf), bare=True)
# Rounding may leave the divergence of equal distributions slightly below 0.
NAT = Unit("nat", "natural logarithm", plausible=(-1e-4, inf), digits=4)
PERCENT = Unit("%", "change against the baseline in percent, unless the definition names something else",
               low=-100.0, digits=4, signed=True)  # fmt: skip
POINTS = Unit("pt", "percentage points", -100.0, 100.0, digits=4, signed=True)
NUMBER = Unit("", "a number without a unit", low=-inf, bare=True)

# All of the above, but NUMBER.
UNITS: dict[str, Unit] = {u.name: u for u in list(globals().values()) if isinstance(u, Unit) and u.name}
