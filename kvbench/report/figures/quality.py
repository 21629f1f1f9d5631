"""The data of the figures of quality, from rows and records: KLD, agreement, health, layers, scales."""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from kvbench.formats.kv import KV_FORMATS
from kvbench.formats.scales import origin
from kvbench.metrics.collect import Row
from kvbench.metrics.declare.units import PERCENT, STEP
from kvbench.metrics.sensitivity import gain, kld
from kvbench.records.record import Record
from kvbench.render.numbers import one_line, shown_row
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Estimate

LEVELS = {"kld_p50": "p50", "kld_p90": "p90", "kld_p99": "p99", "kld_p999": "p99.9", "kld_max": "max"}

# A curve of agreement has points at so many evenly spaced steps and at up to so many differing steps.
_EVEN_STEPS, _MOST_DIFFERING = 200, 200
_TEXT_LIMIT = 1000  # characters of each text on the page


@dataclass(frozen=True)
class KldLine:
    """One subject on one corpus. rows: by metric of `LEVELS`, those with a value (nat)."""

    name: str
    variant: str
    partial: str
    rows: dict[str, Row]


def kld_lines(run: JudgedRun) -> tuple[KldLine, ...]:
    """One line per perplexity task, grouped by corpus, each group in the matrix's order."""
    rows = [row for row in run.rows if row.metric in LEVELS and row.value is not None]
    names = {row.cell: run.labels.subject("perplexity", row.cell) for row in rows}
    found: dict[tuple[str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        found.setdefault((row.variant, names[row.cell].cells), []).append(row)
    variants = list(dict.fromkeys(row.variant for row in rows))
    lines = [(variant, names[own[0].cell], own) for (variant, _), own in found.items()]
    lines.sort(key=lambda line: (variants.index(line[0]), run.labels.rank(line[1])))
    made = []
    for variant, label, own in lines:
        first: dict[str, Row] = {}
        for row in own:
            first.setdefault(row.metric, row)
        partial = dict.fromkeys(one_line(row.partial) for row in own if row.partial)
        made.append(KldLine(label.text, one_line(variant, 60), "; ".join(partial), first))
    return tuple(made)


@dataclass(frozen=True)
class Passage:
    """The text before the first divergence, and how the baseline and the candidate continue it."""

    before: str
    native: str
    candidate: str


@dataclass(frozen=True)
class AgreementLine:
    """points: (step, share of agreement over the steps up to and including it); first: step of the first
    divergence, or None; real: whether it exceeds a near-tie, None if unknown; again: whether this is the
    baseline compared with itself; sentence: continues the name.
    """

    name: str
    points: tuple[tuple[int, float], ...]
    steps: int
    share: Row | None
    sentence: str
    first: int | None = None
    margin: float | None = None
    real: bool | None = None
    again: bool = False
    passage: Passage | None = None

    @property
    def at_first(self) -> float | None:
        """The share at the first divergence."""
        return dict(self.points).get(self.first) if self.first is not None else None


def agreement_lines(run: JudgedRun) -> tuple[AgreementLine, ...]:
    """One line per comparable candidate, then one per baseline that was repeated (A/A)."""
    candidates, again = [], []
    for record, task, cells in run.completed("agreement"):
        if not record.samples.get("tokens"):
            continue
        name = run.labels.subject("agreement", cells[0]).text
        own = {row.metric: row for row in run.rows if row.cell == cells[0]}
        if task.baseline is None:
            if (flips := record.facts.get("aa_disagreements")) is not None:
                again.append(_again(name, record, flips, own.get("aa_disagreement")))
            continue
        native, forced = run.run.record(task.baseline), own.get("top1_teacher_forced")
        if native is not None and forced is not None and forced.value is not None:
            candidates.append(_candidate(name, record, native, own))
    return (*candidates, *again)


def _candidate(name: str, record: Record, native: Record, own: Mapping[str, Row]) -> AgreementLine:
    tokens, share = record.samples["tokens"], own["top1_teacher_forced"]
    pairs = zip(tokens, native.samples["tokens"], strict=True)
    differing = [i for i, (own_token, other) in enumerate(pairs) if own_token != other]
    text = f"agrees on {round((share.value or 0) * len(tokens)):,} of {len(tokens):,} steps"
    text += f" ({' '.join(filter(None, (shown_row(share).text, shown_row(share).interval)))})"
    curve = _curve(differing, len(tokens))
    if not differing:
        return AgreementLine(name, curve, len(tokens), share, f"{text}, no divergence")
    first, margin, beyond = differing[0], own.get("divergence_margin"), own.get("real_divergence")
    real = None if beyond is None or beyond.value is None else beyond.value == first
    text += f"; first divergence at step {first:,}"
    if margin is not None and margin.value is not None:
        text += f", where native's top-2 margin is {margin.unit.number(margin.value)} logit"
    if real is None:
        why = one_line(beyond.note, 200) if beyond and beyond.note else "no noise floor was measured"
        text += f"; it is not known whether it is real: {why}"
    elif real:
        text += ": a real divergence"
    else:
        later = "no real divergence follows"
        if beyond is not None and beyond.value is not None and beyond.value < len(tokens):
            later = f"the first real divergence is at step {int(beyond.value):,}"
        text += f": a near-tie within the baseline's own noise; {later}"
    texts = map(_text, map(record.samples.get, ("text_before", "native_text", "continuation_text")))
    value = margin.value if margin else None
    return AgreementLine(name, curve, len(tokens), share, text, first, value, real, passage=Passage(*texts))


def _again(name: str, record: Record, flips: Sequence[int], row: Row | None) -> AgreementLine:
    steps = len(record.samples["tokens"])
    count = f"{len(flips)} of {steps:,} steps differ" if flips else f"none of {steps:,} steps differs"
    sentence = f"{count} when the baseline reads its own text a second time"
    curve = _curve(sorted(flips), steps)
    return AgreementLine(f"{name}, repeated (A/A)", curve, steps, row, sentence, again=True)


def _curve(differing: Sequence[int], steps: int) -> tuple[tuple[int, float], ...]:
    """The share at the first and last step, at even steps, and at each differing step and the one before."""
    if not steps:
        return ()
    at = {0, steps - 1, *(i * (steps - 1) // _EVEN_STEPS for i in range(_EVEN_STEPS))}
    kept = min(len(differing), _MOST_DIFFERING)
    for i in {differing[j * len(differing) // kept] for j in range(kept)}:
        at |= {max(0, i - 1), i}
    return tuple((step, 1 - bisect_right(differing, step) / (step + 1)) for step in sorted(at))


def _text(text: object) -> str:
    """A model's text with its line breaks, other unprintable characters escaped, cut at the limit."""
    if not isinstance(text, str):
        return "text not stored"
    shown = "\n".join(one_line(line) for line in text[:_TEXT_LIMIT].split("\n"))
    return shown if len(text) <= _TEXT_LIMIT else f"{shown} … ({len(text):,} characters in all)"


@dataclass(frozen=True)
class HealthLine:
    """One cell. tokens: length of the text; layers: ascending; sides: samples by (layer, "k" or "v")."""

    name: str
    tokens: int | None
    layers: tuple[int, ...]
    sides: Mapping[tuple[int, str], Mapping[str, Any]]


def health_lines(run: JudgedRun) -> tuple[HealthLine, ...]:
    """The quantized cells in the matrix's order; native cells only if there are no others."""
    found: list[HealthLine] = []
    for record, _, cells in run.completed("health"):
        sides = {(side["layer"], side["side"]): side for side in record.samples.get("sides") or ()}
        if layers := tuple(sorted({layer for layer, _ in sides})):
            name = run.labels.subject("health", cells[0]).text
            found.append(HealthLine(name, record.facts.get("tokens"), layers, sides))
    return tuple(x for x in found if any(s["codes_used"] for s in x.sides.values())) or tuple(found)


@dataclass(frozen=True)
class LayerLine:
    """alone: KLD with only that layer quantized; gains: KLD saved by keeping only that layer native; both one
    per layer, nat per token. tokens: scored tokens. sentence: a summary that continues the name.
    """

    name: str
    alone: tuple[Estimate, ...]
    gains: tuple[Estimate, ...]
    tokens: int
    sentence: str


_Part = Mapping[str, Any]
_Parts = Mapping[tuple[str, Any], _Part]


def layer_lines(run: JudgedRun) -> tuple[LayerLine, ...]:
    """One line per sensitivity record that has layers."""
    found = []
    for record, _, cells in run.completed("sensitivity"):
        parts = {(part["kind"], part["of"]): part for part in record.samples["parts"]}
        layers = sorted(of for kind, of in parts if kind == "alone")
        if layers:
            name = one_line(run.labels.cell(cells[0]).without("batch", "context"), 80)
            alone = tuple(kld(parts["alone", i]) for i in layers)
            gains = tuple(gain(parts["all", None], parts["kept", i]) for i in layers)
            tokens = sum(text[0] for text in parts["all", None]["texts"])
            sentence = _layers_sentence(parts, layers, alone, record.facts)
            found.append(LayerLine(name, alone, gains, tokens, sentence))
    return tuple(found)


def _layers_sentence(parts: _Parts, layers: Sequence[int], alone: Sequence[Estimate], facts: _Part) -> str:
    """`K alone costs 0.0068 nat, V alone 0.0007; the most costly layer is 3 (0.0002); layers 0, 3 ...`"""
    k, v = (kld(parts["side", side]).value for side in "kv")
    cost, worst = max(((one.value, -layer) for layer, one in zip(layers, alone, strict=True)))
    text = f"K alone costs {k:.3g} nat, V alone {v:.3g}; the most costly layer is {-worst} ({cost:.3g})"
    if not facts["suggested"]:
        return f"{text}; no layer can be kept native within {facts['budget_pct']:g}% more bytes"
    listed = ", ".join(map(str, facts["suggested"]))
    share = facts["suggested_extra_bytes_per_token"] / facts["quantized_bytes_per_token"]
    whole, kept = (kld(parts[key, None]).value for key in ("all", "suggested"))
    noun = "layers" if len(facts["suggested"]) > 1 else "layer"
    return f"{text}; {noun} {listed} native, {share:+.1%} bytes: {whole:.3g} -> {kept:.3g} nat"


_COLLAPSE = 0.5  # a scale collapses if a larger share of its texts does
_RUINED_PCT = 100.0  # perplexity has doubled
_EFFECTS = ("ppl_delta_pct", "gen_useful_tokens", "gen_collapsed")


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
            decimals = 0 if abs(self.ppl) >= 100 else 1 if abs(self.ppl) >= 10 else 2
            change = f"perplexity {PERCENT.number(self.ppl, decimals, True)}%"
        if self.useful is None or self.steps is None:
            return f"gives {change}"
        at = STEP.number(self.useful)
        if self.collapsed is not None and self.collapsed > _COLLAPSE:
            text = f"collapses at token {at}"
        elif self.ppl is not None and self.ppl > _RUINED_PCT:
            text = "ruins the text, although the text neither repeats itself nor ends"
        else:
            text = f"stays usable for all {at} tokens" if self.censored else f"stays usable up to token {at}"
        return f"{text} ({change})" if change else text


@dataclass(frozen=True)
class ScaleLine:
    """points: (scale, effect), ascending; level: the effect of a reference, which has no single scale."""

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


def scale_sweep(run: JudgedRun) -> Sweep | None:
    """The sweep; None if no static format was measured at two scales or more."""
    rows: dict[tuple[str, str], Row] = {}
    for row in run.rows:  # the first row with a value, whichever its corpus
        if row.metric in _EFFECTS and row.value is not None and isfinite(row.value):
            rows.setdefault((row.cell, row.metric), row)
    static: dict[str, dict[float, ScaleEffect]] = {}
    references: dict[str, ScaleEffect] = {}
    natives: dict[str, ScaleEffect] = {}
    for cell, entry in run.labels.cells.items():
        spec, label = entry.spec, run.labels.cell(cell)
        measured = [rows.get((cell, metric)) for metric in _EFFECTS]
        if spec["kv_format"] not in KV_FORMATS or not any(measured):
            continue
        ppl, useful, collapsed = (row.value if row else None for row in measured)
        effect = ScaleEffect(ppl, useful, measured[1].n if measured[1] else None, collapsed)
        kind, _ = origin(KV_FORMATS[spec["kv_format"]], spec.get("scale"))
        name = label.without("scale", "batch", "context")  # quality depends on neither batch nor context
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
    return Sweep(lines, others, _sweep_sentence(lines, others, natives))


def _sweep_sentence(lines: Iterable[ScaleLine], others: Iterable[ScaleLine], natives: Collection[str]) -> str:
    parts = []
    for line in lines:
        scales = "; ".join(f"{scale:g} {effect.sentence}" for scale, effect in reversed(line.points))
        parts.append(f"{line.name} scale {scales}")
    for line in others:
        itself = " itself" if line.name in natives else ""
        parts += [f"{line.name}{itself} {line.level.sentence}"] if line.level else []
    return f"{'; '.join(parts)}."
