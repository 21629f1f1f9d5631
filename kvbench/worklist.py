"""Cells and runners become tasks: each piece of work once, under the hash of everything that decides its result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvbench.cells import Cell, Task, content_hash
from kvbench.environment import Host
from kvbench.errors import NotAvailable
from kvbench.tasks import RUNNERS, RunnerDecl

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
    """The tasks in the order of cells, then of runners; cells that share a task stand in its `cells`.

    `cells` holds every cell's baseline. fingerprint_model(spec) and fingerprint_data(name, split) give digests; where
    one raises NotAvailable, its absence is hashed instead, so the task runs anew once the data or model is there.
    """
    digest_of_model: dict[str, str] = {}
    data_digest = functools.cache(lambda name, split: _or_absent(fingerprint_data, name, split))
    by_id = {cell.id: cell for cell in cells}

    def model_digest(spec: Mapping[str, Any]) -> str:
        identity = content_hash([spec[key] for key in _MODEL])
        if identity not in digest_of_model:
            digest_of_model[identity] = _or_absent(fingerprint_model, spec)
        return digest_of_model[identity]

    def digests_of(cell: Cell, runner: RunnerDecl, options: Mapping[str, Any]) -> dict[str, Any]:
        names = _data_names(runner, options)
        return {
            "model": model_digest(cell.spec),
            "native": model_digest(by_id[cell.baseline].spec),
            "data": [data_digest(name, options.get("split", "test")) for name in names],
        }

    def key_of(cell: Cell, runner: RunnerDecl, options: Mapping[str, Any]) -> str:
        return content_hash(
            {
                "runner": runner.name,
                "protocol": runner.protocol,
                "spec": project(cell.spec, runner),
                "options": options,
                "host": dict(host.identity),
                **digests_of(cell, runner, options),
            }
        )

    tasks: dict[str, Task] = {}
    for cell in cells:
        for name, given in runners.items():
            runner = RUNNERS[name]
            for options in fan_out(runner, given):
                key = key_of(cell, runner, options)
                shared = tasks[key].cells if key in tasks else ()
                tasks[key] = Task(
                    key=key,
                    runner=name,
                    variant=runner.variant.format(**options),
                    spec=project(cell.spec, runner),
                    options=options,
                    cells=(*shared, cell.id),
                    baseline=None if cell.is_baseline else key_of(by_id[cell.baseline], runner, options),
                    digests=digests_of(cell, runner, options),
                )
    return tuple(tasks.values())


def project(spec: Mapping[str, Any], runner: RunnerDecl) -> dict[str, Any]:
    """The keys of a cell that the runner's result depends on."""
    return {key: value for key, value in spec.items() if key not in runner.ignores}


def fan_out(runner: RunnerDecl, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One options mapping a task: the list of an option that fans out is replaced by each of its values in turn."""
    fanned = [key for key, option in runner.options.items() if option.fans_out]
    if not fanned:
        yield dict(options)
        return
    (key,) = fanned  # no runner has two
    for value in dict.fromkeys(options[key]):
        yield {**options, key: value}


def _data_names(runner: RunnerDecl, options: Mapping[str, Any]) -> list[str]:
    return [options[key] for key, option in runner.options.items() if option.names_data]


def _or_absent(fingerprint: Callable[..., str], *of: Any) -> str:
    try:
        return fingerprint(*of)
    except NotAvailable:
        return "not available"
