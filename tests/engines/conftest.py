"""Tiny models of several architectures, loaded once a process, and engines on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvbench.matrix.cells import CELL_KEYS


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Any]:
    """tiny(name): the LoadedModel of a built-in tiny model or of a config's folder, random float32 weights on the CPU."""
    from kvbench.engines.reference.load import load_model

    loaded: dict[str, Any] = {}

    def load(name: str) -> Any:
        if name not in loaded:
            spec = {**CELL_KEYS, "model": name, "model_weights": "random"}
            with torch.inference_mode(False):  # a probe may be the first to ask, and weights serve all tests
                loaded[name] = load_model(spec, "cpu", "float32")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def engine(tiny: Callable[[str], Any]) -> Callable[..., Any]:
    """engine(model, kv_format, sequences=, tokens=, **spec keys): a fresh engine."""
    from kvbench.engines.reference.engine import Engine
    from kvbench.matrix.resolve import Request, resolve

    def make(
        model: str = "tiny-llama",
        kv_format: str = "native",
        sequences: int = 2,
        tokens: int = 96,
        **keys: Any,
    ) -> Any:
        scale = 0.05 if kv_format.endswith("static") else None
        spec = {**CELL_KEYS, "model": model, "kv_format": kv_format, "scale": scale, **keys}
        loaded = tiny(model)
        decision = resolve(
            Request(kv_format, "native", spec["backend"], "refuse", interpreter=True), loaded.facts
        )
        return Engine(loaded, decision, spec, sequences=sequences, tokens=tokens)

    return make
