"""KLD percentiles of each cell as rows give them, for a plot on a log axis and the table beside it."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.metrics.collect import Row
from kvbench.render.labels import Label, Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun

LEVELS = {"kld_p50": "p50", "kld_p90": "p90", "kld_p99": "p99", "kld_p999": "p99.9", "kld_max": "max"}


@dataclass(frozen=True)
class KldLine:
    """One subject under one corpus. rows: by metric, those of `LEVELS` that have a value, in nat."""

    name: str
    variant: str
    partial: str
    rows: dict[str, Row]


def kld_lines(run: JudgedRun, labels: Labels) -> tuple[KldLine, ...]:
    """A line each for cells whose perplexity is one task's; corpus after corpus, each in the matrix's order."""
    found: dict[tuple[str, tuple[str, ...]], dict[str, Row]] = {}
    names: dict[tuple[str, ...], Label] = {}
    for row in run.rows:
        if row.metric in LEVELS and row.value is not None:
            label = labels.subject("perplexity", row.cell)
            names.setdefault(label.cells, label)
            found.setdefault((row.variant, label.cells), {}).setdefault(row.metric, row)
    variants = list(dict.fromkeys(variant for variant, _ in found))
    ordered = sorted(found, key=lambda key: (variants.index(key[0]), labels.rank(names[key[1]])))
    return tuple(
        KldLine(
            names[cells].text,
            one_line(variant, 60),
            "; ".join(dict.fromkeys(one_line(row.partial) for row in found[variant, cells].values() if row.partial)),
            found[variant, cells],
        )
        for variant, cells in ordered
    )  # fmt: skip
