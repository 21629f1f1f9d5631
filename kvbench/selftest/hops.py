"""The requested format dropped between YAML file and tensors of a layer; numbers that are not the cell's."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from kvbench.engines.reference import engine as core
from kvbench.engines.reference import kind
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv import store
from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.engines.reference.load import load_model
from kvbench.formats.kv import KV_FORMATS
from kvbench.matrix import expand as expanding
from kvbench.matrix import load as matrix
from kvbench.matrix import tasks as worklist
from kvbench.matrix.cells import Task
from kvbench.matrix.parse import MatrixFile
from kvbench.matrix.resolve_backend import Decision, Request, request_of
from kvbench.matrix.resolve_backend import resolve as decide
from kvbench.metrics import collect as metrics
from kvbench.metrics.declare.value import Value
from kvbench.run.task import measure, prepare
from kvbench.runners import latency, timing
from kvbench.runners.context import Context, Measurement
from kvbench.selftest.fault import Fault, Inject, Loud, swap
from kvbench_kernels.kv.layout import LayerPages

NATIVE = KV_FORMATS["native"]
_EXECUTE, _INIT, _PROJECT, _RUN = measure.execute, PagedKVStore.__init__, worklist.project, latency.run
_DERIVE = metrics.DERIVE["latency"]


def expand_natively(outline: MatrixFile, *rest: Any) -> Any:
    points = tuple(replace(point, values={"kv_format": "native"}) for point in outline.axes["kv_format"])
    return expanding.expand(replace(outline, axes={**outline.axes, "kv_format": points}), *rest)


def deciding(resolved: str) -> Inject:
    """The resolver answers with this KV format, and keeps the reason."""

    def resolve(request: Request, facts: Any) -> Decision:
        decision = decide(request, facts)
        return replace(decision, kv_format=replace(decision.kv_format, resolved=resolved))

    return swap(kind, "resolve", resolve)


def engine_without_decision(model: Any, decision: Decision, *rest: Any, **keys: Any) -> Engine:
    return Engine(model, prepare.native_of(decision), *rest, **keys)


def every_store(name: str) -> Inject:
    return swap(core, "store_format", lambda decision: KV_FORMATS[name])


def native_like(made: PagedKVStore, layer: int) -> LayerPages:
    sizes = made.page_size, made.num_pages, made.native_dtype, made.device
    return allocate_layer(NATIVE, made.shapes[layer], *sizes)


def last_layer_native(self: PagedKVStore, *rest: Any, **keys: Any) -> None:
    _INIT(self, *rest, **keys)
    self.layers[-1] = native_like(self, len(self.layers) - 1)


one_layer_native = swap(PagedKVStore, "__init__", last_layer_native)


def execute_baseline(task: Task, *rest: Any) -> Any:
    """A record of the baseline's spec under the candidate's key."""
    return _EXECUTE(replace(task, spec=expanding.baseline_spec(task.spec)), *rest)


def native_measured(ctx: Context) -> Measurement:
    """The runner touches its engine once and measures the native one in its place."""
    if ctx.is_baseline:
        return _RUN(ctx)
    made = ctx.engine(1, 8)
    made.forward([(made.add(), [1, 2, 3])])
    return _RUN(replace(ctx, engine=ctx.native))


def store_never_read(ctx: Context) -> Measurement:
    """The engine is made and idle; the times are of nothing that it did."""
    if ctx.is_baseline:
        return _RUN(ctx)
    ctx.engine(1, 8)
    return _RUN(replace(ctx, engine=ctx.native))


def other_spec(**keys: Any) -> Inject:
    return swap(latency, "run", lambda ctx: _RUN(replace(ctx, spec={**ctx.spec, **keys})))


def labels_swapped(arms: Sequence[tuple[str, Any]], **keys: Any) -> Any:
    other = {"baseline": "candidate", "candidate": "baseline"}
    swapped = [(other[label], arm) for label, arm in arms] if len(arms) == 2 else arms
    return timing.measure(swapped, **keys)


def derived(metric: str, value: float | None) -> Inject:
    """The metric of the latency runner has this value; None: it is not derived."""

    def values(*rest: Any) -> Iterator[Value]:
        for row in _DERIVE(*rest):
            if row.metric != metric:
                yield row
            elif value is not None:
                yield replace(row, value=value)

    return lambda: patch.dict(metrics.DERIVE, latency=values)


FAULTS: dict[str, Fault] = {
    "format_lost_matrix_to_cell": Fault(
        "The axis kv_format is read from the YAML file and its cells get the default.",
        swap(matrix, "expand", expand_natively),
        r"no cell of this run has kv_format=int8_sym",
    ),
    "format_lost_cell_to_task": Loud(
        "The task of a cell is asked to measure another format than the cell's.",
        swap(worklist, "project", lambda *of: {**_PROJECT(*of), "kv_format": "native"}),
        r"measured with kv_format native, the cell asks for int8_sym",
    ),
    "format_lost_cell_to_request": Loud(
        "What the resolver is asked for leaves the cell's format out.",
        swap(kind, "request_of", lambda spec: replace(request_of(spec), kv_format="native")),
        r"asks for kv_format int8_sym, but the resolver was asked for native",
    ),
    "format_lost_request_to_decision": Loud(
        "The resolver decides for native without a reason.",
        deciding("native"),
        r"int8_sym was resolved to native with the reason of a request that was kept: it was dropped",
    ),
    "format_lost_decision_to_engine": Loud(
        "The engine is made from another decision than the one that is recorded.",
        swap(kind, "Engine", engine_without_decision),
        r"int8_sym was resolved.*did not reach the engine",
    ),
    "format_lost_engine_to_store": Loud(
        "The engine makes its store native, against the decision.",
        every_store("native"),
        r"kv_format int8_sym did not reach the store: layer 0 K",
    ),
    "format_lost_store_to_layer": Loud(
        "The store allocates native tensors for every layer.",
        swap(store, "allocate_layer", lambda fmt, *rest: allocate_layer(NATIVE, *rest[:5])),
        r"layer 0 K is stored as native",
    ),
    "one_layer_native": Loud(
        "The last layer alone is stored natively.", one_layer_native, r"layer 3 K is stored as native"
    ),
    "weights_lost_cell_to_loader": Loud(
        "The loader does not quantize the weights that the cell asks for.",
        swap(kind, "load_model", lambda spec, *rest: load_model({**spec, "weights": "native"}, *rest)),
        r"weights fp8_block128 are not what the model holds",
        "fp8_weights",
    ),
    "native_arm_quantized": Loud(
        "The baseline that runs with a cell has the cell's own precision.",
        swap(prepare, "native_of", lambda decision: decision),
        r"native arm is not native: it stores int8_sym",
    ),
    "baseline_cell_quantized": Loud(
        "The matrix makes a quantized cell the baseline.",
        lambda: patch.dict(expanding.BASELINE, kv_format="fp8_e4m3"),
        r"its baseline is not native: kv_format fp8_e4m3",
    ),
    "baseline_run_quantized": Loud(
        "The baseline's own tasks run with a quantized cache.",
        deciding("int8_sym"),  # the candidates have it anyway
        r"kv_format=native: kv_format native was resolved to int8_sym: nothing falls back from native",
    ),
    "baseline_store_quantized": Loud(
        "Every store is quantized, the baseline's too.",
        every_store("int8_sym"),
        r"kv_format native did not reach the store",
    ),
    "record_of_another_cell": Loud(
        "The baseline is measured in the place of the cell.",
        swap(measure, "execute", execute_baseline),
        r"measured with kv_format native, the task asks for int8_sym",
    ),
    "native_engine_measured": Loud(
        "The runner measures the native engine in the place of the cell's.",
        swap(latency, "run", native_measured),
        r"numbers are not only the measured engine's|arm candidate ran with kv_format native",
    ),
    "store_never_read": Loud(
        "The runner's number comes from an engine that is not the cell's, which is idle.",
        swap(latency, "run", store_never_read),
        r"never read the KV store; its numbers come from elsewhere",
    ),
    "other_context_measured": Loud(
        "The runner measures a shorter context than the cell's.",
        other_spec(context=8),
        r"arm \w+ ran with computed_tokens 20, expected 44",
    ),
    "other_batch_measured": Loud(
        "The runner measures one sequence, and the cell has two.",
        other_spec(batch=1),
        r"arm \w+ ran with computed_tokens 22, expected 44",
    ),
    "latency_labels_swapped": Loud(
        "The times of the baseline stand under the candidate's name, and the other way round.",
        swap(latency, "measure", labels_swapped),
        r"request of arm \w+ ran with kv_format \w+, expected",
    ),
    "metric_nan": Loud(
        "A metric comes out as NaN.", derived("itl_ms", math.nan), r"itl_ms .* is nan ms, which is impossible"
    ),
    "paired_metric_nan": Loud(
        "A comparison with the baseline comes out as NaN.",
        derived("itl_ratio", math.nan),
        r"itl_ratio .* is nan, which is impossible",
    ),
    "metric_missing": Fault(
        "A metric of the gate is not derived.", derived("itl_ms", None), r"itl_ms .* was not measured"
    ),
}
