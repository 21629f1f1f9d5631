"""Scales of a KV cache in a checkpoint's own files: under which names, of which format, and their values. No torch.

Exporters write one number a layer and side. It is E4M3's, amax / 448, unless the config's `kv_cache_scheme` says otherwise.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kvbench.errors import Refused
from kvbench.formats.kv import LARGEST, SMALLEST
from kvbench.formats.safetensors_header import FETCH_AGAIN, Header, read_headers

SCHEME = "kv_cache_scheme"
UNUSABLE = "checkpoint_scale_unusable"

# Before `layers.N.`: the language model's. Layers under any other are another tower's (vision_tower., draft.), and so are their scales.
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")
# What is read: the layer, and k, v or both. `kv_scale` is one number for both sides.
_READ = re.compile(
    rf"(?:{'|'.join(map(re.escape, PREFIXES))})layers\.(0|[1-9][0-9]{{0,5}})\.self_attn\."
    r"(?:([kv])_proj\.(?:\2_scale|output_scale)|(?:attn\.)?(?:([kv])_scale|kv_scale))"
)
_IN_LAYERS = re.compile(r"(|.*?\.)layers\.[0-9]+\.")
# All that belongs to a cache, read or not: of queries and probabilities too.
_OF_CACHE = re.compile(r"(^|[._])(k|v|kv|q|prob|cache)_?((proj\.)?output_|cache_)?scale$|kv_cache")

# The names that `_READ` takes, behind the layer's attention.
_NAMES = ("k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale", "v_proj.output_scale", "k_scale", "v_scale", "attn.k_scale",
          "attn.v_scale", "kv_scale", "attn.kv_scale")  # fmt: skip
# Of queries and of attention's probabilities: no part of a stored cache.
_OF_OTHERS = re.compile(r"(^|[._])(q|prob)_?((proj\.)?output_|cache_)?scale$")

# The dtypes of a scale -> its exact value, from its bytes (little-endian).
_VALUE: dict[str, Callable[[bytes], float]] = {
    "F64": lambda raw: float(struct.unpack("<d", raw)[0]),
    "F32": lambda raw: float(struct.unpack("<f", raw)[0]),
    "F16": lambda raw: float(struct.unpack("<e", raw)[0]),
    "BF16": lambda raw: float(struct.unpack("<f", b"\0\0" + raw)[0]),
    "F8_E5M2": lambda raw: float(struct.unpack("<e", b"\0" + raw)[0]),
    "F8_E4M3": lambda raw: _e4m3(raw[0]),
    "F8_E8M0": lambda raw: math.nan if raw[0] == 255 else 2.0 ** (raw[0] - 127),
}

# Key of a scheme -> the values under which one positive number a layer and side says all. None stands for an absent key.
_SCHEME: dict[str, tuple[Any, ...]] = {
    "num_bits": (8,),
    "type": ("float", "int"),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "strategy": ("tensor", None),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (False, None),
}
# How the scales were found, and in which dtype they lie: the files say it themselves.
_SCHEME_IGNORED = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
_OF_TYPE = {"float": "fp8_e4m3_static", "int": "int8_static"}

# Of a quantization_config in which nothing is quantized but the cache: key -> accepted values, None as above.
_CACHE_ONLY: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "config_groups": ({}, None),
    "sparsity_config": ({}, None),
    "transform_config": ({}, None),
}
_CACHE_ONLY_IGNORED = frozenset(
    {SCHEME, "format", "ignore", "quantization_status", "global_compression_ratio", "version"}
)


@dataclass(frozen=True)
class StoredScale:
    """One side of one layer. tensors: the names under which the files hold it; file: that of the first."""

    value: float
    tensors: tuple[str, ...]
    file: str


Stored = Mapping[tuple[int, str], StoredScale]  # by layer and side, "k" or "v"


def of_cache(name: str) -> bool:
    """Whether a tensor is a scale of the cache and not of a weight."""
    return _OF_CACHE.search(name) is not None


def part_of(name: str) -> tuple[int, str] | None:
    """(layer, "k", "v" or "kv") of a tensor that is read as a scale; None for any other."""
    found = _READ.fullmatch(name)
    return (int(found[1]), found[2] or found[3] or "kv") if found else None


def of_other_tower(name: str) -> bool:
    """Whether a tensor is of layers that are not the language model's, by its prefix."""
    found = _IN_LAYERS.match(name)
    return found is not None and found[1] not in PREFIXES


def stored_scales(files: Sequence[Path], layers: int) -> dict[tuple[int, str], StoredScale]:
    """What safetensors files hold for the first `layers` layers. Raises Refused, naming tensor and file, for a scale that is
    none, for two that differ, and for scales of K or V under names that are not read: 1.0 must not stand for one that is there. Those of
    other towers are left alone.
    """
    found: dict[tuple[int, str], StoredScale] = {}
    headers = read_headers(files)
    if strange := sorted(
        name
        for name in headers
        if of_cache(name) and not (part_of(name) or _OF_OTHERS.search(name) or of_other_tower(name))
    ):
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise Refused(
            UNUSABLE,
            f"The checkpoint holds {strange[0]} of {headers[strange[0]].file.name}{more}, a scale of the cache by its name, which is none "
            f"of those that are read: layers.N.self_attn. with {', '.join(_NAMES)}. Rename it, or give scales in the matrix.",
        )
    for name, header in sorted(headers.items()):
        part = part_of(name)
        if part is None or part[0] >= layers:
            continue
        value = _value(name, header)
        for side in part[1]:
            before = found.get((part[0], side))
            if before is not None and before.value != value:
                raise Refused(
                    UNUSABLE,
                    f"The checkpoint holds two scales for {side.upper()} of layer {part[0]}: {before.tensors[0]} of {before.file} is "
                    f"{before.value:.6g}, {name} of {header.file.name} is {value:.6g}. Export it anew.",
                )
            held = before.tensors if before else ()
            file = before.file if before else header.file.name
            found[part[0], side] = StoredScale(value, (*held, name), file)
    return found


def _value(name: str, header: Header) -> float:
    where = f"The tensor {name} of {header.file.name}"
    if header.dtype not in _VALUE:
        raise Refused(
            UNUSABLE,
            f"{where} is {header.dtype}, where a scale is one of {', '.join(_VALUE)}; {FETCH_AGAIN}.",
        )
    if prod(header.shape) != 1:
        raise Refused(
            UNUSABLE,
            f"{where} has shape {list(header.shape)}: one scale for the whole of K or V in a layer is read, none a head or channel. Give "
            "scales in the matrix, or a file of kvbench calibrate.",
        )
    value = _VALUE[header.dtype](header.content())
    if SMALLEST <= value <= LARGEST:
        return value
    if math.isfinite(value) and value > 0:
        due = f"; a scale is kept in float32, from {SMALLEST:.3g} to {LARGEST:.3g}"
    else:
        unset = ", as engines write for one that was never set" if value == -1 else ""
        due = f"{unset}; a scale is a finite number above 0"
    raise Refused(
        UNUSABLE, f"{where} holds {value:.6g}{due}. Export the checkpoint anew, or give scales in the matrix."
    )


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), byte >> 3 & 0xF, byte & 0x7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def cache_only(said: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` quantizes the cache and nothing else, so that the weights are native."""
    if said.get(SCHEME) is None:
        return False
    fits = all(any(said.get(key) == one for one in accepted) for key, accepted in _CACHE_ONLY.items())
    return fits and not any(
        said[key] is not None for key in said if key not in _CACHE_ONLY and key not in _CACHE_ONLY_IGNORED
    )


def check_scheme(config: Mapping[str, Any], fmt: str, name: str) -> None:
    """Raises Refused unless the scales of the checkpoint `name` with this config.json are those of the KV format `fmt`."""
    quantization = config.get("quantization_config")
    scheme = quantization.get(SCHEME) if isinstance(quantization, Mapping) else None
    if scheme is None:
        due, why = "fp8_e4m3_static", f"its config.json has no {SCHEME}, and without one they are E4M3's"
    else:
        _check_known(scheme, name)
        due, why = _OF_TYPE[scheme["type"]], f"the {SCHEME} in its config.json has type {scheme['type']}"
    if due != fmt:
        raise Refused(
            "scale_of_another_format",
            f"The scales of the checkpoint {name} are for {due} ({why}), and this cell stores {fmt}, whose codes reach another "
            f"number; use kv_format: {due}, or calibrate: kvbench calibrate {name} OUT.json --format {fmt}.",
        )


def _check_known(scheme: Any, name: str) -> None:
    given = scheme if isinstance(scheme, Mapping) else {}
    wrong = [
        (key, given.get(key), accepted)
        for key, accepted in _SCHEME.items()
        if not any(given.get(key) == one and type(given.get(key)) is type(one) for one in accepted)
    ]
    known = {*_SCHEME, *_SCHEME_IGNORED}
    wrong += [(key, value, (None,)) for key, value in given.items() if key not in known and value is not None]
    if wrong or not isinstance(scheme, Mapping):
        key, value, accepted = wrong[0] if isinstance(scheme, Mapping) else (SCHEME, scheme, ("a mapping",))
        due = " or ".join("no value" if one is None else str(one) for one in accepted)
        raise Refused(
            "kv_cache_scheme_unsupported",
            f"The checkpoint {name} says {key}: {value!s:.80} in its {SCHEME}, where {due} is read: a symmetric, static 8-bit cache "
            "with one scale a layer for K and one for V. Give scales in the matrix, or a file of kvbench calibrate.",
        )
