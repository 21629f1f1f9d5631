"""Numbers that are not the cell's: measured elsewhere, under another name, or no numbers at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvbench.metrics import collect as metrics
from kvbench.metrics.declare.value import Value
from kvbench.runners import latency, timing
from kvbench.runners.context import Context, Measurement
from kvbench.selftest.fault import Fault

Broken = AbstractContextManager[Any]

_RUN = latency.run


def native_measured() -> Broken:
    """The runner touches its engine once and measures the native one in its place."""

    def run(ctx: Context) -> Measurement:
        if ctx.is_baseline:
            return _RUN(ctx)
        made = ctx.engine(1, 8)
        made.forward([(made.add(), [1, 2, 3])])
        return _RUN(replace(ctx, engine=ctx.native))

    return patch.object(latency, "run", run)


def store_never_read() -> Broken:
    """The engine is made and idle; the times are of nothing that it did."""

    def run(ctx: Context) -> Measurement:
        if ctx.is_baseline:
            return _RUN(ctx)
        ctx.engine(1, 8)
        return _RUN(replace(ctx, engine=ctx.native))

    return patch.object(latency, "run", run)


def other_spec(**keys: Any) -> Callable[[], Broken]:
    return lambda: patch.object(latency, "run", lambda ctx: _RUN(replace(ctx, spec={**ctx.spec, **keys})))


def labels_swapped() -> Broken:
    other = {"baseline": "candidate", "candidate": "baseline"}

    def measure(arms: Sequence[tuple[str, Any]], **keys: Any) -> Any:
        swapped = [(other[label], arm) for label, arm in arms] if len(arms) == 2 else arms
        return timing.measure(swapped, **keys)

    return patch.object(latency, "measure", measure)


def nan(metric: str) -> Callable[[], Broken]:
    honest = metrics.DERIVE["latency"]

    def values(*rest: Any) -> Iterator[Value]:
        for value in honest(*rest):
            yield replace(value, value=float("nan")) if value.metric == metric else value

    return lambda: patch.dict(metrics.DERIVE, latency=values)


def no_metric() -> Broken:
    honest = metrics.DERIVE["latency"]
    return patch.dict(
        metrics.DERIVE, latency=lambda *rest: (v for v in honest(*rest) if v.metric != "itl_ms")
    )


FAULTS: dict[str, Fault] = {
    "native_engine_measured": Fault(
        "The runner measures the native engine in the place of the cell's.",
        "int8_sym", native_measured,
        r"numbers are not only the measured engine's|arm candidate ran with kv_format native",
        silent=False),
    "store_never_read": Fault(
        "The runner's number comes from an engine that is not the cell's, which is idle.",
        "int8_sym", store_never_read, r"never read the KV store; its numbers come from elsewhere",
        silent=False),
    "other_context_measured": Fault(
        "The runner measures a shorter context than the cell's.",
        "int8_sym", other_spec(context=8),
        r"arm \w+ ran with computed_tokens 20, expected 44", silent=False),
    "other_batch_measured": Fault(
        "The runner measures one sequence, and the cell has two.",
        "int8_sym", other_spec(batch=1),
        r"arm \w+ ran with computed_tokens 22, expected 44", silent=False),
    "latency_labels_swapped": Fault(
        "The times of the baseline stand under the candidate's name, and the other way round.",
        "int8_sym", labels_swapped,
        r"request of arm \w+ ran with kv_format \w+, expected", silent=False),
    "metric_nan": Fault(
        "A metric comes out as NaN.", "int8_sym", nan("itl_ms"), r"itl_ms .* is nan ms, which is impossible",
        silent=False),
    "paired_metric_nan": Fault(
        "A comparison with the baseline comes out as NaN.",
        "int8_sym", nan("itl_ratio"), r"itl_ratio .* is nan, which is impossible", silent=False),
    "metric_missing": Fault(
        "A metric that the gate asks for is not derived.", "int8_sym", no_metric,
        r"itl_ms .* was not measured", silent=True),
}  # fmt: skip
