"""Scales for the static KV formats, from the K and V that a model computes on a text.

scale = amax(|x|), or a percentile of |x|, over the format's largest code. The text runs through a native
engine in windows of `WINDOW` tokens, each a sequence of its own.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench import __version__
from kvbench.data.corpora import corpus, first_ids
from kvbench.engines.reference.engine import Engine
from kvbench.engines.reference.load import DTYPES, LoadedModel, load_model
from kvbench.errors import KvbenchError, UsageError
from kvbench.files import content_hash, write_json
from kvbench.formats.kv import KV_FORMATS, SIDES
from kvbench.formats.scales import STATIC, VERSION, origin, read
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import check_context, request_of, resolve
from kvbench.models.source import kind_of, stored_fp8

WINDOW = 512
PER = ("layer", "tensor")


@dataclass(frozen=True)
class Calibrated:
    """The file that was written, and its content."""

    path: Path
    content: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"file": str(self.path), **self.content}

    def as_text(self) -> str:
        found = [(side.upper(), self.content[side]) for side in SIDES]
        spans = ", ".join(f"{side} {min(x):.4g} to {max(x):.4g}" for side, x in found)
        _, source = origin(KV_FORMATS[self.content["format"]], read(self.path))
        what = f"scales of {len(self.content['k'])} layers for {self.content['format']}"
        return f"{self.path}: {what}, {spans}.\n{source}."


def calibrate(
    model: str,
    out: Path,
    *,
    fmt: str = "int8_static",
    data: str = "pydoc",
    data_dir: Path | None = None,
    tokens: int = 4096,
    method: str = "amax",
    per: str = "layer",
    dtype: str = "float32",
) -> Calibrated:
    """Measures the scales and writes them to `out`, completely or not at all. Raises UsageError for a wrong
    option or a text that is too short, NotAvailable for a text that is not here, KvbenchError for K or V that
    give no scale."""
    share = _checked(model, out, fmt, tokens, method, per, dtype)
    text = corpus(data, data_dir)
    weights = "fp8_block128" if stored_fp8({"model": model}) else "native"
    spec = {**CELL_KEYS, "model": model, "device": "cpu", "dtype": dtype, "weights": weights}
    loaded = load_model(spec, "cpu", dtype)
    ids = first_ids(data, text.text, loaded.tokenizer, tokens)
    columns = scales_of(magnitudes(loaded, spec, ids, share, per), KV_FORMATS[fmt].qmax or 1.0)
    asked = {"format": fmt, "method": method, "per": per}
    read = {"data": Path(data).name, "data_sha256": text.sha256, "text_sha": content_hash(ids)}
    content: dict[str, Any] = {
        "kvbench_scales": VERSION,
        "model": model,
        "model_digest": loaded.sha,
        **asked,
        **read,
        "tokens": tokens,
        "window": WINDOW,
        "dtype": dtype,
        "kvbench": __version__,
        **columns,
    }
    write_json(out, content)
    return Calibrated(out, content)


def _checked(model: str, out: Path, fmt: str, tokens: int, method: str, per: str, dtype: str) -> float:
    """The method as a share of |x| (1.0 for amax), after a check of all options."""
    known = (("--format", fmt, STATIC), ("--per", per, PER), ("--dtype", dtype, tuple(DTYPES)))
    for name, value, accepted in known:
        if value not in accepted:
            raise UsageError(f"{name} {value} is not known; use {' or '.join(accepted)}.")
    share = share_of(method)
    if tokens < 1:
        raise UsageError(f"--tokens is {tokens}; ask for at least 1.")
    kind_of(model)
    if out.suffix != ".json":
        raise UsageError(f"{out} does not end with .json, as a matrix needs; name it NAME.json.")
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} is there already; remove it, or give another name.")
    return share


def share_of(method: str) -> float:
    """1.0 for "amax", 0.999 for "p99.9". UsageError for anything else, and for a percentile below 50."""
    if method == "amax":
        return 1.0
    found = re.fullmatch(r"p(\d{2,3}(\.\d+)?)", method)
    percentile = float(found[1]) if found else 0.0
    if not 50 <= percentile <= 100:
        accepted = "amax, or a percentile of |x| from p50 to p100, such as p99.9"
        raise UsageError(f"--method {method} is not known; use {accepted}.")
    return percentile / 100


@dataclass
class Top:
    """The largest |x| of a stream of `total` values, as many as the nearest-rank quantile `share` needs."""

    share: float
    total: int
    kept: Tensor | None = None

    @property
    def rank(self) -> int:
        """Rank of the quantile from the top, 1 for the largest."""
        return self.total - max(math.ceil(round(self.share * self.total, 6)), 1) + 1

    def add(self, x: Tensor) -> None:
        """x: any shape, finite."""
        found = x.detach().float().abs().flatten()
        if self.kept is not None:
            found = torch.cat([self.kept, found])
        self.kept = found.topk(min(self.rank, len(found))).values

    def value(self) -> float:
        return float(self.kept[-1]) if self.kept is not None else 0.0


def magnitudes(
    loaded: LoadedModel, spec: dict[str, Any], ids: Sequence[int], share: float, per: str
) -> list[tuple[float, float]]:
    """(K, V) a layer: the quantile of |x| over the text, of the layer or of all layers (per: "tensor")."""
    layers = len(loaded.layers)
    window = min(WINDOW, loaded.facts.max_context or WINDOW)
    check_context(loaded.facts, window, 0)
    engine = Engine(loaded, resolve(request_of(spec), loaded.facts), spec, sequences=1, tokens=window)

    def total(side: int, layer: int) -> int:
        shape = loaded.layers[layer].shape
        return len(ids) * shape.kv_heads * (shape.head_dim, shape.value_dim)[side]

    wide = per == "tensor"
    tops = [
        [
            Top(share, sum(total(side, i) for i in range(layers)) if wide else total(side, layer))
            for layer in range(1 if wide else layers)
        ]
        for side in range(2)
    ]
    with torch.inference_mode():
        for start in range(0, len(ids), window):
            seq = engine.add()
            engine.tap_layers = frozenset(range(layers))
            engine.forward([(seq, ids[start : start + window])], "none")
            for layer in range(layers):
                for side in range(2):
                    x = engine.taps[layer][side]
                    if not x.isfinite().all():
                        raise KvbenchError(
                            f"Layer {layer}: {SIDES[side].upper()} has a non-finite element on this text, "
                            "so no scale follows from it; calibrate in float32, or on another text."
                        )
                    tops[side][0 if wide else layer].add(x)
            engine.tap_layers = frozenset()
            engine.free(seq)
    return [(tops[0][0 if wide else i].value(), tops[1][0 if wide else i].value()) for i in range(layers)]


def scales_of(found: Sequence[tuple[float, float]], qmax: float) -> dict[str, list[float]]:
    """{"k": [...], "v": [...]}: each magnitude over the largest code, to 9 digits. KvbenchError for a 0."""
    for layer, pair in enumerate(found):
        for side, value in zip(SIDES, pair, strict=True):
            if value == 0:
                raise KvbenchError(
                    f"Layer {layer}: that magnitude of {side.upper()} is 0 on this text, so no scale "
                    "follows from it; take --method amax, or a longer text."
                )
    return {side: [float(f"{pair[which] / qmax:.9g}") for pair in found] for which, side in enumerate(SIDES)}
