"""Attention bound through transformers' registry: K and V go to the paged store and are read back from it.

The model runs on a packed batch: all new tokens of all sequences stand in one row `[1, N]` with their own
positions, so ragged batches need no padding. `attention` is called by every attention module of the model; it
writes the new K/V to the pages, then attends each sequence's queries to what the pages hold. The mask function
registered beside it returns None: causality comes from each sequence's own lengths, never from a mask that
transformers built for the packed row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from kvbench.decision import LayerFacts, ModelFacts
from kvbench.errors import KvbenchError, Refused
from kvbench.formats import KVShape
from kvbench_kernels.attention import paged_attention_torch

if TYPE_CHECKING:
    from kvbench.engine.store import PagedKVStore

NAME = "kvbench"

# Arguments that transformers passes to an attention function and that change nothing here, with the values for
# which that is true; None and a feature that is switched off (False) never do. Any other argument with a value is
# refused: it would be dropped in silence.
_HARMLESS: dict[str, tuple[Any, ...]] = {"dropout": (0.0,), "is_causal": (True,)}
_HARMLESS_ANY = frozenset({"position_ids", "cache_position", "layer_idx", "logits_to_keep"})
_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})


@dataclass(frozen=True)
class Group:
    """Sequences of one forward that bring the same number of new tokens and have the same total length.

    tokens: their places in the packed row, LongTensor [B * T], or None when they are the whole row in order;
    pages: LongTensor [B, P]; new: T; length: L, new tokens included.
    """

    tokens: Tensor | None
    pages: Tensor
    new: int
    length: int


@dataclass
class Step:
    """One forward. `taps` maps a layer to the (k, v) it wrote, [N, H, D]; filled for the layers in `tap_layers`."""

    store: PagedKVStore
    slots: Tensor
    groups: list[Group]
    read_fresh: bool
    tap_layers: frozenset[int]
    taps: dict[int, tuple[Tensor, Tensor]]


class Binding:
    """What an attention module of a bound model sees: the forward in progress, or the probe."""

    def __init__(self) -> None:
        self.step: Step | None = None


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
    if _probe is not None:
        _probe.append(
            {
                "module": module,
                "query": query,
                "key": key,
                "value": value,
                "mask": attention_mask,
                "kwargs": kwargs,
            }
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    binding: Binding | None = getattr(module, "kvbench_binding", None)
    if binding is None or binding.step is None:
        raise KvbenchError(
            "The model was called outside of an engine's forward; its K/V would not be stored."
        )
    layer: int = module.kvbench_layer  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return attend(binding.step, layer, query, key, value, scale, kwargs), None


def attend(
    step: Step,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    kwargs: Mapping[str, Any],
) -> Tensor:
    """Store the new K/V of `layer`, then attend every group to the pages. Returns [1, N, Hq, Dv]."""
    q, k, v = query[0], key[0].transpose(0, 1), value[0].transpose(0, 1)
    if layer in step.tap_layers:
        step.taps[layer] = (k.clone(), v.clone())
    step.store.write(layer, step.slots, k, v)
    heads, tokens = q.shape[0], q.shape[1]
    out: Tensor | None = None
    for group in step.groups:
        rows = group.pages.shape[0]
        mine = q if group.tokens is None else q[:, group.tokens]
        mine = mine.view(heads, rows, group.new, -1).transpose(0, 1)
        past_k, past_v = read_pages(step, layer, group, k, v)
        result = paged_attention_torch(
            mine, past_k, past_v, scaling, group.length - group.new,
            kwargs.get("sliding_window"), kwargs.get("softcap"), kwargs.get("s_aux"),
        )  # fmt: skip
        flat = result.transpose(1, 2).reshape(rows * group.new, heads, -1)
        if group.tokens is None:
            return flat.unsqueeze(0)
        if out is None:
            out = flat.new_empty(tokens, heads, flat.shape[-1])
        out[group.tokens] = flat
    assert out is not None
    return out.unsqueeze(0)


def read_pages(step: Step, layer: int, group: Group, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """K [B, H, L, D] and V [B, H, L, Dv] of a group, from the pages.

    With `prefill_reads: fresh` a prompt's own chunk is taken as it was computed; only earlier tokens come from the
    pages. That is a labelled mode: the default reads every token back as stored.
    """
    if not (step.read_fresh and group.new > 1):
        return step.store.read(layer, group.pages, group.length, k.dtype)
    old_k, old_v = step.store.read(layer, group.pages, group.length - group.new, k.dtype)
    rows = group.pages.shape[0]

    def own(x: Tensor) -> Tensor:
        x = x if group.tokens is None else x[group.tokens]
        return x.reshape(rows, group.new, *x.shape[1:]).transpose(1, 2)

    return torch.cat([old_k, own(k)], dim=2), torch.cat([old_v, own(v)], dim=2)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def bind(model: nn.Module, facts: ModelFacts, device: torch.device) -> Binding:
    """Switch `model` to our attention and return the binding that its attention modules look at.

    One forward of a single token with observing attention finds the attention modules, their head geometry and
    the arguments they pass. Raises Refused for anything the engine would have to drop, and KvbenchError when the
    modules disagree with the facts read from the config.
    """
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
    if hasattr(module, "kvbench_binding") and module.kvbench_binding is binding:
        raise Refused(
            "shared_attention_module", f"{where} is called twice in a forward; its K/V cannot be kept apart."
        )
    if call["mask"] is not None or getattr(module, "is_causal", True) is False:
        raise Refused(
            "not_causal", f"{where} does not use plain causal attention, which is what the pages hold."
        )
    for name, value in kwargs.items():
        off = value is None or (value is False and name not in _HARMLESS)
        if off or name in _UNDERSTOOD or name in _HARMLESS_ANY or value in _HARMLESS.get(name, ()):
            continue
        raise Refused(
            "attention_argument",
            f"{where} passes {name}={value!r}, which the engine does not implement; it would be dropped.",
        )
    module.kvbench_binding, module.kvbench_layer = binding, index
    q_heads, kv_heads = call["query"].shape[1], call["key"].shape[1]
    window = kwargs.get("sliding_window")
    return LayerFacts(
        kind="sliding" if window else "full",
        q_heads=q_heads,
        shape=KVShape(kv_heads, call["key"].shape[3], call["value"].shape[3]),
        sliding_window=window,
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux") is not None,
    )


def _compare(seen: tuple[LayerFacts, ...], facts: ModelFacts) -> None:
    """The modules must be what the config said."""
    if len(seen) != len(facts.layers):
        raise Refused(
            "layers_without_attention",
            f"{len(seen)} of {len(facts.layers)} layers call the attention function; the others keep their state "
            "elsewhere, so the cache cannot be measured.",
        )
    for index, (got, said) in enumerate(zip(seen, facts.layers, strict=True)):
        for name in ("q_heads", "shape", "sliding_window", "softcap", "sinks"):
            if getattr(got, name) != getattr(said, name):
                raise KvbenchError(
                    f"Layer {index}: the config says {name} = {getattr(said, name)}, the module shows "
                    f"{getattr(got, name)}. The model cannot be measured on facts that disagree; report this model."
                )
