"""Decode compared with FP32 attention over the dequantized tensors, computed independently of the engine."""

import math
from collections.abc import Iterator
from typing import Any

from kvbench.metrics.declare.change import steps_change
from kvbench.metrics.declare.metric import Effect, Measured, Metric, Table, Unable
from kvbench.metrics.declare.units import COSINE, ERROR, RATIO, SHARE
from kvbench.metrics.declare.value import Value, share, worst_place
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
        yield Value("parity_bound_share", worst, len(cases), note=f"worst case: {worst_place(shares, worst)}")
        yield Value("parity_max_abs", largest(case["max_abs"] for case in cases), len(cases))
        yield Value("parity_cosine_min", smallest(case["cosine"] for case in cases), len(cases))

    steps = record.samples.get("steps") or {}
    if steps.get("argmax_equal"):
        equal = steps["argmax_equal"]
        yield share("steps_argmax_agreement", sum(map(bool, equal)), len(equal))
    if steps.get("max_abs"):
        yield Value("steps_max_abs", largest(steps["max_abs"]), len(steps["max_abs"]))


def _bound_share(case: dict[str, Any]) -> float:
    """Error over bound. A bound of 0 (native storage must be exact) allows only an error of 0."""
    error, bound = float(case["max_abs"]), float(case["bound"])
    if bound == 0:
        return 0.0 if error == 0 else math.inf if error > 0 else math.nan
    return error / bound


def _argmax_change(metric: Metric, first: Measured, second: Measured) -> Effect | Unable:
    steps = [side.record.samples["steps"] for side in (first, second)]
    own, other = (list(map(bool, one["argmax_equal"])) for one in steps)
    if not own or len(own) != len(other):
        return Unable(metric.name, f"{len(own)} steps in one run and {len(other)} in the other")
    return steps_change(metric, own, other, identical=steps[0] == steps[1])


FACTS: tuple[str, ...] = ("seed", "steps", "q_heads", "kv_heads", "head_dim", "vocabulary")
TABLES: tuple[Table, ...] = (
    Table("parity", "Parity with the oracle", counted="steps",
          note="Decode through the store compared with an FP32 oracle on the dequantized tensors, and a "
               "long run without a model. A share of the bound above 1 is outside what the format allows.",
          metrics=(
        Metric("parity_max_abs", ERROR, "lower", "Worst absolute error",
               "largest absolute error of a decode output against the FP32 oracle", brief=True),
        Metric("parity_bound_share", RATIO, "lower", "Worst share of bound",
               "largest error over its bound, of any decode output and any stored element; above 1 the "
               "format's bound is broken", brief=True),
        Metric("parity_cosine_min", COSINE, "higher", "Lowest cosine",
               "smallest cosine between a decode output and the FP32 oracle", brief=True),
        Metric("steps_argmax_agreement", SHARE, "higher", "Steps with equal argmax",
               "share of the model-free decode steps whose argmax equals the native one",
               sampled=True, none=1.0, brief=True, effect=_argmax_change),
        Metric("steps_max_abs", ERROR, "lower", "Worst error over steps",
               "largest absolute error over the model-free decode steps"),
    )),
)  # fmt: skip
