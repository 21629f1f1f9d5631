"""Decode compared with FP32 attention over the dequantized tensors, computed independently of the engine. Always
the worst case, so that two bad cases cannot vanish in a mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kvbench.metrics.value import Value, share
from kvbench.records.record import Record
from kvbench.stats.intervals import largest, smallest


def values(record: Record, baseline: Record | None) -> Iterator[Value]:
    cases = record.samples["cases"]
    if cases:
        shares = [(_bound_share(case), case["name"]) for case in cases]
        element = record.facts.get("element_error")
        if element:
            shares.append((element["share_of_bound"], f"element error, {element['case']}"))
        worst = largest(s for s, _ in shares)
        name = next(name for s, name in shares if s == worst or (math.isnan(s) and math.isnan(worst)))
        yield Value("parity_bound_share", worst, len(cases), note=f"worst case: {name}")
        yield Value("parity_max_abs", largest(case["max_abs"] for case in cases), len(cases))
        yield Value("parity_cosine_min", smallest(case["cosine"] for case in cases), len(cases))

    steps = record.samples.get("steps") or {}
    if steps.get("argmax_equal"):
        equal = steps["argmax_equal"]
        yield share("steps_argmax_agreement", sum(map(bool, equal)), len(equal))
    if steps.get("max_abs"):
        yield Value("steps_max_abs", largest(steps["max_abs"]), len(steps["max_abs"]))


def _bound_share(case: dict[str, Any]) -> float:
    """Error over bound; a bound of 0 (native storage must be exact) is met by an error of 0 alone."""
    error, bound = float(case["max_abs"]), float(case["bound"])
    if bound == 0:
        return 0.0 if error == 0 else math.inf if error > 0 else math.nan
    return error / bound
