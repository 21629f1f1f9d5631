"""Where the scales of a cell come from, and the file that `kvbench calibrate` writes. No torch here.

In a matrix `scale` may name such a file. Its content takes the name's place in the cell, {"k": [one a layer], "v": [...],
"calibrated": where they come from}, so that it is part of every key that the cell is known by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvbench.cells import content_hash
from kvbench.document import show
from kvbench.errors import Refused, UsageError
from kvbench.formats import KV_FORMATS, KVFormat
from kvbench.record import read_json

VERSION = 1
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
    if not path.is_file():
        raise UsageError(
            f"the scale file {path} does not exist; its path is relative to the matrix file. kvbench calibrate writes one."
        )
    data = read_json(path, "write it anew with kvbench calibrate")
    wrong = _fault(data)
    if wrong:
        raise UsageError(f"the scale file {path} {wrong}; write it anew with kvbench calibrate.")
    facts = {key: data[key] for key in FACTS}
    return {
        "k": [float(x) for x in data["k"]],
        "v": [float(x) for x in data["v"]],
        "calibrated": {"file": path.name, "sha": content_hash(data), **facts},
    }


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
            if type(x) not in (int, float) or not (math.isfinite(x) and x > 0):
                return f"has {x!r:.80} for {side} of layer {layer}, where a finite number above 0 is due"
    if len(data["k"]) != len(data["v"]):
        return f"has {len(data['k'])} layers for k and {len(data['v'])} for v"
    return ""


def calibrated(scale: Any) -> Mapping[str, Any] | None:
    """Where the scales of a file come from; None for those that a matrix gives itself."""
    found = scale.get("calibrated") if isinstance(scale, Mapping) else None
    return found if isinstance(found, Mapping) else None


def short(scale: Mapping[str, Any]) -> str:
    """Scales by side or layer in few letters, because names stand in tables: `k0.05/v0.1`; a list of layers by its digest,
    `layers-1a2b3c`, and one of a file by its method too, `calibrated-amax-1a2b3c`."""
    if facts := calibrated(scale):
        return f"calibrated-{facts['method']}-{facts['sha'][:6]}"
    if any(isinstance(part, list) for part in scale.values()):
        return f"layers-{content_hash(scale)[:6]}"
    return "/".join(f"{side}{show(part)}" for side, part in scale.items())


def check_model(scale: Any, digests: Collection[str], layers: int) -> None:
    """Raises Refused when the scales of a file belong to another model than those with `digests`, or to another number of
    layers."""
    facts = calibrated(scale)
    if facts is None:
        return
    if facts["model_digest"] not in digests:
        raise Refused(
            "scale_of_another_model",
            f"The scale file {facts['file']} was calibrated on {facts['model']} ({facts['model_digest'][:23]}), and this cell's "
            f"model is {' or '.join(digest[:23] for digest in digests)}; run kvbench calibrate on the cell's own model.",
        )
    if len(scale["k"]) != layers:
        raise Refused(
            "scale_count",
            f"The scale file {facts['file']} has scales for {len(scale['k'])} layers and the model has {layers}; run kvbench "
            "calibrate on this model.",
        )


def origin(fmt: KVFormat, scale: Any) -> tuple[str, str]:
    """(kind, sentence) of a format's scales: "none", "dynamic", "static" (given in the matrix) or "calibrated" (a file)."""
    if fmt.scale_kind == "none":
        return "none", "none: values are stored as they are"
    if fmt.scale_kind == "dynamic":
        return "dynamic", "dynamic: one a token and KV head, computed when it is stored"
    if facts := calibrated(scale):
        return "calibrated", (
            f"file {facts['file']} ({facts['sha'][:12]}): calibrated, {facts['method']} per {facts['per']} over "
            f"{facts['tokens']:,} tokens of {facts['data']} (text {facts['text_sha'][:12]}), {facts['dtype']}"
        )
    if isinstance(scale, Mapping):
        sides = [scale[side] for side in ("k", "v")]
        if any(isinstance(side, list) for side in sides):
            return "static", f"given per layer, digest {content_hash(scale)[:12]}"
        return "static", f"given: {sides[0]} for K and {sides[1]} for V in every layer"
    return "static", f"given: {scale} for K and V in every layer"
