"""The source of a cell's static scales: the matrix, a file, the checkpoint, or 1.0 by default. No torch here.

In a matrix `scale` may name a file that `kvbench calibrate` wrote, or one in the form that engines publish.
Its content replaces the name in the cell, {"k": [one per layer], "v": [...], "calibrated" or "file"}.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import Refused, UsageError
from kvbench.files import content_hash, read_json
from kvbench.formats.checkpoint_scales import Stored, StoredScale
from kvbench.formats.kv import KV_FORMATS, LARGEST, SIDES, SMALLEST, KVFormat
from kvbench.text import show

VERSION = 1

# The source of one scale, as records name it.
CHECKPOINT, FILE, CALIBRATED, GIVEN = "checkpoint", "file", "calibrated", "given"
DEFAULT, DYNAMIC, OR_DEFAULT = "default", "dynamic", "checkpoint_or_default"
SOURCES = (CHECKPOINT, FILE, CALIBRATED, GIVEN, DEFAULT, DYNAMIC)
# The words that `scale` takes -> what each means.
WORDS = {
    DEFAULT: "1.0 for K and V of every layer, as engines use when they are given no scales",
    CHECKPOINT: "the scales in the checkpoint's own files, for every layer",
    OR_DEFAULT: "the scales in the checkpoint's own files, 1.0 where it has none",
}
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")
MOST_LAYERS = 10_000  # missing layers of a published file are looked for up to this number
# dtype of a published file -> the format of its scales.
PUBLISHED = {"float8_e4m3fn": "fp8_e4m3_static"}
STATIC = tuple(f.name for f in KV_FORMATS.values() if f.scale_kind == "static")

# The keys of a calibrated file next to its scales.
FACTS: dict[str, type] = {
    "model": str,  # the name that was given
    "model_digest": str,  # digest of its content, as in the keys of tasks
    "format": str,
    "method": str,  # amax, or p99.9: that percentile of |x|
    "per": str,  # layer: one for K and one for V in each; tensor: one for all of K and one for all of V
    "data": str,
    "data_sha256": str,
    "text_sha": str,  # of the token ids
    "tokens": int,
    "window": int,  # tokens of a sequence
    "dtype": str,
    "kvbench": str,
}


def read(path: Path) -> dict[str, Any]:
    """The value of `scale` that a file holds. Raises UsageError, with its name, for an invalid file."""
    if wrong := _path_fault(path):
        how = "its path is relative to the matrix file. kvbench calibrate writes one"
        raise UsageError(f"the scale file {path} {wrong}; {how}.")
    data = read_json(path, again := "run kvbench calibrate again", unique=True)
    published = isinstance(data, dict) and "kv_cache" in data
    if wrong := _published_fault(data) if published else _fault(data):
        raise UsageError(f"the scale file {path} {wrong}{'' if published else f'; {again}'}.")
    facts = {"file": path.name, "sha": content_hash(data)}
    if not published:
        facts |= {key: data[key] for key in FACTS}
        return {**{side: [float(x) for x in data[side]] for side in SIDES}, CALIBRATED: facts}
    cache = data["kv_cache"]
    layers = next(iter(cache["scaling_factor"].values()))  # all ranks are equal
    column = [float(layers[key]) for key in sorted(layers, key=int)]
    facts |= {"format": PUBLISHED[cache["dtype"]], "model_type": data["model_type"]}
    return {"k": column, "v": list(column), FILE: facts}


def _path_fault(path: Path) -> str:
    """Why a path cannot be read, as words that follow its name, or ""."""
    try:
        path.stat()
    except FileNotFoundError:
        return "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
    except (OSError, ValueError) as e:  # ValueError: a null character
        return f"cannot be reached ({getattr(e, 'strerror', e)})"
    return "is a folder" if path.is_dir() else "" if path.is_file() else "is not a regular file"


def _fault(data: Any) -> str:
    """What is wrong with a calibrated file's content, as words that follow its name, or ""."""
    if not isinstance(data, dict) or "kvbench_scales" not in data:
        return "holds no scales; expected a mapping with kvbench_scales, k, v and their origin"
    if data["kvbench_scales"] != VERSION:
        return f"has version {data['kvbench_scales']!r}, expected {VERSION}"
    wanted = {"kvbench_scales", "k", "v", *FACTS}
    if wrong := sorted(wanted.symmetric_difference(data)):
        return f"has missing or unknown keys: {', '.join(wrong)}"
    for key, kind in FACTS.items():
        if type(data[key]) is not kind:
            return f"has {data[key]!r:.80} for {key}, expected {kind.__name__}"
    if data["format"] not in STATIC:
        return f"has {data['format']!r:.80} for format, expected {' or '.join(STATIC)}"
    for side in SIDES:
        if not isinstance(data[side], list) or not data[side]:
            return f"has no list of scales for {side}, one per layer"
        for layer, x in enumerate(data[side]):
            if expected := _scale_fault(x):
                return f"has {x!r:.80} for {side} of layer {layer}, expected {expected}"
    if len(data["k"]) != len(data["v"]):
        return f"has {len(data['k'])} layers for k and {len(data['v'])} for v"
    return ""


def _published_fault(data: Mapping[str, Any]) -> str:
    """The same for a published file: tensor-parallel rank -> layer -> one number for K and V."""
    cache = data["kv_cache"]
    if not isinstance(data.get("model_type"), str) or not data["model_type"]:
        return f"has {data.get('model_type')!r:.80} for model_type, expected the model's type"
    if not isinstance(cache, dict) or set(cache) != {"dtype", "scaling_factor"}:
        return "has no mapping of dtype and scaling_factor for kv_cache"
    if not isinstance(cache["dtype"], str) or cache["dtype"] not in PUBLISHED:
        return f"has {cache['dtype']!r:.80} for dtype, expected {' or '.join(PUBLISHED)}"
    ranks = cache["scaling_factor"]
    if not isinstance(ranks, dict) or not ranks or not all(isinstance(r, dict) and r for r in ranks.values()):
        return "has no mapping of ranks to layers for scaling_factor"
    for rank, layers in ranks.items():
        if odd := [key for key in layers if not _LAYER.fullmatch(key)]:
            return f"has {odd[0]!r:.80} for a layer of rank {rank}, expected a number from 0"
        for layer, x in layers.items():
            if expected := _scale_fault(x):
                return f"has {x!r:.80} for layer {layer} of rank {rank}, expected {expected}"
        last = min(max(map(int, layers)), MOST_LAYERS)
        if missing := [i for i in range(last) if str(i) not in layers]:
            return f"has no scale for {_layers(missing)} in rank {rank}"
    first, own = next(iter(ranks.items()))
    for rank, layers in ranks.items():
        if differ := [key for key in {**own, **layers} if own.get(key) != layers.get(key)]:
            found = f"{layers.get(differ[0])} for layer {differ[0]} of rank {rank}"
            expected = "expected equal ranks, because a store has one scale per layer for all heads"
            return f"has {found} and {own.get(differ[0])} of rank {first}; {expected}"
    return ""


def _scale_fault(x: Any) -> str:
    """What is expected in place of x, or "". x stays as it is: no float holds an integer of 400 digits."""
    if type(x) not in (int, float) or not 0 < x < math.inf:
        return "a finite number above 0"
    return "" if SMALLEST <= x <= LARGEST else f"a number that float32 holds, {SMALLEST:.3g} to {LARGEST:.3g}"


def _layers(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0, 1, 2, 3 and 26 more`."""
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers[:4]))}{more}"


def of_file(scale: Any) -> Mapping[str, Any] | None:
    """The origin of scales that come from a file; None for those of the matrix itself and for a word."""
    given = scale if isinstance(scale, Mapping) else {}
    found = given.get(CALIBRATED, given.get(FILE))
    return found if isinstance(found, Mapping) else None


def from_checkpoint(scale: Any) -> bool:
    """Whether `scale` names the scales in the checkpoint's files."""
    return isinstance(scale, str) and scale in (CHECKPOINT, OR_DEFAULT)


@dataclass(frozen=True)
class Scale:
    """The scale of K or V of one layer. source: one of `SOURCES`; tensor: its name in the checkpoint."""

    value: float
    source: str
    tensor: str = ""


Pairs = Sequence[tuple[Scale, Scale]]  # (K, V) per layer


def settle(scale: Any, layers: int, stored: Stored) -> list[tuple[Scale, Scale]]:
    """One (K, V) pair per layer. Raises Refused for a list of another length, and without a scale."""
    if isinstance(scale, str):
        if scale == CHECKPOINT:
            _check_missing(layers, stored)
        held = {} if scale == DEFAULT else stored
        return [(_of_word(held.get((i, "k"))), _of_word(held.get((i, "v")))) for i in range(layers)]
    facts = of_file(scale)
    source = GIVEN if facts is None else CALIBRATED if CALIBRATED in scale else FILE
    sides = scale if isinstance(scale, Mapping) else {"k": scale, "v": scale}
    columns = []
    for side in SIDES:
        value = sides[side]
        column = list(value) if isinstance(value, (list, tuple)) else [value] * layers
        if len(column) != layers:
            where = f"scale.{side}" if facts is None else f"The scale file {facts['file']}"
            raise Refused("scale_count", f"{where} {_wrong_count(source, len(column), layers)}")
        columns.append([Scale(float(x), source) for x in column])
    return list(zip(*columns, strict=True))


def _wrong_count(source: str, count: int, layers: int) -> str:
    if source == GIVEN:
        return f"has {count} values for {layers} layers; give one per layer, or one number."
    if source == CALIBRATED:
        return f"has scales for {count} of {layers} layers; run kvbench calibrate on this model."
    if count > layers:
        return f"has scales for {count} layers and the model has {layers}; give the file of this model."
    return f"has no scale for {_layers(range(count, layers))} of the model's {layers}; add them."


def _check_missing(layers: int, stored: Stored) -> None:
    gaps = {side: [i for i in range(layers) if (i, side) not in stored] for side in SIDES}
    if not (gaps["k"] or gaps["v"]):
        return
    if len(gaps["k"]) == len(gaps["v"]) == layers:
        what = f"has no KV cache scales for any of its {layers} layers"
    elif gaps["k"] == gaps["v"]:
        what = f"has no K and V scales for {_layers(gaps['k'])}"
    else:
        missing = [f"{side.upper()} scale for {_layers(gap)}" for side, gap in gaps.items() if gap]
        what = f"has no {' and no '.join(missing)}"
    raise Refused(
        "checkpoint_has_no_scales",
        f"The checkpoint {what}; write scale: {OR_DEFAULT} to use 1.0 there, as engines do, or give a file "
        "of kvbench calibrate.",
    )


def _of_word(held: StoredScale | None) -> Scale:
    return Scale(1.0, DEFAULT) if held is None else Scale(held.value, CHECKPOINT, held.tensors[0])


def short(scale: Mapping[str, Any]) -> str:
    """A short name for scales: `k0.05/v0.1`, `layers-1a2b3c`, `calibrated-amax-1a2b3c`, `file-1a2b3c`."""
    if facts := of_file(scale):
        kind = f"calibrated-{facts['method']}" if CALIBRATED in scale else "file"
        return f"{kind}-{facts['sha'][:6]}"
    if any(isinstance(part, list) for part in scale.values()):
        return f"layers-{content_hash(scale)[:6]}"
    return "/".join(f"{side}{show(part)}" for side, part in scale.items())


def check_model(scale: Any, digests: Collection[str], model_type: str) -> None:
    """Raises Refused for scales from a file of another model, by `digests` or by `model_type`."""
    facts = of_file(scale)
    if facts is None:
        return
    of_type = FILE in scale
    made, own = facts["model_type" if of_type else "model_digest"], [model_type] if of_type else digests
    if made not in own:
        found = f"for models of type {made}" if of_type else f"calibrated on {facts['model']} ({made[:23]})"
        next_step = (
            "give the file of this model" if of_type else "run kvbench calibrate on the cell's own model"
        )
        raise Refused(
            "scale_of_another_model",
            f"The scale file {facts['file']} is {found}, and this cell's model is "
            f"{' or '.join(one[:23] for one in own)}; {next_step}.",
        )


def origin(fmt: KVFormat, scale: Any, pairs: Pairs = ()) -> tuple[str, str]:
    """(kind, sentence) of a format's scales. kind: "none", "dynamic", "static" (given in the matrix),
    "calibrated", "file", "checkpoint" or "default". pairs: the result of `settle`.
    """
    if fmt.scale_kind == "none":
        return "none", "none: values are stored as they are"
    if fmt.scale_kind == "dynamic":
        return "dynamic", "dynamic: one per token and KV head, computed when the token is stored"
    if isinstance(scale, str):
        return _word_origin(scale, pairs)
    if facts := of_file(scale):
        where = f"file {facts['file']} ({facts['sha'][:12]})"
        if CALIBRATED not in scale:
            sides = f"one per layer for K and V, {facts['format']}"
            return FILE, f"{where}: published for {facts['model_type']} models, {sides}"
        how = f"calibrated, {facts['method']} per {facts['per']}"
        text = f"{facts['tokens']:,} tokens of {facts['data']} (text {facts['text_sha'][:12]})"
        return CALIBRATED, f"{where}: {how} over {text}, {facts['dtype']}"
    if not isinstance(scale, Mapping):
        return "static", f"given: {scale} for K and V in every layer"
    if any(isinstance(part, list) for part in scale.values()):
        return "static", f"given per layer, digest {content_hash(scale)[:12]}"
    return "static", f"given: {scale['k']} for K and {scale['v']} for V in every layer"


def _word_origin(word: str, pairs: Pairs) -> tuple[str, str]:
    every = "default: 1.0 for K and V in every layer, as engines use without scales"
    if word == DEFAULT:
        return DEFAULT, every
    if not pairs:
        return word, f"{word}: {WORDS[word]}"
    at = {s: [layer for layer, pair in enumerate(pairs) if pair[s].source == DEFAULT] for s in range(2)}
    defaults, total = len(at[0]) + len(at[1]), 2 * len(pairs)
    if not defaults:
        return CHECKPOINT, f"checkpoint: all {total} scales from its files"
    if defaults == total:
        return DEFAULT, f"{every}; the checkpoint has no scales"
    sides = " and ".join(f"{'KV'[side]} of {_layers(layers)}" for side, layers in at.items() if layers)
    found = f"checkpoint: {total - defaults} of {total} scales from its files"
    return f"{CHECKPOINT} + {DEFAULT}", f"{found}; default: 1.0 for {sides}, which it has no scales for"
