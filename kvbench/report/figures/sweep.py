"""A sweep of static scales: what each does to perplexity and to free-running text, beside dynamic and calibrated ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isfinite

from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import origin
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import PERCENT, STEP
from kvbench.render.labels import Labels
from kvbench.report.model import JudgedRun

# Of texts: more than so many that collapse are a collapse.
MOST = 0.5
# %: perplexity has doubled, so nothing was held, whether what is written repeats itself or not.
RUINED = 100.0
_NOT_NAMED = ("scale", "batch", "context")  # quality does not depend on batch and context
_METRICS = ("ppl_delta_pct", "gen_useful_tokens", "gen_collapsed")


@dataclass(frozen=True)
class Held:
    """ppl: ppl_delta_pct; useful: tokens before the median text repeats itself or ends, `steps` where it does neither; collapsed:
    share of the texts. None: not measured."""

    ppl: float | None
    useful: float | None
    steps: int | None
    collapsed: float | None

    @property
    def sentence(self) -> str:
        """`collapses at token 5 (perplexity +3,041%)`, to be read after a name."""
        change = (
            "" if self.ppl is None else f"perplexity {PERCENT.number(self.ppl, _decimals(self.ppl), True)}%"
        )
        if self.useful is None or self.steps is None:
            return f"gives {change}"
        at = STEP.number(self.useful)
        if self.collapsed is not None and self.collapsed > MOST:
            said = f"collapses at token {at}"
        elif self.ppl is not None and self.ppl > RUINED:
            said = "ruins the text without making it repeat itself or end"
        elif self.useful >= self.steps:
            said = f"holds beyond {at} tokens"
        else:
            said = f"holds to token {at}"
        return f"{said} ({change})" if change else said


@dataclass(frozen=True)
class ScaleLine:
    """points: (scale, what it does), ascending, of a format's given scales; () for a reference, whose `held` is one for all."""

    name: str
    points: tuple[tuple[float, Held], ...] = ()
    held: Held | None = None

    @property
    def everything(self) -> tuple[Held, ...]:
        return (*(held for _, held in self.points), *([self.held] if self.held else []))


@dataclass(frozen=True)
class Sweep:
    """lines: static formats; references: cells with dynamic scales, of a file or of the checkpoint, then native where its own text was measured."""

    lines: tuple[ScaleLine, ...]
    references: tuple[ScaleLine, ...]
    sentence: str

    @property
    def all(self) -> tuple[ScaleLine, ...]:
        return (*self.lines, *self.references)


def scale_sweep(run: JudgedRun, labels: Labels) -> Sweep | None:
    """None where no static format was measured at two given scales or more."""
    rows = _first_rows(run.rows)
    static: dict[str, dict[float, Held]] = {}
    references: dict[str, Held] = {}
    natives: dict[str, Held] = {}
    for cell, entry in labels.cells.items():
        spec, label, held = entry.spec, labels.cell(cell), _held(cell, rows)
        if spec["kv_format"] not in KV_FORMATS or held == Held(None, None, None, None):
            continue
        kind, _ = origin(KV_FORMATS[spec["kv_format"]], spec.get("scale"))
        parts = [part for part in label.parts if part[0] not in _NOT_NAMED]
        name = " · ".join(value if key == "kv_format" else f"{key} {value}" for key, value in parts)
        if kind == "static" and isinstance(spec["scale"], float):
            static.setdefault(name, {}).setdefault(spec["scale"], held)
        elif kind not in ("none", "static"):
            given = "" if kind == "dynamic" else f" {dict(label.parts).get('scale', kind)}"
            references.setdefault(f"{name}{given}", held)
        elif kind == "none" and label.baseline:
            natives.setdefault(name, held)
    lines = tuple(
        ScaleLine(name, tuple(sorted(found.items()))) for name, found in static.items() if len(found) > 1
    )
    if not lines:
        return None
    others = tuple(ScaleLine(name, held=held) for name, held in (*references.items(), *natives.items()))
    return Sweep(lines, others, _sentence(lines, others, natives))


def _sentence(lines: Iterable[ScaleLine], references: Iterable[ScaleLine], natives: Collection[str]) -> str:
    said = [
        f"{line.name} scale {'; '.join(f'{scale:g} {held.sentence}' for scale, held in reversed(line.points))}"
        for line in lines
    ]
    for line in references:
        if line.held is not None:
            itself = " itself" if line.name in natives else ""
            said.append(f"{line.name}{itself} {line.held.sentence}")
    return f"{'; '.join(said)}."


def _first_rows(rows: Iterable[Row]) -> Mapping[tuple[str, str], Row]:
    """The row of each cell and metric; where there are several corpora, the first that has a value."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.metric in _METRICS and row.value is not None and isfinite(row.value):
            found.setdefault((row.cell, row.metric), row)
    return found


def _held(cell: str, rows: Mapping[tuple[str, str], Row]) -> Held:
    ppl, useful, collapsed = (rows.get((cell, metric)) for metric in _METRICS)
    return Held(
        ppl.value if ppl else None,
        useful.value if useful else None,
        useful.n if useful else None,
        collapsed.value if collapsed else None,
    )


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
