"""KLD percentiles of each cell."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.metrics.collect import Row
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun

LEVELS = {"kld_p50": "p50", "kld_p90": "p90", "kld_p99": "p99", "kld_p999": "p99.9", "kld_max": "max"}


@dataclass(frozen=True)
class KldLine:
    """One subject on one corpus. rows: by metric of `LEVELS`, those with a value (nat)."""

    name: str
    variant: str
    partial: str
    rows: dict[str, Row]


def kld_lines(run: JudgedRun, labels: Labels) -> tuple[KldLine, ...]:
    """One line per perplexity task, grouped by corpus, each group in the matrix's order."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, Row]] = {}
    names: dict[tuple[str, ...], Label] = {}
    for row in run.rows:
        if row.metric in LEVELS and row.value is not None:
            label = labels.subject("perplexity", row.cell)
            names.setdefault(label.cells, label)
            found.setdefault((row.variant, label.cells), {}).setdefault(row.metric, row)
    variants = list(dict.fromkeys(variant for variant, _ in found))
    lines = []
    for variant, cells in sorted(found, key=lambda k: (variants.index(k[0]), labels.rank(names[k[1]]))):
        rows = found[variant, cells]
        partial = dict.fromkeys(one_line(row.partial) for row in rows.values() if row.partial)
        lines.append(KldLine(names[cells].text, one_line(variant, 60), "; ".join(partial), rows))
    return tuple(lines)
