"""What each layer costs: KLD with it alone quantized, what it gains by being native, and the list that was suggested and run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.metrics.sensitivity import gain, kld
from kvbench.records.record import OK
from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Estimate

_NOT_NAMED = ("batch", "context")  # quality does not depend on them


@dataclass(frozen=True)
class LayerLine:
    """alone, gains: a layer each, nat a token; tokens: that were scored; sentence: what the cell's parts say, to be read after its name."""

    name: str
    alone: tuple[Estimate, ...]
    gains: tuple[Estimate, ...]
    tokens: int
    sentence: str


def layer_lines(run: JudgedRun, labels: Labels) -> tuple[LayerLine, ...]:
    """A line a record of the sensitivity runner that has layers, of its first cell."""
    found = []
    for record, task in run.done():
        cells = [cell for cell in task.cells if cell in labels.cells]
        if record.runner != "sensitivity" or record.status != OK or not cells:
            continue
        parts = {(part["kind"], part["of"]): part for part in record.samples["parts"]}
        layers = sorted(of for kind, of in parts if kind == "alone")
        if not layers:
            continue
        name = labels.cell(cells[0]).without(*_NOT_NAMED)
        found.append(
            LayerLine(
                one_line(name, 80),
                tuple(kld(parts["alone", i]) for i in layers),
                tuple(gain(parts["all", None], parts["kept", i]) for i in layers),
                sum(text[0] for text in parts["all", None]["texts"]),
                _sentence(parts, record.facts),
            )
        )
    return tuple(found)


def _sentence(parts: Mapping[tuple[str, Any], Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """`K alone costs 0.0068 nat, V alone 0.0007; layer 3 costs most alone (0.0002); layers 0, 3 native, +6.3% bytes: 0.0075 -> 0.0058`"""
    k, v = (kld(parts["side", side]).value for side in "kv")
    alone = {of: kld(part).value for (kind, of), part in parts.items() if kind == "alone"}
    worst = max(alone, key=lambda i: (alone[i], -i))
    said = f"K alone costs {k:.3g} nat, V alone {v:.3g}; layer {worst} costs most alone ({alone[worst]:.3g})"
    if not facts["suggested"]:
        return f"{said}; no layer to keep native within {facts['budget_pct']:g}% more bytes"
    listed = ", ".join(map(str, facts["suggested"]))
    share = facts["suggested_extra_bytes_per_token"] / facts["quantized_bytes_per_token"]
    whole, kept = (kld(parts[key, None]).value for key in ("all", "suggested"))
    many = "layers" if len(facts["suggested"]) > 1 else "layer"
    return f"{said}; {many} {listed} native, {share:+.1%} bytes: {whole:.3g} -> {kept:.3g} nat"
