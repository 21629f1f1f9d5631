"""Compiled decoder layers of a real model: one compilation serves all layers, and changes no bit."""

from dataclasses import replace

import pytest
import torch

from kvbench.engines.reference.compiled import CompiledLayers
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import load_model
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import Choice, Request, resolve

IDS = list(range(5, 45))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_one_compilation_serves_all_layers_and_changes_no_bit(name):
    compilations = []

    def backend(graph, example):
        compilations.append(graph)
        return graph.forward

    torch._dynamo.reset()
    spec = {**CELL_KEYS, "model": name, "kv_format": "int8_sym"}
    model = load_model(spec, "cpu", "float32")
    model.__dict__["compiled"] = CompiledLayers(model.model, backend)
    decision = resolve(Request("int8_sym", "native", "torch", "refuse"), model.facts)
    compiled, plain = (
        Engine(model, replace(decision, compile=Choice(form, form, "")), spec, sequences=2, tokens=96)
        for form in ("layer", "off")
    )
    assert len(compiled.layers) == 4

    def logits(engine, count):
        return engine.prefill(engine.add(), IDS[:count])

    for count in (40, 33):
        assert torch.equal(logits(compiled, count), logits(plain, count))
        assert len(compilations) == 1

    decoded = [compiled.decode([0], [token]) for token in (3, 4)]  # eager steps take the compiled form too
    assert len(compilations) == 2
    assert all(
        torch.equal(found, plain.decode([0], [token])) for found, token in zip(decoded, (3, 4), strict=True)
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma2"])  # a fused attention, and one with a soft-cap
def test_attention_lies_in_memory_as_the_compiler_was_told(name):
    """A compiled kernel behind it takes that on trust."""
    found = []

    class Watched(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            out = super().call_function(target, args, kwargs)
            if target is torch.ops.kvbench.attend:
                found.append(out.is_contiguous())
            return out

    torch._dynamo.reset()
    spec = {**CELL_KEYS, "model": name, "kv_format": "int8_sym"}
    model = load_model(spec, "cpu", "float32")
    model.__dict__["compiled"] = CompiledLayers(model.model, lambda graph, _: Watched(graph).run)
    decision = resolve(Request("int8_sym", "native", "torch", "refuse"), model.facts)
    engine = Engine(
        model, replace(decision, compile=Choice("layer", "layer", "")), spec, sequences=2, tokens=96
    )
    engine.prefill(engine.add(), IDS)
    engine.decode([0], [3])
    assert found == [True] * 2 * len(engine.layers)
