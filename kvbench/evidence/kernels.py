"""E4: the kernels that ran, by name, with their calls a layer, and the execution precision of what was
compiled.

Names come from the launches (`kvbench_kernels.launches`) of a prompt and of a decode step of the measured
engine. Where decode is a CUDA graph, its capture recorded them, and replays are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engines.reference.backends import BACKENDS, LIBRARY, Backend
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.evidence.probe_values import level_of
from kvbench.records.record import UNVERIFIED, Level
from kvbench_kernels.launches import Launch

# What the names of attention kernels start with, of those that store K/V, and of those that gather pages.
ATTENDS = ("paged_decode", "paged_prefill", "paged_attention")
STORES = ("kv_write", "paged_write")
GATHERS = ("kv_gather", "paged_gather")
COMBINE = "paged_decode_combine"  # the second launch of a split decode

# mma.sync and wgmma in PTX: the dtypes of the accumulator and of both operands.
_MMA = re.compile(
    r"\b(?:wgmma\.mma_async\.sync|mma\.sync)\.aligned\.m\d+n\d+k\d+\.(?:row\.col\.)?(\w+)\.(\w+)\.(\w+)"
)
_PTX_DTYPES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "s8": "int8", "e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class Run:
    """What the measured run launched, taken before any probe.

    calls: (layer, kernel) -> launches; splits: of its decodes; forwards: each stores and attends once a
    layer.
    """

    calls: Counter[tuple[int, str]]
    splits: frozenset[int]
    forwards: int
    graph_replays: int


def run_of(engine: Engine) -> Run:
    """The run so far."""
    calls: Counter[tuple[int, str]] = Counter()
    for (layer, name, _), count in engine.launches.items():
        calls[layer, name] += count
    splits = frozenset(splits for _, _, splits in engine.launches if splits is not None)
    return Run(calls, splits, engine.forwards, sum(graph.replays for graph in engine.graphs.values()))


def kernels_level(engine: Engine, run: Run, prompt: Sequence[Launch], step: Sequence[Launch]) -> Level:
    """The level, from what the measured run, a prompt and a decode step launched."""
    layers = len(engine.layers)
    facts: dict[str, Any] = {
        "backend": backend_label(engine),
        "prompt": _per_layer(_calls(prompt), layers),
        "decode": _per_layer(_calls(step), layers),
        "decode_mode": engine.decode_mode,
        "graph_replays": run.graph_replays,
        "measured_run": _per_layer(run.calls, layers),
        "forwards": run.forwards,
    }
    faults = _dropped(engine)
    for phase, launches in (("prompt", prompt), ("decode step", step)):
        faults += _strangers(engine, phase, launches)
    faults += _strangers_of_the_run(engine, run)
    faults += _counts(engine, run)
    faults += _splits(engine, step, run)
    compiled, declared = compiled_execution(step), declared_execution(engine)
    if compiled is not None and compiled != declared:
        faults.append(f"the kernels were compiled to {compiled}, and declare {declared}")
    silent = facts["backend"] == "gpu" and compiled is None and not declared.startswith("float32")
    if silent and not faults:
        sentence = f"The kernels declare {declared}, and they have no compiled matrix instruction."
        return Level("E4", UNVERIFIED, sentence, facts)
    names = ", ".join(dict.fromkeys(launch.name for launch in step if launch.layer is not None))
    how = (
        f" in a CUDA graph, replayed {run.graph_replays} times in the measured run"
        if engine.decode_mode == "graph"
        else ""
    )
    return level_of(
        "E4", faults, "Other kernels ran", f"Every layer of a decode step ran {names}{how}.", **facts
    )


def _dropped(engine: Engine) -> list[str]:
    """Choices of the decision that the engine, or its store, does not run."""
    runs = {"backend": engine.backend.name, "decode": engine.decode_mode, "compile": engine.compile_mode}
    resolved = {k: getattr(engine.decision, k).resolved for k in runs}
    faults = [
        f"the engine runs {k} {v}, and {resolved[k]} was resolved"
        for k, v in runs.items()
        if v != resolved[k]
    ]
    if engine.store.backend.name != resolved["backend"]:
        faults.append(
            f"the store runs backend {engine.store.backend.name}, and {resolved['backend']} was resolved"
        )
    return faults


def _resolved(engine: Engine) -> Backend:
    return BACKENDS[engine.decision.backend.resolved]


def _strangers(engine: Engine, phase: str, launches: Sequence[Launch]) -> list[str]:
    """Layers that launched no attention, another backend's kernels, or other ones than the first layer of
    their kind.
    """
    backend, prompt = _resolved(engine), phase == "prompt"
    by_layer: dict[int, list[str]] = {layer: [] for layer in range(len(engine.layers))}
    for launch in launches:
        if launch.layer is not None:
            by_layer.setdefault(launch.layer, []).append(launch.name)
    faults, first = [], dict[Any, tuple[int, list[str]]]()
    for layer, ran in by_layer.items():
        if not any(n.startswith(ATTENDS) or (n == LIBRARY and backend.owns(n, prompt)) for n in ran):
            what = f"only {', '.join(ran)}" if ran else "nothing"
            faults.append(f"layer {layer} launched {what} in a {phase}, and no attention")
        if not any(name.startswith(STORES) for name in ran):
            faults.append(f"layer {layer} launched nothing in a {phase} that stores K/V")
        strangers = [n for n in ran if not backend.owns(n, prompt)]
        like, expected = first.setdefault(engine.layers[layer], (layer, ran))
        if strangers:
            faults.append(
                f"layer {layer} ran {strangers[0]} in a {phase}, and backend {backend.name} was resolved"
            )
        elif ran != expected:
            faults.append(
                f"layer {layer} launched {ran} in a {phase}, layer {like}, of the same kind, {expected}"
            )
    return faults


def _strangers_of_the_run(engine: Engine, run: Run) -> list[str]:
    """Launches of the measured run that are not the resolved backend's."""
    backend = _resolved(engine)
    return [
        f"layer {layer} ran {name} {count} times in the measured run, and backend {backend.name} was resolved"
        for (layer, name), count in run.calls.items()
        if not backend.owns(name, prompt=True)
    ]


def _counts(engine: Engine, run: Run) -> list[str]:
    """Layers that did not store and attend in every forward of the measured run."""
    grouped, faults = _resolved(engine).grouped, []
    for layer in range(len(engine.layers)):
        mine = {name: count for (at, name), count in run.calls.items() if at == layer}

        def calls(starts: tuple[str, ...], mine: dict[str, int] = mine) -> int:
            return sum(count for name, count in mine.items() if name.startswith(starts) and name != COMBINE)

        library = mine.get(LIBRARY, 0)
        attended = calls(ATTENDS) + library
        many = f"in the {run.forwards} forwards of the measured run"
        if calls(STORES) != run.forwards:
            faults.append(f"layer {layer} stored K/V {calls(STORES)} times {many}")
        if attended < run.forwards or (not grouped and attended > run.forwards):
            faults.append(f"layer {layer} attended {attended} times {many}")
        expected = attended if grouped else library
        if calls(GATHERS) != expected:
            faults.append(f"layer {layer} gathered pages {calls(GATHERS)} times {many}, expected {expected}")
    return faults


def _splits(engine: Engine, step: Sequence[Launch], run: Run) -> list[str]:
    """Whether decodes were split as asked: the probed step, and those of the measured run."""
    asked = engine.spec["kv_splits"]
    if asked is None:
        return []
    ran = {launch.splits for launch in step if launch.splits is not None}
    if ran != {asked}:
        return [f"kv_splits {asked} was asked for, and the decode step was split in {sorted(ran) or 'none'}"]
    if run.splits - {asked}:
        return [
            f"kv_splits {asked} was asked for, and the measured run has decodes split in {sorted(run.splits)}"
        ]
    return []


def _calls(launches: Sequence[Launch]) -> Counter[tuple[int, str]]:
    return Counter((launch.layer, launch.name) for launch in launches if launch.layer is not None)


def _per_layer(calls: Counter[tuple[int, str]], layers: int) -> dict[str, float]:
    """Calls of each kernel, a layer."""
    names: Counter[str] = Counter()
    for (_, name), count in calls.items():
        names[name] += count
    return {name: count / layers for name, count in sorted(names.items())}


def backend_label(engine: Engine) -> str:
    """Where attention ran: "torch", "interpreter" or "gpu" (Triton kernels, not compiled or compiled)."""
    return engine.backend.label()


def declared_execution(engine: Engine) -> str:
    """Dtypes of dot operands and accumulator in a decode step, as the backend declares them."""
    store, model = engine.store, engine.model
    return engine.backend.execution(
        engine.layers, store.fmt, store.page_size, dtype_name(model.dtype), model.device.type
    )


def compiled_products(launches: Sequence[Launch]) -> dict[str, str]:
    """Matrix instructions of the kernels of FP8 linear layers, by kernel."""
    found: dict[str, str] = {}
    for launch in launches:
        if launch.product is not None:
            instructions = _instructions([launch])
            found[launch.name] = instructions or "none: multiplied and added in registers, or not compiled"
    return found


def compiled_execution(launches: Sequence[Launch]) -> str | None:
    """The execution precision in the matrix instructions of the attention kernels; None where none was
    compiled for a GPU.
    """
    return _instructions(
        [launch for launch in launches if launch.layer is not None]
    )  # linear layers belong to none


def _instructions(launches: Sequence[Launch]) -> str | None:
    codes = [
        asm["ptx"] for launch in launches if (asm := getattr(launch.compiled, "asm", None)) and "ptx" in asm
    ]
    found = {match.groups() for code in codes for match in _MMA.finditer(code)}
    if not found:
        return None
    named = {tuple(_PTX_DTYPES.get(word, word) for word in words) for words in found}
    return " and ".join(sorted(f"{a} x {b} -> {accumulator}" for accumulator, a, b in named))
