"""A published table as a CSV file: what it states, in which unit, and how exactly. An error names the line.

    # title: ITL by context             one value for all rows, as `# key: value`, above the columns
    # unit.kv_bytes_total: MB           the unit of a metric; a column `unit` says it row by row
    # candidate.splits: auto            a setting of one side: what differs besides the format
    metric,batch,context,baseline,candidate,ratio
    itl_ms,1,1024,7.85,7.27,0.93

A line states one metric of a baseline, of a candidate, or of both, and what the table says of the two
(`CLAIMS`). A key of `TEXTS`, `COUNTS` or `NUMBERS` is a column or a line of the head. A number means every
value that rounds to it: 7.85 is 7.845 to 7.855, and only counts and whole bytes are exact.
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from pathlib import Path

from kvbench.errors import UsageError
from kvbench.formats.kv import DTYPE_BYTES, KV_FORMATS
from kvbench.text import suggestion

BYTES = {"B": 1, "KB": 10**3, "KiB": 2**10, "MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30}


@dataclass(frozen=True)
class Quantity:
    """units: accepted unit -> what one of it is in the first unit. higher: whether more is better."""

    units: Mapping[str, int]
    higher: bool = False


# The metrics that a table may state, named as in kvbench's own reports where these have them.
QUANTITIES: dict[str, Quantity] = {
    **dict.fromkeys(("kv_bytes_total", "kv_bytes_payload", "kv_bytes_scales"), Quantity(BYTES)),
    **dict.fromkeys(("weight_bytes", "device_peak_bytes"), Quantity(BYTES)),
    **dict.fromkeys(
        ("kv_bytes_per_token", "kv_payload_per_token", "kv_scales_per_token"), Quantity({"B/token": 1})
    ),
    **dict.fromkeys(("ttft_ms", "itl_ms", "request_ms"), Quantity({"ms": 1, "s": 1000})),
    **dict.fromkeys(("decode_tok_s", "prefill_tok_s", "output_tok_s"), Quantity({"tok/s": 1}, higher=True)),
    "requests_s": Quantity({"1/s": 1}, higher=True),
    "model_load_s": Quantity({"s": 1}),
    "ppl": Quantity({"ppl": 1}),
    "mcq_accuracy": Quantity({"%": 1, "share": 100}, higher=True),
    "static_scale": Quantity({"scale": 1}),
    "calibrated_scale": Quantity({"scale": 1}),
    "coherent_tokens": Quantity({"tokens": 1}, higher=True),
}

# What a table may claim about its two columns.
CLAIMS: dict[str, str] = {
    "ratio": "candidate / baseline",
    "speedup": "how many times faster: baseline / candidate of a time, candidate / baseline of a rate",
    "compression": "baseline / candidate",
    "change_pct": "(candidate / baseline - 1) * 100",
    "saving_pct": "(1 - candidate / baseline) * 100",
    "delta_pt": "candidate - baseline, of accuracies, in points",
}

# of, against: what the candidate and the baseline are; data: corpus or question set; kv_format: the
# candidate's; native_dtype: the baseline's.
TEXTS = ("of", "against", "model", "device", "data", "kv_format", "native_dtype", "warmup", "note")
# context, new_tokens: of a sequence; tokens: slots of the cache, of all sequences.
COUNTS = ("batch", "context", "new_tokens", "tokens", "layers", "kv_heads", "head_dim", "questions")
# byte_ratio: bytes that the candidate reads over the baseline's; limit_pt: the change of accuracy, up or
# down, that is claimed not to be exceeded; *_read_bytes: of a decode step; amax: largest magnitude scaled.
NUMBERS = ("byte_ratio", "limit_pt", "baseline_read_bytes", "candidate_read_bytes", "peak_gb_s", "amax")
_CHOICES: dict[str, Sequence[str]] = {
    "kv_format": tuple(KV_FORMATS),
    "native_dtype": tuple(DTYPE_BYTES),
    "warmup": ("yes", "no"),
}
SIDES = ("baseline", "candidate")
_FREE = ("title", "source")
_COLUMNS = ("metric", "unit", *SIDES, *CLAIMS, *TEXTS, *COUNTS, *NUMBERS)
_SIGNED = ("change_pct", "saving_pct", "delta_pt")
Constants = dict[str, tuple[int, str]]  # key -> (line, value) of the head


@dataclass(frozen=True)
class Stated:
    """A number as printed, and the interval of values that round to it, in the metric's first unit."""

    text: str
    low: Fraction
    high: Fraction

    @property
    def middle(self) -> float:
        return float((self.low + self.high) / 2)


@dataclass(frozen=True)
class Line:
    """numbers: `baseline`, `candidate`, claims and `NUMBERS`; texts, counts: own columns, else the head's."""

    line: int
    metric: str
    unit: str
    texts: Mapping[str, str]
    counts: Mapping[str, int]
    numbers: Mapping[str, Stated]

    @property
    def quantity(self) -> Quantity:
        return QUANTITIES[self.metric]

    def shown(self, name: str) -> str:
        """`3.44 MB`: one side as the table prints it."""
        return f"{self.numbers[name].text} {self.unit}"

    @property
    def place(self) -> str:
        """`TinyLlama, int8, batch 1`: which line it is, in words."""
        parts = [self.texts[key] for key in ("model", "data") if key in self.texts]
        names = [self.texts[key] for key in ("of", "against") if key in self.texts]
        parts += [" against ".join(names)] if names else []
        parts += [f"{key} {self.counts[key]}" for key in ("batch", "context", "tokens") if key in self.counts]
        return ", ".join(parts)


@dataclass(frozen=True)
class Table:
    """settings: side -> what its `baseline.KEY` or `candidate.KEY` lines say; head: title and source."""

    path: Path
    head: Mapping[str, str]
    settings: Mapping[str, Mapping[str, str]]
    lines: tuple[Line, ...] = field(default=())


def read(path: Path) -> Table:
    """Raises UsageError that names the line and what is accepted there."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}); give a CSV file with a table.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; save the table as CSV in UTF-8.") from None
    raw = text.split("\n")
    top = next((i for i, row in enumerate(raw) if row.strip() and not row.startswith("#")), len(raw))
    head, units, settings, constants = _head(path, raw[:top])
    reader = csv.reader(raw[top:], strict=True)
    try:
        rows = [(top + reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as e:
        raise _wrong(path, top + reader.line_num, f"the row cannot be read as CSV ({e})") from None
    if not rows:
        raise UsageError(f"{path} has no column names; add a line such as `metric,baseline,candidate`.")
    columns = _columns(path, *rows[0])
    lines = tuple(_line(path, at, columns, row, constants, units) for at, row in rows[1:])
    if not lines:
        raise UsageError(f"{path} has column names and no row; nothing in it can be checked.")
    return Table(path, head, settings, lines)


def _head(
    path: Path, raw: Sequence[str]
) -> tuple[dict[str, str], dict[str, str], dict[str, dict[str, str]], Constants]:
    """(free text, units by metric, settings by side, constants as (line, value)) of `# key: value` lines."""
    head: dict[str, str] = {}
    units: dict[str, str] = {}
    settings: dict[str, dict[str, str]] = {side: {} for side in SIDES}
    constants: Constants = {}
    for at, row in enumerate(raw, 1):
        key, colon, value = (part.strip() for part in row.lstrip("#").partition(":"))
        if not row.strip():
            continue
        if not (key and colon and value):
            raise _wrong(path, at, f"{row!r} is not `# key: value`")
        section, dot, name = key.partition(".")
        if key in {*head, *constants, *(f"unit.{m}" for m in units)} or name in settings.get(section, {}):
            raise _wrong(path, at, f"duplicate key {key}")
        if dot and section == "unit":
            metric = _known(path, at, "metric", name, QUANTITIES)
            units[metric] = _known(path, at, f"unit of {metric}", value, QUANTITIES[metric].units)
        elif dot and section in SIDES and name:
            settings[section][name] = value
        elif key in _FREE:
            head[key] = value
        elif key in {*TEXTS, *COUNTS, *NUMBERS}:
            constants[key] = at, value
        else:
            sections = ("unit.METRIC", "baseline.SETTING", "candidate.SETTING")
            _known(path, at, "key", key, (*_FREE, *TEXTS, *COUNTS, *NUMBERS, *sections))
    return head, units, settings, constants


def _columns(path: Path, at: int, row: Sequence[str]) -> list[str]:
    columns = [_known(path, at, "column", cell.strip(), _COLUMNS) for cell in row]
    if twice := next((name for name in columns if columns.count(name) > 1), ""):
        raise _wrong(path, at, f"duplicate column {twice}")
    if "metric" not in columns or not set(SIDES) & set(columns):
        wrong = f"the columns {', '.join(columns)} need metric, and baseline, candidate or both"
        raise _wrong(path, at, wrong)
    return columns


def _line(
    path: Path,
    at: int,
    columns: Sequence[str],
    row: Sequence[str],
    constants: Constants,
    units: dict[str, str],
) -> Line:
    if len(row) != len(columns):
        raise _wrong(path, at, f"expected {len(columns)} fields ({', '.join(columns)}), got {len(row)}")
    own = {name: cell.strip() for name, cell in zip(columns, row, strict=True) if cell.strip()}
    metric = _known(path, at, "metric", own.pop("metric", ""), QUANTITIES)
    quantity = QUANTITIES[metric]
    unit = own.pop("unit", "") or units.get(metric, next(iter(quantity.units)))
    _known(path, at, f"unit of {metric}", unit, quantity.units)
    if not set(SIDES) & set(own):
        raise _wrong(path, at, f"{metric} has neither a baseline nor a candidate; give at least one")
    places = {**constants, **{name: (at, cell) for name, cell in own.items()}}
    texts, counts, numbers = {}, {}, {}
    for name, (place, cell) in places.items():
        if name in TEXTS:
            texts[name] = _known(path, place, name, cell, _CHOICES[name]) if name in _CHOICES else cell
        elif name in COUNTS:
            counts[name] = _count(path, place, name, cell)
        else:
            scale = quantity.units[unit] if name in SIDES else 1
            exact = unit == "B" and name in SIDES
            numbers[name] = _number(path, place, name, cell, scale, exact)
    return Line(at, metric, unit, texts, counts, numbers)


def _count(path: Path, at: int, name: str, cell: str) -> int:
    if not cell.isascii() or not cell.isdigit() or int(cell) < 1:
        wrong = f"{name}: expected a whole number of at least 1 without separators, got {cell!r}"
        raise _wrong(path, at, wrong)
    return int(cell)


def _number(path: Path, at: int, name: str, cell: str, scale: int, exact: bool) -> Stated:
    try:
        value = Decimal(cell) if cell.isascii() and "_" not in cell else Decimal("nan")
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value.adjusted()) > 30:
        wrong = f"{name}: expected a number such as 7.85, without unit or separators, got {cell!r}"
        raise _wrong(path, at, wrong)
    if value <= 0 and name not in _SIGNED:
        wrong = f"{name}: expected a number above 0, got {cell}; leave the field empty for no value"
        raise _wrong(path, at, wrong)
    places = value.as_tuple().exponent
    assert isinstance(places, int)  # it is finite
    half = Fraction(0) if exact and value == value.to_integral_value() else Fraction(10) ** places / 2
    return Stated(cell, (Fraction(value) - half) * scale, (Fraction(value) + half) * scale)


def _known(path: Path, at: int, what: str, value: str, accepted: Iterable[str]) -> str:
    choices = list(accepted)
    if value not in choices:
        unknown = f"{what} {value!r} is not known; accepted are {', '.join(choices)}"
        raise _wrong(path, at, unknown, suggestion(value, choices))
    return value


def _wrong(path: Path, at: int, what: str, more: str = "") -> UsageError:
    return UsageError(f"{path}, line {at}: {what}.{more} docs/comparing.md describes the format.")
