"""Cells and runners become tasks. A task's key is the hash of everything that determines its result."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvbench.errors import NotAvailable
from kvbench.files import content_hash
from kvbench.machine.host import Host
from kvbench.matrix.cells import Cell, Task
from kvbench.matrix.runners import RUNNERS, RunnerDecl

FingerprintModel = Callable[[Mapping[str, Any]], str]
FingerprintData = Callable[[str, str], str]

_MODEL = ("model", "model_weights", "model_revision")


def tasks_of(
    cells: Sequence[Cell],
    runners: Mapping[str, Mapping[str, Any]],
    host: Host,
    fingerprint_model: FingerprintModel,
    fingerprint_data: FingerprintData,
) -> tuple[Task, ...]:
    """The tasks in the order of cells, then of runners. cells: with every cell's baseline.

    fingerprint_model(spec) and fingerprint_data(name, split) return digests. Where one raises NotAvailable,
    its absence is hashed, so the task runs again once the model or data is there."""
    model_digest, data_digest = remembered(fingerprint_model, fingerprint_data)
    by_id = {cell.id: cell for cell in cells}

    def key(cell: Cell, runner: RunnerDecl, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        native = by_id[cell.baseline].spec
        own = identity_of(runner, cell.spec, native, options, host.identity, model_digest, data_digest)
        return key_of(runner, project(cell.spec, runner), options, own), own

    tasks: dict[str, Task] = {}
    for cell in cells:
        for name, given in runners.items():
            runner = RUNNERS[name]
            for options in fan_out(runner, given):
                own, identity = key(cell, runner, options)
                shared = tasks[own].cells if own in tasks else ()
                tasks[own] = Task(
                    key=own,
                    runner=name,
                    variant=runner.variant.format(**options),
                    spec=project(cell.spec, runner),
                    options=options,
                    cells=(*shared, cell.id),
                    baseline=None if cell.is_baseline else key(by_id[cell.baseline], runner, options)[0],
                    digests={k: v for k, v in identity.items() if k != "host"},
                )
    return tuple(tasks.values())


def identity_of(
    runner: RunnerDecl,
    spec: Mapping[str, Any],
    native: Mapping[str, Any],
    options: Mapping[str, Any],
    host: Mapping[str, str],
    fingerprint_model: FingerprintModel,
    fingerprint_data: FingerprintData,
) -> dict[str, Any]:
    """The parts of a task's key that are not in the task: digests of machine, models and data."""
    split = options.get("split", "test")
    return {
        "host": dict(host),
        "model": fingerprint_model(spec),
        "native": fingerprint_model(native),
        "data": [fingerprint_data(options[key], split) for key in _data_keys(runner)],
    }


def key_of(
    runner: RunnerDecl, spec: Mapping[str, Any], options: Mapping[str, Any], identity: Mapping[str, Any]
) -> str:
    """The task's key; spec: projected."""
    own = {"runner": runner.name, "protocol": runner.protocol, "spec": spec, "options": options}
    return content_hash({**own, **identity})


def remembered(
    fingerprint_model: FingerprintModel, fingerprint_data: FingerprintData
) -> tuple[FingerprintModel, FingerprintData]:
    """The same functions with a cache; they return "not available" where the original raises NotAvailable."""
    models: dict[str, str] = {}

    def model(spec: Mapping[str, Any]) -> str:
        own = content_hash([spec[key] for key in _MODEL])
        if own not in models:
            models[own] = _or_absent(fingerprint_model, spec)
        return models[own]

    return model, functools.cache(lambda name, split: _or_absent(fingerprint_data, name, split))


def project(spec: Mapping[str, Any], runner: RunnerDecl) -> dict[str, Any]:
    """The keys of a cell that the runner's result depends on."""
    return {key: value for key, value in spec.items() if key not in runner.ignores}


def fan_out(runner: RunnerDecl, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The options of each task: each value of the option that fans out (no runner has two) makes one."""
    fanned = [key for key, option in runner.options.items() if option.fans_out]
    if not fanned:
        yield dict(options)
    for key in fanned:
        yield from ({**options, key: value} for value in dict.fromkeys(options[key]))


def data_names(task: Task) -> list[tuple[str, str]]:
    """(name, split) of the evaluation data that a task reads."""
    split = task.options.get("split", "test")
    return [(task.options[key], split) for key in _data_keys(RUNNERS[task.runner])]


def _data_keys(runner: RunnerDecl) -> list[str]:
    return [key for key, option in runner.options.items() if option.names_data]


def _or_absent(fingerprint: Callable[..., str], *of: Any) -> str:
    try:
        return fingerprint(*of)
    except NotAvailable:
        return "not available"
