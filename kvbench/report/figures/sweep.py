"""A sweep of static scales: their effect on perplexity and on generated text, next to other scales."""

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

_COLLAPSE = 0.5  # a scale collapses if a larger share of its texts does
_RUINED_PCT = 100.0  # perplexity has doubled
_NOT_NAMED = ("scale", "batch", "context")  # quality does not depend on batch and context
_METRICS = ("ppl_delta_pct", "gen_useful_tokens", "gen_collapsed")


@dataclass(frozen=True)
class ScaleEffect:
    """ppl: `ppl_delta_pct`; useful: tokens before the median text repeats itself or ends, `steps` if it does
    neither; collapsed: share of the texts. None: not measured.
    """

    ppl: float | None
    useful: float | None
    steps: int | None
    collapsed: float | None

    @property
    def censored(self) -> bool:
        """Whether the median text stayed useful for its whole length."""
        return self.useful is not None and self.steps is not None and self.useful >= self.steps

    @property
    def sentence(self) -> str:
        """`collapses at token 5 (perplexity +3,041%)`; continues a name."""
        change = ""
        if self.ppl is not None:
            change = f"perplexity {PERCENT.number(self.ppl, _decimals(self.ppl), True)}%"
        if self.useful is None or self.steps is None:
            return f"gives {change}"
        at = STEP.number(self.useful)
        if self.collapsed is not None and self.collapsed > _COLLAPSE:
            text = f"collapses at token {at}"
        elif self.ppl is not None and self.ppl > _RUINED_PCT:
            text = "ruins the text, although the text neither repeats itself nor ends"
        elif self.censored:
            text = f"stays usable for all {at} tokens"
        else:
            text = f"stays usable up to token {at}"
        return f"{text} ({change})" if change else text


@dataclass(frozen=True)
class ScaleLine:
    """points: (scale, effect), ascending, of a static format; level: the effect of a reference, which has no
    single scale.
    """

    name: str
    points: tuple[tuple[float, ScaleEffect], ...] = ()
    level: ScaleEffect | None = None

    @property
    def effects(self) -> tuple[ScaleEffect, ...]:
        return (*(effect for _, effect in self.points), *([self.level] if self.level else []))


@dataclass(frozen=True)
class Sweep:
    """lines: static formats; references: dynamic, calibrated and checkpoint scales, then native."""

    lines: tuple[ScaleLine, ...]
    references: tuple[ScaleLine, ...]
    sentence: str

    @property
    def all(self) -> tuple[ScaleLine, ...]:
        return (*self.lines, *self.references)


def scale_sweep(run: JudgedRun, labels: Labels) -> Sweep | None:
    """The sweep; None if no static format was measured at two scales or more."""
    rows = _first_rows(run.rows)
    static: dict[str, dict[float, ScaleEffect]] = {}
    references: dict[str, ScaleEffect] = {}
    natives: dict[str, ScaleEffect] = {}
    for cell, entry in labels.cells.items():
        spec, label, effect = entry.spec, labels.cell(cell), _effect(cell, rows)
        if spec["kv_format"] not in KV_FORMATS or effect == ScaleEffect(None, None, None, None):
            continue
        kind, _ = origin(KV_FORMATS[spec["kv_format"]], spec.get("scale"))
        parts = [part for part in label.parts if part[0] not in _NOT_NAMED]
        name = " · ".join(value if key == "kv_format" else f"{key} {value}" for key, value in parts)
        if kind == "static" and isinstance(spec["scale"], float):
            static.setdefault(name, {}).setdefault(spec["scale"], effect)
        elif kind not in ("none", "static"):
            given = "" if kind == "dynamic" else f" {dict(label.parts).get('scale', kind)}"
            references.setdefault(f"{name}{given}", effect)
        elif kind == "none" and label.baseline:
            natives.setdefault(name, effect)
    lines = tuple(ScaleLine(name, tuple(sorted(own.items()))) for name, own in static.items() if len(own) > 1)
    if not lines:
        return None
    others = tuple(ScaleLine(name, level=level) for name, level in (*references.items(), *natives.items()))
    return Sweep(lines, others, _sentence(lines, others, natives))


def _sentence(lines: Iterable[ScaleLine], references: Iterable[ScaleLine], natives: Collection[str]) -> str:
    parts = []
    for line in lines:
        scales = "; ".join(f"{scale:g} {effect.sentence}" for scale, effect in reversed(line.points))
        parts.append(f"{line.name} scale {scales}")
    for line in references:
        if line.level is not None:
            itself = " itself" if line.name in natives else ""
            parts.append(f"{line.name}{itself} {line.level.sentence}")
    return f"{'; '.join(parts)}."


def _first_rows(rows: Iterable[Row]) -> Mapping[tuple[str, str], Row]:
    """The first row of each cell and metric that has a value, whichever its corpus."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.metric in _METRICS and row.value is not None and isfinite(row.value):
            found.setdefault((row.cell, row.metric), row)
    return found


def _effect(cell: str, rows: Mapping[tuple[str, str], Row]) -> ScaleEffect:
    ppl, useful, collapsed = (rows.get((cell, metric)) for metric in _METRICS)
    return ScaleEffect(
        ppl.value if ppl else None,
        useful.value if useful else None,
        useful.n if useful else None,
        collapsed.value if collapsed else None,
    )


def _decimals(value: float) -> int:
    return 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
