"""The loaded modules' own word on the facts: what the config said must be what the attention modules are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from torch import nn

from kvbench.decision import LayerFacts, ModelFacts


def with_modules(model: nn.Module, facts: ModelFacts) -> ModelFacts:
    """`facts` with the sinks that the modules hold, and with every disagreement as an `unsupported` entry."""
    found: dict[int, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and hasattr(module, "is_causal"):
            found[index].append(module)
    wrong = [_registry(model, facts)]
    layers = []
    for i, layer in enumerate(facts.layers):
        if layer.kind not in ("full", "sliding", "mla"):
            layers.append(layer)  # refused by its kind
        elif len(found[i]) != 1:
            n = len(found[i])
            wrong.append(
                ("attention_modules", f"Layer {i} has {n} attention modules where the engine binds one.")
            )
            layers.append(layer)
        else:
            layers.append(replace(layer, sinks=getattr(found[i][0], "sinks", None) is not None))
            wrong.append(_difference(i, found[i][0], layer))
    beyond = sorted(i for i in found if i >= len(facts.layers) and found[i])
    if beyond:
        wrong.append(
            ("attention_modules", f"The model has an attention layer {beyond[0]}; its config names fewer.")
        )
    unsupported = (*facts.unsupported, *(entry for entry in wrong if entry))
    return replace(facts, layers=tuple(layers), unsupported=unsupported)


def _registry(model: nn.Module, facts: ModelFacts) -> tuple[str, str] | None:
    if getattr(model, "_supports_attention_backend", False):
        return None
    return (
        "attention_registry",
        f"transformers' code of {facts.model_type} does not take attention functions from outside, so the paged "
        "store cannot be bound to it.",
    )


def _difference(index: int, module: nn.Module, layer: LayerFacts) -> tuple[str, str] | None:
    """The first fact of the layer that its module contradicts; an attribute that it does not have says nothing."""
    if not getattr(module, "is_causal", True):
        return "is_causal", f"Layer {index} attends in both directions; the engine's attention is causal."
    expected: dict[str, object] = {"attn_logit_softcapping": layer.softcap}
    if layer.kind != "mla":
        expected["head_dim"] = layer.shape.head_dim
        expected["num_key_value_groups"] = layer.q_heads // layer.shape.kv_heads
    if layer.kind == "sliding" or (layer.kind == "full" and not hasattr(module, "is_sliding")):
        expected["sliding_window"] = layer.sliding_window
    for attribute, value in expected.items():
        actual = getattr(module, attribute, None)
        if hasattr(module, attribute) and actual != value and (actual or value):
            return attribute, f"Layer {index}: its config says {attribute} {value!r}, its module {actual!r}."
    return None
