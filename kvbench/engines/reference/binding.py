"""Attention bound through transformers' registry: K and V go to the paged store and are read back from it.

The model runs on a packed batch: all new tokens of all sequences stand in one row `[1, N]` with their own
positions, so ragged batches need no padding. Every attention module calls `attention`. The mask function
registered with it returns None: causality comes from each sequence's own lengths.
"""

import itertools
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvbench.engines.reference.attention import Attention, Mask
from kvbench.errors import KvbenchError, Refused
from kvbench.formats.kv import KVShape
from kvbench.models.attention_facts import LayerFacts, ModelFacts
from kvbench_kernels.launches import at_layer

NAME = "kvbench"
_OUTSIDE = "The model was called outside of an engine's forward; its K/V would not be stored."

# Arguments of transformers that change nothing here, with the values for which that is true. None and False
# (a feature that is off) are harmless too. Any other argument with a value is refused, not dropped.
_HARMLESS: dict[str, tuple[Any, ...]] = {"dropout": (0.0,), "is_causal": (True,)}
_HARMLESS_ANY = frozenset({"position_ids", "cache_position", "layer_idx", "logits_to_keep"})
_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


@dataclass
class Step:
    """One forward. taps: layer -> the (k, v) it wrote, [N, H, D], for the layers in `tap_layers`."""

    attention: Attention
    tap_layers: frozenset[int]
    taps: dict[int, tuple[Tensor, Tensor]]


class Binding:
    """What the attention modules of a bound model see: the forward in progress."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.number = next(_numbers)
        _bindings[self.number] = self


_numbers = itertools.count()
_bindings: WeakValueDictionary[int, Binding] = WeakValueDictionary()  # by number, which modules' handles hold
_probe: list[dict[str, Any]] | None = None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, Hq, N, D], key [1, H, N, D], value [1, H, N, Dv] -> ([1, N, Hq, Dv], None)."""
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    known = (kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"))
    if torch.compiler.is_compiling():
        return torch.ops.kvbench.attend(query, key, value, module.kvbench_handle, scale, *known), None
    if _probe is not None:
        call = {"module": module, "query": query, "key": key, "value": value}
        _probe.append({**call, "mask": attention_mask, "kwargs": kwargs})
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if (handle := getattr(module, "kvbench_handle", None)) is None:
        raise KvbenchError(_OUTSIDE)
    return attend(query, key, value, handle, scale, *known), None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    handle: Tensor,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Store the new K/V of a layer and attend to the pages, in the forward in progress: [1, N, Hq, Dv].
    handle: int64 [2] on the CPU, (number of the binding, layer). It is a tensor because a compiler
    specializes on numbers, and one compiled layer serves all."""
    number, layer = handle.tolist()
    if (step := _bindings[number].step) is None:
        raise KvbenchError(_OUTSIDE)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if layer in step.tap_layers:
        step.taps[layer] = (k.clone(), v.clone())
    at_layer(layer)
    out = step.attention.attend(layer, q, k, v, scaling, Mask(sliding_window, softcap, sinks))
    at_layer(None)
    return out[None].contiguous()  # what the operator's fake promises; some attentions return a strided view


# The same for compiled layers: opaque to the compiler. What it changes are pages, which no compiled graph
# holds, so no argument is declared as changed; its result is used, so no call can be dropped.
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor handle, float scaling, int? sliding_window, "
    "float? softcap, Tensor? sinks) -> Tensor"
)
_attend_op = torch.library.custom_op("kvbench::attend", attend, mutates_args=(), schema=_SCHEMA)


@_attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def bind(model: nn.Module, facts: ModelFacts, device: torch.device) -> Binding:
    """Switches `model` to our attention and returns the binding that its attention modules look at.

    One forward of a single token observes the attention modules, their head geometry and their arguments.
    Raises Refused for anything the engine would have to drop, and KvbenchError when the modules disagree with
    the facts read from the config."""
    global _probe
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    _probe = []
    try:
        ids = torch.zeros(1, 1, dtype=torch.long, device=device)
        with torch.inference_mode():
            model(input_ids=ids, position_ids=ids, use_cache=False)
        calls = _probe
    finally:
        _probe = None
    binding = Binding()
    _compare(tuple(_observe(index, call, binding) for index, call in enumerate(calls)), facts)
    return binding


def _observe(index: int, call: dict[str, Any], binding: Binding) -> LayerFacts:
    module, kwargs = call["module"], call["kwargs"]
    where = f"Attention layer {index} ({type(module).__name__})"
    held = getattr(module, "kvbench_handle", None)
    if held is not None and int(held[0]) == binding.number:
        sentence = f"{where} is called twice in a forward; its K/V cannot be kept apart."
        raise Refused("shared_attention_module", sentence)
    if call["mask"] is not None or getattr(module, "is_causal", True) is False:
        sentence = f"{where} does not use plain causal attention, which is what the pages hold."
        raise Refused("not_causal", sentence)
    for name, value in kwargs.items():
        off = value is None or (value is False and name not in _HARMLESS)
        if off or name in _UNDERSTOOD or name in _HARMLESS_ANY or value in _HARMLESS.get(name, ()):
            continue
        raise Refused(
            "attention_argument",
            f"{where} passes {name}={value!r}, which the engine does not implement; it would be dropped.",
        )
    module.kvbench_handle = torch.tensor([binding.number, index])
    window = kwargs.get("sliding_window")
    return LayerFacts(
        kind="sliding" if window else "full",
        q_heads=call["query"].shape[1],
        shape=KVShape(call["key"].shape[1], call["key"].shape[3], call["value"].shape[3]),
        sliding_window=window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux") is not None,
    )


def _compare(seen: tuple[LayerFacts, ...], facts: ModelFacts) -> None:
    """Raises when the modules differ from the facts that the config gave."""
    if len(seen) != len(facts.layers):
        raise Refused(
            "layers_without_attention",
            f"{len(seen)} of {len(facts.layers)} layers call the attention function; the others keep their "
            "state elsewhere, so the cache cannot be measured.",
        )
    for index, (got, stated) in enumerate(zip(seen, facts.layers, strict=True)):
        for name in ("q_heads", "shape", "sliding_window", "softcap", "sinks"):
            said, shown = getattr(stated, name), getattr(got, name)
            if said != shown:
                raise KvbenchError(
                    f"Layer {index}: the config says {name} = {said}, the module shows {shown}. The model "
                    "cannot be measured on facts that disagree; report this model."
                )
