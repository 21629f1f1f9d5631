"""The cost of quantizing each layer, and the list of native layers that was suggested and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.metrics.sensitivity import gain, kld
from kvbench.render.labels import Labels
from kvbench.render.numbers import one_line
from kvbench.report.figures.records import completed
from kvbench.report.model import JudgedRun
from kvbench.stats.intervals import Estimate


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


def layer_lines(run: JudgedRun, labels: Labels) -> tuple[LayerLine, ...]:
    """One line per sensitivity record that has layers."""
    found = []
    for record, _, cells in completed(run, labels, "sensitivity"):
        parts = {(part["kind"], part["of"]): part for part in record.samples["parts"]}
        layers = sorted(of for kind, of in parts if kind == "alone")
        if not layers:
            continue
        whole = parts["all", None]
        found.append(
            LayerLine(
                one_line(labels.cell(cells[0]).without("batch", "context"), 80),
                tuple(kld(parts["alone", i]) for i in layers),
                tuple(gain(whole, parts["kept", i]) for i in layers),
                sum(text[0] for text in whole["texts"]),
                _sentence(parts, record.facts),
            )
        )
    return tuple(found)


def _sentence(parts: Mapping[tuple[str, Any], Mapping[str, Any]], facts: Mapping[str, Any]) -> str:
    """`K alone costs 0.0068 nat, V alone 0.0007; the most costly layer is 3 (0.0002); layers 0, 3 native,
    ...`
    """
    k, v = (kld(parts["side", side]).value for side in "kv")
    alone = {of: kld(part).value for (kind, of), part in parts.items() if kind == "alone"}
    worst = max(alone, key=lambda i: (alone[i], -i))
    text = (
        f"K alone costs {k:.3g} nat, V alone {v:.3g}; the most costly layer is {worst} ({alone[worst]:.3g})"
    )
    if not facts["suggested"]:
        return f"{text}; no layer can be kept native within {facts['budget_pct']:g}% more bytes"
    listed = ", ".join(map(str, facts["suggested"]))
    share = facts["suggested_extra_bytes_per_token"] / facts["quantized_bytes_per_token"]
    whole, kept = (kld(parts[key, None]).value for key in ("all", "suggested"))
    noun = "layers" if len(facts["suggested"]) > 1 else "layer"
    return f"{text}; {noun} {listed} native, {share:+.1%} bytes: {whole:.3g} -> {kept:.3g} nat"
