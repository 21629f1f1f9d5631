"""A runner's context on a tiny model with real engines, real resolver and real baseline records."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.runners import RUNNERS


@pytest.fixture(scope="session")
def _tiny_models() -> dict[str, Any]:
    return {}


@pytest.fixture
def runner_context(_tiny_models: dict[str, Any]) -> Callable[..., Any]:
    """make(runner, baseline=None, model="tiny-llama", **keys): keys of the cell's spec and the runner's options."""
    from kvbench.engines.reference.engine import Engine
    from kvbench.engines.reference.load import load_model
    from kvbench.matrix.resolve import request_of, resolve
    from kvbench.run.session import emulator_of, native_of
    from kvbench.runners.context import Context

    torch.set_num_threads(1)

    def make(runner: str, baseline: Any = None, model: str = "tiny-llama", **keys: Any) -> Context:
        options = {name: option.default for name, option in RUNNERS[runner].options.items()}
        options |= {k: keys.pop(k) for k in list(keys) if k in options}
        spec = (
            CELL_KEYS
            | {"model": model, "model_weights": "random", "device": "cpu", "dtype": "float32"}
            | keys
        )
        name = f"{model} {spec['dtype']}"
        if name not in _tiny_models:
            _tiny_models[name] = load_model(spec, spec["device"], spec["dtype"])
        loaded = _tiny_models[name]
        decision = resolve(request_of(spec), loaded.facts)

        def engine(sequences: int, tokens: int) -> Engine:
            return Engine(loaded, decision, spec, sequences=sequences, tokens=tokens)

        def native(sequences: int, tokens: int) -> Engine:
            return Engine(loaded, native_of(decision), spec, sequences=sequences, tokens=tokens)

        def emulator(sequences: int, tokens: int) -> Engine:
            choice, own = emulator_of(decision, spec)
            return Engine(loaded, choice, own, sequences=sequences, tokens=tokens)

        return Context(spec, options, "", loaded, engine, native, emulator, baseline, None)

    return make


@pytest.fixture(scope="session")
def looping_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the config of tiny-llama with small random weights: its greedy text soon repeats itself."""
    from kvbench.models.catalog import TINY

    folder = tmp_path_factory.mktemp("looping")
    (folder / "config.json").write_text(json.dumps({**TINY["tiny-llama"], "initializer_range": 0.05}))
    return str(folder)


@pytest.fixture
def as_baseline() -> Callable[..., Any]:
    """The record that a baseline's measurement becomes."""
    from kvbench.records.record import OK, Record

    def record(ctx: Any, measured: Any) -> Record:
        return Record("key", "runner", 1, OK, ctx.spec, ctx.options, None, None, measured.samples, measured.facts,
                      {}, None, None, "", 0.0)  # fmt: skip

    return record


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that goes back an hour whenever it is asked."""
    moments = itertools.count(10**9, -3600)
    monkeypatch.setattr("time.time", lambda: float(next(moments)))
