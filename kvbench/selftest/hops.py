"""The requested format dropped, at each hop from the YAML file to the tensors of a layer; and a baseline that
is quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
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
from kvbench.matrix.resolve import Decision, Request, request_of
from kvbench.matrix.resolve import resolve as decide
from kvbench.run.task import measure, prepare
from kvbench.selftest.fault import Fault
from kvbench_kernels.kv.layout import LayerPages

Broken = AbstractContextManager[Any]
NATIVE = KV_FORMATS["native"]


def axis_lost() -> Broken:
    def expand(outline: MatrixFile, *rest: Any) -> Any:
        points = tuple(replace(point, values={"kv_format": "native"}) for point in outline.axes["kv_format"])
        return expanding.expand(replace(outline, axes={**outline.axes, "kv_format": points}), *rest)

    return patch.object(matrix, "expand", expand)


def task_without_format() -> Broken:
    honest = worklist.project
    return patch.object(
        worklist, "project", lambda spec, runner: {**honest(spec, runner), "kv_format": "native"}
    )


def request_without_format() -> Broken:
    return patch.object(kind, "request_of", lambda spec: replace(request_of(spec), kv_format="native"))


def native_decided() -> Broken:
    def resolve(request: Request, facts: Any) -> Decision:
        decision = decide(request, facts)
        return replace(decision, kv_format=replace(decision.kv_format, resolved="native"))

    return patch.object(kind, "resolve", resolve)


def engine_without_decision() -> Broken:
    def make(model: Any, decision: Decision, *rest: Any, **keys: Any) -> Engine:
        return Engine(model, prepare.native_of(decision), *rest, **keys)

    return patch.object(kind, "Engine", make)


def every_store(name: str) -> Callable[[], Broken]:
    return lambda: patch.object(core, "store_format", lambda decision: KV_FORMATS[name])


def layers_native() -> Broken:
    return patch.object(store, "allocate_layer", lambda fmt, *rest: allocate_layer(NATIVE, *rest[:5]))


def one_layer_native() -> Broken:
    honest = PagedKVStore.__init__

    def init(self: PagedKVStore, *rest: Any, **keys: Any) -> None:
        honest(self, *rest, **keys)
        self.layers[-1] = _native_like(self, len(self.layers) - 1)

    return patch.object(PagedKVStore, "__init__", init)


def _native_like(made: PagedKVStore, layer: int) -> LayerPages:
    return allocate_layer(
        NATIVE, made.shapes[layer], made.page_size, made.num_pages, made.native_dtype, made.device
    )


def model_without_format() -> Broken:
    return patch.object(
        kind, "load_model", lambda spec, *rest: load_model({**spec, "weights": "native"}, *rest)
    )


def native_arm_quantized() -> Broken:
    return patch.object(prepare, "native_of", lambda decision: decision)


def baseline_quantized() -> Broken:
    return patch.dict(expanding.BASELINE, kv_format="fp8_e4m3")


def baseline_record_quantized() -> Broken:
    """Baseline tasks are measured with the format of their candidates; those have it anyway."""

    def resolve(request: Request, facts: Any) -> Decision:
        decision = decide(request, facts)
        return replace(decision, kv_format=replace(decision.kv_format, resolved="int8_sym"))

    return patch.object(kind, "resolve", resolve)


def measured_for_another_cell() -> Broken:
    """A record of the baseline's spec under the candidate's key."""
    honest = measure.execute

    def execute(task: Task, *rest: Any) -> Any:
        return honest(replace(task, spec=expanding.baseline_spec(task.spec)), *rest)

    return patch.object(measure, "execute", execute)


FAULTS: dict[str, Fault] = {
    "format_lost_matrix_to_cell": Fault(
        "The axis kv_format is read from the YAML file and its cells get the default.",
        "int8_sym", axis_lost, r"no cell of this run has kv_format=int8_sym"),
    "format_lost_cell_to_task": Fault(
        "The task of a cell is asked to measure another format than the cell's.",
        "int8_sym", task_without_format, r"measured with kv_format native, the cell asks for int8_sym",
        silent=False),
    "format_lost_cell_to_request": Fault(
        "What the resolver is asked for leaves the cell's format out.",
        "int8_sym", request_without_format,
        r"asks for kv_format int8_sym, but the resolver was asked for native", silent=False),
    "format_lost_request_to_decision": Fault(
        "The resolver decides for native without a reason.",
        "int8_sym", native_decided,
        r"kv_format int8_sym was resolved to native with the reason of a request that was kept: it was "
        r"dropped", silent=False),
    "format_lost_decision_to_engine": Fault(
        "The engine is made from another decision than the one that is recorded.",
        "int8_sym", engine_without_decision, r"int8_sym was resolved.*did not reach the engine",
        silent=False),
    "format_lost_engine_to_store": Fault(
        "The engine makes its store native, against the decision.",
        "int8_sym", every_store("native"), r"kv_format int8_sym did not reach the store: layer 0 K",
        silent=False),
    "format_lost_store_to_layer": Fault(
        "The store allocates native tensors for every layer.",
        "int8_sym", layers_native, r"layer 0 K is stored as native", silent=False),
    "one_layer_native": Fault(
        "The last layer alone is stored natively.",
        "int8_sym", one_layer_native, r"layer 3 K is stored as native", silent=False),
    "weights_lost_cell_to_loader": Fault(
        "The loader does not quantize the weights that the cell asks for.",
        "fp8_weights", model_without_format, r"weights fp8_block128 are not what the model holds",
        silent=False),
    "native_arm_quantized": Fault(
        "The baseline that runs with a cell has the cell's own precision.",
        "int8_sym", native_arm_quantized, r"native arm is not native: it stores int8_sym", silent=False),
    "baseline_cell_quantized": Fault(
        "The matrix makes a quantized cell the baseline.",
        "int8_sym", baseline_quantized,
        r"its baseline is not native: kv_format fp8_e4m3", silent=False),
    "baseline_run_quantized": Fault(
        "The baseline's own tasks run with a quantized cache.",
        "int8_sym", baseline_record_quantized,
        r"kv_format=native: kv_format native was resolved to int8_sym: nothing falls back from native",
        silent=False),
    "baseline_store_quantized": Fault(
        "Every store is quantized, the baseline's too.",
        "int8_sym", every_store("int8_sym"), r"kv_format native did not reach the store", silent=False),
    "record_of_another_cell": Fault(
        "The baseline is measured in the place of the cell.",
        "int8_sym", measured_for_another_cell, r"measured with kv_format native, the task asks for int8_sym",
        silent=False),
}  # fmt: skip
