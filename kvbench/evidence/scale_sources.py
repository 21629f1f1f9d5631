"""Where a store's scales come from: what they must be, read again without the loader, and what they are.

The loader finds a checkpoint's scales by a pattern over names and decodes bytes itself
(`kvbench.formats.checkpoint_scales`). Here each name is spelled out, and torch reads it; given numbers are
assigned to layers separately too. So no value is compared with itself.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.kv.layer import indexable
from kvbench.engines.reference.kv.pages import RESIDENT
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.errors import Refused
from kvbench.formats import scales as source
from kvbench.formats.checkpoint_scales import StoredScale
from kvbench.formats.kv import SIDES
from kvbench.formats.scales import Scale
from kvbench.records.record import Level

# Before `layers.N.`, of the language model and no other tower.
_BEFORE = ("", "model.", "language_model.model.", "model.language_model.")
# Behind `layers.N.self_attn.`, for one side; the last two are one number for both.
_NAMES = (
    "{0}_proj.{0}_scale",
    "{0}_scale",
    "attn.{0}_scale",
    "{0}_proj.output_scale",
    "attn.kv_scale",
    "kv_scale",
)


def expected_scales(engine: Engine) -> list[tuple[Scale, Scale]]:
    """What the (K, V) scales of each layer must be, each with its source, for a static format.

    Raises Refused where the source that `scale` names has none for a layer.
    """
    scale, layers = engine.spec["scale"], range(len(engine.store.layers))
    if isinstance(scale, str):
        held = _reread(engine.model.files, len(layers)) if source.from_checkpoint(scale) else {}
        return [(_of_word(scale, held, layer, "k"), _of_word(scale, held, layer, "v")) for layer in layers]
    return list(zip(_given(scale, "k", layers), _given(scale, "v", layers), strict=True))


def _given(scale: Any, side: str, layers: range) -> list[Scale]:
    named = isinstance(scale, Mapping)
    kind = next((x for x in (source.CALIBRATED, source.FILE) if named and x in scale), source.GIVEN)
    value = scale[side] if named else scale
    if not isinstance(value, list | tuple):
        return [Scale(float(value), kind) for _ in layers]
    if len(value) != len(layers):
        sentence = f"scale.{side} has {len(value)} values and the model has {len(layers)} layers."
        raise Refused("scale_count", sentence)
    return [Scale(float(value[layer]), kind) for layer in layers]


def _of_word(word: str, held: Mapping[tuple[int, str], StoredScale], layer: int, side: str) -> Scale:
    if found := held.get((layer, side)):
        return Scale(found.value, source.CHECKPOINT, found.tensors[0])
    if word == source.CHECKPOINT:
        raise Refused(
            "checkpoint_has_no_scales",
            f"The checkpoint's files have no scale of {side.upper()} for layer {layer}; export it again.",
        )
    return Scale(1.0, source.DEFAULT)


def _reread(files: Sequence[Path], layers: int) -> dict[tuple[int, str], StoredScale]:
    found: dict[tuple[int, str], StoredScale] = {}
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in files}
        where: dict[str, Path] = {}
        for path, file in opened.items():
            where.update(dict.fromkeys(file.keys(), path))
        for layer in range(layers):
            for side in SIDES:
                ends = [f"layers.{layer}.self_attn.{name.format(side)}" for name in _NAMES]
                names = (before + end for before in _BEFORE for end in ends)
                if name := next(filter(where.__contains__, names), ""):
                    value = float(opened[where[name]].get_tensor(name).double())
                    found[layer, side] = StoredScale(value, (name,), where[name].name)
    return found


def as_stored(scale: Scale, device: torch.device) -> Tensor:
    """[] float32, as a store holds it."""
    return torch.tensor(scale.value, dtype=torch.float32, device=device)


def static_fault(held: Tensor | None, pair: tuple[Scale, Scale], at: int) -> str:
    """What is wrong with the live scale of side `at` (0: K, 1: V), given the expected `pair`, or ""."""
    device = torch.device("cpu") if held is None else held.device
    expected, other = pair[at], pair[1 - at]
    if held is not None and torch.equal(held.reshape(-1).float(), as_stored(expected, device)[None]):
        return ""
    value = "none" if held is None else f"{held.float().flatten()[0].item():.6g}"
    swapped = held is not None and torch.equal(held.reshape(-1).float(), as_stored(other, device)[None])
    where = f" ({expected.tensor})" if expected.tensor else ""
    that_is = f"; it is that of {SIDES[1 - at].upper()}" if swapped else ""
    return f"the stored scale is {value}, {expected.source} was {expected.value:.6g}{where}{that_is}"


Live = Mapping[str, float | list[float] | None]  # "k", "v": a static scale, or [min, max] of dynamic ones


def live_scales(store: PagedKVStore) -> list[Live] | None:
    """The scales in the store by layer: static ones, or the range over stored tokens; None without scales."""
    if store.fmt.scale_kind == "none":
        return None
    seqs = [seq for seq in store.sequences() if store.state(seq) == RESIDENT and store.length(seq)]
    slots = [store.slots_for(seq, 0, store.length(seq)) for seq in seqs]
    where = torch.cat(slots) if slots else None
    return [{side: _live(store, pages.side(side)[1], where) for side in SIDES} for pages in store.layers]


def _live(store: PagedKVStore, scale: Tensor | None, slots: Tensor | None) -> float | list[float] | None:
    if scale is None:
        return None
    if scale.ndim == 1:
        return float(scale)
    if slots is None:
        return None
    used = indexable(scale)[slots // store.page_size, :, slots % store.page_size].float()
    return [float(x) for x in torch.aminmax(used)]


def provenance(engine: Engine, live: Sequence[Live], levels: Sequence[Level]) -> list[dict[str, Any]]:
    """One entry a layer: {layer, k, v, k_source, v_source, k_read, v_read}.

    live: of `live_scales`. A source is one of `kvbench.formats.scales.SOURCES`, None where the live value
    differs from what that source gives. read: whether changing the live scale moved logits in E3-layers; None
    where that was not shown.
    """
    static = engine.store.fmt.scale_kind == "static"
    expected = expected_scales(engine) if static else None
    facts = next((level.facts for level in levels if level.name == "E3-layers"), {})
    rows = []
    for layer, held in enumerate(live):
        row: dict[str, Any] = {"layer": layer, **held}
        for at, side in enumerate(SIDES):
            value = held[side]
            row[f"{side}_source"] = source.DYNAMIC
            if expected is not None:
                sound = isinstance(value, float) and not static_fault(
                    torch.tensor(value), expected[layer], at
                )
                row[f"{side}_source"] = expected[layer][at].source if sound else None
        for side in SIDES:
            name = f"{side}_scale"
            moved, unmoved = (layer in facts.get(key, {}).get(name, ()) for key in ("moved", "unmoved"))
            row[f"{side}_read"] = True if moved else False if unmoved else None
        rows.append(row)
    return rows
