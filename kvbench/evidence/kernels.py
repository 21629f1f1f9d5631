"""E4: the kernels that ran, their calls a layer, and the execution precision of what was compiled.

Names come from the launches (`kvbench_kernels.launches`) of a prompt and of a decode step of the measured
engine. Where decode is a CUDA graph, its capture recorded them, and replays are counted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
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
    """What the measured run launched, before any probe: calls by (layer, kernel), splits of its decodes."""

    calls: Counter[tuple[int, str]]
    splits: frozenset[int]
    forwards: int
    graph_replays: int


def run_of(engine: Engine) -> Run:
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
    faults = [
        *_dropped(engine),
        *_strangers(engine, "prompt", prompt),
        *_strangers(engine, "decode step", step),
    ]
    faults += [*_strangers_of_the_run(engine, run), *_counts(engine, run), *_splits(engine, step, run)]
    compiled, declared = compiled_execution(step), declared_execution(engine)
    if compiled is not None and compiled != declared:
        faults.append(f"the kernels were compiled to {compiled}, and declare {declared}")
    silent = facts["backend"] == "gpu" and compiled is None and not declared.startswith("float32")
    if silent and not faults:
        sentence = f"The kernels declare {declared}, and they have no compiled matrix instruction."
        return Level("E4", UNVERIFIED, sentence, facts)
    names = ", ".join(dict.fromkeys(launch.name for launch in step if launch.layer is not None))
    replayed = f" in a CUDA graph, replayed {run.graph_replays} times in the measured run"
    right = f"Every layer of a decode step ran {names}{replayed if engine.decode_mode == 'graph' else ''}."
    return level_of("E4", faults, "Other kernels ran", right, **facts)


def _dropped(engine: Engine) -> Iterator[str]:
    """Choices of the decision that the engine, or its store, does not run."""
    decision = engine.decision
    for what, runs, choice in (
        ("engine runs backend", engine.backend.name, decision.backend),
        ("engine runs decode", engine.decode_mode, decision.decode),
        ("engine runs compile", engine.compile_mode, decision.compile),
        ("store runs backend", engine.store.backend.name, decision.backend),
    ):
        if runs != choice.resolved:
            yield f"the {what} {runs}, and {choice.resolved} was resolved"


def _resolved(engine: Engine) -> Backend:
    return BACKENDS[engine.decision.backend.resolved]


def _strangers(engine: Engine, phase: str, launches: Sequence[Launch]) -> Iterator[str]:
    """Layers without attention, with another backend's kernels, or unlike the first of their kind."""
    backend, prompt = _resolved(engine), phase == "prompt"
    by_layer: dict[int, list[str]] = {layer: [] for layer in range(len(engine.layers))}
    for launch in launches:
        if launch.layer is not None:
            by_layer.setdefault(launch.layer, []).append(launch.name)
    first: dict[Any, tuple[int, list[str]]] = {}
    for layer, ran in by_layer.items():
        if not any(n.startswith(ATTENDS) or (n == LIBRARY and backend.owns(n, prompt)) for n in ran):
            what = f"only {', '.join(ran)}" if ran else "nothing"
            yield f"layer {layer} launched {what} in a {phase}, and no attention"
        if not any(name.startswith(STORES) for name in ran):
            yield f"layer {layer} launched nothing in a {phase} that stores K/V"
        strangers = [n for n in ran if not backend.owns(n, prompt)]
        like, expected = first.setdefault(engine.layers[layer], (layer, ran))
        if strangers:
            yield f"layer {layer} ran {strangers[0]} in a {phase}, and backend {backend.name} was resolved"
        elif ran != expected:
            yield f"layer {layer} launched {ran} in a {phase}, layer {like}, of the same kind, {expected}"


def _strangers_of_the_run(engine: Engine, run: Run) -> list[str]:
    """Launches of the measured run that are not the resolved backend's."""
    backend = _resolved(engine)
    return [
        f"layer {layer} ran {name} {count} times in the measured run, and backend {backend.name} was resolved"
        for (layer, name), count in run.calls.items()
        if not backend.owns(name, prompt=True)
    ]


def _counts(engine: Engine, run: Run) -> Iterator[str]:
    """Layers that did not store and attend in every forward of the measured run."""
    grouped, many = _resolved(engine).grouped, f"in the {run.forwards} forwards of the measured run"
    for layer in range(len(engine.layers)):
        mine = {name: count for (at, name), count in run.calls.items() if at == layer}

        def calls(starts: tuple[str, ...], mine: dict[str, int] = mine) -> int:
            return sum(count for name, count in mine.items() if name.startswith(starts) and name != COMBINE)

        library = mine.get(LIBRARY, 0)
        attended = calls(ATTENDS) + library
        if calls(STORES) != run.forwards:
            yield f"layer {layer} stored K/V {calls(STORES)} times {many}"
        if attended < run.forwards or (not grouped and attended > run.forwards):
            yield f"layer {layer} attended {attended} times {many}"
        expected = attended if grouped else library
        if calls(GATHERS) != expected:
            yield f"layer {layer} gathered pages {calls(GATHERS)} times {many}, expected {expected}"


def _splits(engine: Engine, step: Sequence[Launch], run: Run) -> Iterator[str]:
    """Whether decodes were split as asked: the probed step, and those of the measured run."""
    asked, ran = engine.spec["kv_splits"], {launch.splits for launch in step if launch.splits is not None}
    if asked is not None and ran != {asked}:
        yield f"kv_splits {asked} was asked for, and the decode step was split in {sorted(ran) or 'none'}"
    elif asked is not None and run.splits - {asked}:
        split = sorted(run.splits)
        yield f"kv_splits {asked} was asked for, and the measured run has decodes split in {split}"


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
    none = "none: multiplied and added in registers, or not compiled"
    return {x.name: _instructions([x]) or none for x in launches if x.product is not None}


def compiled_execution(launches: Sequence[Launch]) -> str | None:
    """The execution precision in the matrix instructions of attention; None: none compiled for a GPU."""
    return _instructions([launch for launch in launches if launch.layer is not None])  # others: linear layers


def _instructions(launches: Sequence[Launch]) -> str | None:
    codes = [asm["ptx"] for x in launches if (asm := getattr(x.compiled, "asm", None)) and "ptx" in asm]
    found = {match.groups() for code in codes for match in _MMA.finditer(code)}
    if not found:
        return None
    named = {tuple(_PTX_DTYPES.get(word, word) for word in words) for words in found}
    return " and ".join(sorted(f"{a} x {b} -> {accumulator}" for accumulator, a, b in named))
