"""Tiny models of several architectures, loaded once a process, and engines on them."""

import pytest
import torch

from kvbench.matrix.cells import CELL_KEYS


@pytest.fixture(scope="session")
def tiny():
    """tiny(name): the LoadedModel of a built-in tiny model or of a config's folder, random float32 weights on the CPU."""
    from kvbench.engines.reference.load import load_model

    loaded = {}

    def load(name):
        if name not in loaded:
            with torch.inference_mode(False):  # a probe may be the first to ask, and weights serve all tests
                spec = {**CELL_KEYS, "model": name, "model_weights": "random"}
                loaded[name] = load_model(spec, "cpu", "float32")
        return loaded[name]

    return load


@pytest.fixture(scope="session")
def engine(tiny):
    """engine(model, kv_format, sequences=, tokens=, **spec keys): a fresh engine."""
    from kvbench.engines.reference.engine import Engine
    from kvbench.matrix.resolve_backend import Request, resolve

    def make(model="tiny-llama", kv_format="native", sequences=2, tokens=96, **keys):
        scale = 0.05 if kv_format.endswith("static") else None
        spec = {**CELL_KEYS, "model": model, "kv_format": kv_format, "scale": scale, **keys}
        loaded = tiny(model)
        request = Request(kv_format, "native", spec["backend"], "refuse", interpreter=True)
        return Engine(loaded, resolve(request, loaded.facts), spec, sequences=sequences, tokens=tokens)

    return make


@pytest.fixture(scope="session")
def maker(engine):
    """maker(model, kv_format, **spec keys): a function (sequences, tokens) -> fresh engine, as the probes take it."""

    def of(model="tiny-llama", kv_format="int8_sym", **keys):
        return lambda sequences, tokens: engine(model, kv_format, sequences=sequences, tokens=tokens, **keys)

    return of


@pytest.fixture
def fp8():
    """A tiny model with FP8 weights, that a test may spoil."""
    from kvbench.engines.reference.load import load_model

    return load_model({**CELL_KEYS, "model": "tiny-llama", "weights": "fp8_block128"}, "cpu", "float32")
