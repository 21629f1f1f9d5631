"""Where the scales of a cell come from: given, a file, the checkpoint, or 1.0 by default. No torch here.

In a matrix `scale` may name a file, of `kvbench calibrate` or in the form that engines publish. Its content takes the name's place
in the cell, {"k": [one a layer], "v": [...], "calibrated" or "file": where they come from}, so that it is part of every key that
the cell is known by. The words of `WORDS` stay as they are: the model's digest covers what its files hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import Refused, UsageError
from kvbench.files import content_hash, read_json
from kvbench.formats.checkpoint_scales import Stored
from kvbench.formats.kv import KV_FORMATS, LARGEST, SMALLEST, KVFormat
from kvbench.text import show

VERSION = 1

# Where one scale comes from, as the records say it.
GIVEN, FILE, CALIBRATED, CHECKPOINT, DEFAULT, DYNAMIC = (
    "given", "file", "calibrated", "checkpoint", "default", "dynamic",
)  # fmt: skip
OR_DEFAULT = "checkpoint_or_default"
SOURCES = (CHECKPOINT, FILE, CALIBRATED, GIVEN, DEFAULT, DYNAMIC)
# The words that `scale` takes, and what each means.
WORDS = {
    DEFAULT: "1.0 for K and V of every layer, which engines take that are given none",
    CHECKPOINT: "those in the checkpoint's own files, of every layer",
    OR_DEFAULT: "those in the checkpoint's own files, 1.0 where it has none",
}
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")
MOST_LAYERS = 10_000  # a wilder number in a published file is no layer: what is missing is sought so far
# dtype of a published file -> the format that its scales are for.
PUBLISHED = {"float8_e4m3fn": "fp8_e4m3_static"}
STATIC = tuple(f.name for f in KV_FORMATS.values() if f.scale_kind == "static")

# Beside the scales: what each key of a file holds.
FACTS: dict[str, type] = {
    "model": str,  # the name that was given
    "model_digest": str,  # of its content, as in the keys of tasks
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
    """The cell's value of `scale` that a file stands for. Raises UsageError, with the file's name, for any other file."""
    if wrong := _path_fault(path):
        raise UsageError(
            f"the scale file {path} {wrong}; its path is relative to the matrix file. kvbench calibrate writes one."
        )
    data = read_json(path, "write it anew with kvbench calibrate", unique=True)
    published = isinstance(data, dict) and "kv_cache" in data
    wrong = _published_fault(data) if published else _fault(data)
    if wrong:
        raise UsageError(
            f"the scale file {path} {wrong}; write it anew{'' if published else ' with kvbench calibrate'}."
        )
    if published:
        facts = {"format": PUBLISHED[data["kv_cache"]["dtype"]], "model_type": data["model_type"]}
        column = [float(x) for _, x in sorted(_of_rank(data).items())]
        sides, kind = {"k": column, "v": list(column)}, FILE
    else:
        facts = {key: data[key] for key in FACTS}
        sides, kind = {side: [float(x) for x in data[side]] for side in ("k", "v")}, CALIBRATED
    return {**sides, kind: {"file": path.name, "sha": content_hash(data), **facts}}


def _path_fault(path: Path) -> str:
    """Why no file can be read at a path, to be read after its name, or ""."""
    try:
        path.stat()
    except FileNotFoundError:
        return "is a link to a file that does not exist" if path.is_symlink() else "does not exist"
    except OSError as e:
        return f"cannot be reached ({e.strerror})"
    except ValueError as e:  # a null character
        return f"cannot be reached ({e})"
    if path.is_dir():
        return "is a folder"
    return "" if path.is_file() else "is no regular file"


def _fault(data: Any) -> str:
    """What is wrong with a file's content, to be read after its name, or ""."""
    if not isinstance(data, dict) or "kvbench_scales" not in data:
        return "holds no scales: a mapping with kvbench_scales, k, v and where they come from is due"
    if data["kvbench_scales"] != VERSION:
        return f"is of version {data['kvbench_scales']!r}, and this kvbench reads version {VERSION}"
    wanted = {"kvbench_scales", "k", "v", *FACTS}
    if wrong := sorted(wanted.symmetric_difference(data)):
        return f"has other keys than it should: check {', '.join(wrong)}"
    for key, kind in FACTS.items():
        if type(data[key]) is not kind:
            return f"has {data[key]!r:.80} for {key}"
    if data["format"] not in STATIC:
        return f"is for the format {data['format']!r:.80}, and only {', '.join(STATIC)} take scales"
    for side in ("k", "v"):
        if not isinstance(data[side], list) or not data[side]:
            return f"has no list of scales for {side}, one a layer"
        for layer, x in enumerate(data[side]):
            if due := _scale_fault(x):
                return f"has {x!r:.80} for {side} of layer {layer}, {due}"
    if len(data["k"]) != len(data["v"]):
        return f"has {len(data['k'])} layers for k and {len(data['v'])} for v"
    return ""


def _published_fault(data: Mapping[str, Any]) -> str:
    """The same of a file in the form that engines publish: tensor-parallel rank -> layer -> one number for K and V."""
    cache = data["kv_cache"]
    if not isinstance(data.get("model_type"), str) or not data["model_type"]:
        return f"has {data.get('model_type')!r:.80} for model_type, where the model's is due"
    if not isinstance(cache, dict) or set(cache) != {"dtype", "scaling_factor"}:
        return "has no mapping of dtype and scaling_factor for kv_cache"
    if not isinstance(cache["dtype"], str) or cache["dtype"] not in PUBLISHED:
        return f"has {cache['dtype']!r:.80} for dtype, where {' or '.join(PUBLISHED)} is due"
    ranks = cache["scaling_factor"]
    if not isinstance(ranks, dict) or not ranks or not all(isinstance(r, dict) and r for r in ranks.values()):
        return "has no mapping of ranks to layers for scaling_factor"
    for rank, layers in ranks.items():
        if odd := [key for key in layers if not _LAYER.fullmatch(key)]:
            return f"has {odd[0]!r:.80} for a layer of rank {rank}, where a number from 0 is due"
        for layer, x in layers.items():
            if due := _scale_fault(x):
                return f"has {x!r:.80} for layer {layer} of rank {rank}, {due}"
        last = min(max(map(int, layers)), MOST_LAYERS)
        if missing := [i for i in range(last) if str(i) not in layers]:
            return f"has no scale for {_layers(missing)} in rank {rank}"
    first = next(iter(ranks))
    for rank, layers in ranks.items():
        if differ := [k for k in {**ranks[first], **layers} if ranks[first].get(k) != layers.get(k)]:
            return (
                f"has {layers.get(differ[0])} for layer {differ[0]} of rank {rank} and {ranks[first].get(differ[0])} of rank {first}: "
                "ranks hold parts of the heads, and a store here has one scale a layer for all of them"
            )
    return ""


def _of_rank(data: Mapping[str, Any]) -> dict[int, float]:
    """Layer -> scale, of the first rank; all are equal."""
    return {int(layer): x for layer, x in next(iter(data["kv_cache"]["scaling_factor"].values())).items()}


def _scale_fault(x: Any) -> str:
    """What is due in place of a number that is no scale, or "". Compared as it is: no float holds an integer of 400 digits."""
    if type(x) not in (int, float) or not 0 < x < math.inf:
        return "where a finite number above 0 is due"
    return "" if SMALLEST <= x <= LARGEST else f"where float32 holds {SMALLEST:.3g} to {LARGEST:.3g}"


def _layers(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 0, 1, 2, 3 and 26 more`."""
    more = f" and {len(layers) - 4} more" if len(layers) > 4 else ""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers[:4]))}{more}"


def of_file(scale: Any) -> Mapping[str, Any] | None:
    """Where the scales of a file come from; None for those that a matrix gives itself, or names by a word."""
    found = (
        next((scale[key] for key in (CALIBRATED, FILE) if key in scale), None)
        if isinstance(scale, Mapping)
        else None
    )
    return found if isinstance(found, Mapping) else None


def from_checkpoint(scale: Any) -> bool:
    return scale in (CHECKPOINT, OR_DEFAULT) if isinstance(scale, str) else False


@dataclass(frozen=True)
class Scale:
    """Of K or V of one layer. source: one of `SOURCES`; tensor: its name, of a checkpoint's."""

    value: float
    source: str
    tensor: str = ""


Pairs = Sequence[tuple[Scale, Scale]]  # (K, V) a layer


def settle(scale: Any, layers: int, stored: Stored) -> list[tuple[Scale, Scale]]:
    """A cell's `scale` as one (K, V) pair a layer, each with its source. stored: what the checkpoint's files hold, where it is asked.

    Raises Refused for a list that has not one number a layer, and for layers without a scale.
    """
    if isinstance(scale, str):
        _check_missing(scale, layers, stored)
        held = {} if scale == DEFAULT else stored
        return [(_of_word(layer, "k", held), _of_word(layer, "v", held)) for layer in range(layers)]
    facts = of_file(scale)
    source = GIVEN if facts is None else CALIBRATED if CALIBRATED in scale else FILE
    sides = scale if isinstance(scale, Mapping) else {"k": scale, "v": scale}
    columns = []
    for side in ("k", "v"):
        value = sides[side]
        column = list(value) if isinstance(value, (list, tuple)) else [value] * layers
        if len(column) != layers:
            raise Refused("scale_count", _wrong_count(side, len(column), layers, source, facts))
        columns.append([Scale(float(x), source) for x in column])
    return list(zip(*columns, strict=True))


def _wrong_count(side: str, count: int, layers: int, source: str, facts: Mapping[str, Any] | None) -> str:
    if facts is None:
        return f"scale.{side} has {count} values and the model has {layers} layers; give one a layer or one number."
    file = f"The scale file {facts['file']}"
    if source == CALIBRATED:
        return f"{file} has scales for {count} layers and the model has {layers}; run kvbench calibrate on this model."
    if count > layers:
        return (
            f"{file} has scales for {count} layers and the model has {layers}; give the file of this model."
        )
    return f"{file} has no scale for {_layers(range(count, layers))} of the model's {layers}; write it anew."


def _check_missing(scale: str, layers: int, stored: Stored) -> None:
    gaps = {side: [i for i in range(layers) if (i, side) not in stored] for side in ("k", "v")}
    if scale != CHECKPOINT or not (gaps["k"] or gaps["v"]):
        return
    if len(gaps["k"]) == len(gaps["v"]) == layers:
        what = f"has no scales of a KV cache, for none of its {layers} layers"
    elif gaps["k"] == gaps["v"]:
        what = f"has no scales of K and V for {_layers(gaps['k'])}"
    else:
        what = f"has no scale of {' and none of '.join(f'{side.upper()} for {_layers(gap)}' for side, gap in gaps.items() if gap)}"
    raise Refused(
        "checkpoint_has_no_scales",
        f"The checkpoint {what}; write scale: {OR_DEFAULT} for 1.0 there, as engines take it, or give a file of kvbench calibrate.",
    )


def _of_word(layer: int, side: str, stored: Stored) -> Scale:
    held = stored.get((layer, side))
    return Scale(1.0, DEFAULT) if held is None else Scale(held.value, CHECKPOINT, held.tensors[0])


def short(scale: Mapping[str, Any]) -> str:
    """Scales by side or layer in few letters, because names stand in tables: `k0.05/v0.1`; a list of layers by its digest,
    `layers-1a2b3c`, and one of a file by its method too, `calibrated-amax-1a2b3c`, `file-1a2b3c`."""
    if facts := of_file(scale):
        return (
            f"calibrated-{facts['method']}-{facts['sha'][:6]}"
            if CALIBRATED in scale
            else f"file-{facts['sha'][:6]}"
        )
    if any(isinstance(part, list) for part in scale.values()):
        return f"layers-{content_hash(scale)[:6]}"
    return "/".join(f"{side}{show(part)}" for side, part in scale.items())


def check_model(scale: Any, digests: Collection[str], model_type: str) -> None:
    """Raises Refused when the scales of a file belong to another model than those with `digests`, or of another `model_type`."""
    facts = of_file(scale)
    if facts is None:
        return
    if FILE in scale and facts["model_type"] != model_type:
        raise Refused(
            "scale_of_another_model",
            f"The scale file {facts['file']} is for a model of type {facts['model_type']}, and this cell's is {model_type}; give the "
            "file of this model.",
        )
    if CALIBRATED in scale and facts["model_digest"] not in digests:
        raise Refused(
            "scale_of_another_model",
            f"The scale file {facts['file']} was calibrated on {facts['model']} ({facts['model_digest'][:23]}), and this cell's "
            f"model is {' or '.join(digest[:23] for digest in digests)}; run kvbench calibrate on the cell's own model.",
        )


def origin(fmt: KVFormat, scale: Any, pairs: Pairs = ()) -> tuple[str, str]:
    """(kind, sentence) of a format's scales. kind: "none", "dynamic", or where they come from: "static" (given in the matrix),
    "calibrated", "file", "checkpoint", "default". pairs: what `settle` gives, which alone tells it of a checkpoint.
    """
    if fmt.scale_kind == "none":
        return "none", "none: values are stored as they are"
    if fmt.scale_kind == "dynamic":
        return "dynamic", "dynamic: one a token and KV head, computed when it is stored"
    if isinstance(scale, str):
        return _word_origin(scale, pairs)
    if facts := of_file(scale):
        where = f"file {facts['file']} ({facts['sha'][:12]})"
        if CALIBRATED not in scale:
            return (
                FILE,
                f"{where}: given for {facts['model_type']} models, one a layer for K and V, {facts['format']}",
            )
        return CALIBRATED, (
            f"{where}: calibrated, {facts['method']} per {facts['per']} over "
            f"{facts['tokens']:,} tokens of {facts['data']} (text {facts['text_sha'][:12]}), {facts['dtype']}"
        )
    if isinstance(scale, Mapping):
        sides = [scale[side] for side in ("k", "v")]
        if any(isinstance(side, list) for side in sides):
            return "static", f"given per layer, digest {content_hash(scale)[:12]}"
        return "static", f"given: {sides[0]} for K and {sides[1]} for V in every layer"
    return "static", f"given: {scale} for K and V in every layer"


def _word_origin(word: str, pairs: Pairs) -> tuple[str, str]:
    every = "default: 1.0 for K and V in every layer, which engines take that are given none"
    if word == DEFAULT:
        return DEFAULT, every
    if not pairs:
        return word, f"{word}: {WORDS[word]}"
    at = {
        side: [layer for layer, pair in enumerate(pairs) if pair[side].source == DEFAULT] for side in range(2)
    }
    defaults, total = len(at[0]) + len(at[1]), 2 * len(pairs)
    if not defaults:
        return CHECKPOINT, f"checkpoint: all {total} scales from its files"
    if defaults == total:
        return DEFAULT, f"{every}; the checkpoint has no scales"
    sides = " and ".join(f"{'KV'[side]} of {_layers(layers)}" for side, layers in at.items() if layers)
    return (
        f"{CHECKPOINT} + {DEFAULT}",
        f"checkpoint: {total - defaults} of {total} scales from its files; default: 1.0 for {sides}, which it has none for",
    )
