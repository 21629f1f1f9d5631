"""Headers of safetensors files, and the KV cache scales in a checkpoint's own files. No torch here.

Exporters write one number per layer and side. It is for E4M3, amax / 448, unless the config's
`kv_cache_scheme` names another format.
"""

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from kvbench.errors import Refused, UsageError
from kvbench.formats.kv import LARGEST, SMALLEST

SCHEME = "kv_cache_scheme"
UNUSABLE = "checkpoint_scale_unusable"
FETCH_AGAIN = "fetch the checkpoint again, or export it again"

# Prefixes of `layers.N.` in the language model. Layers under another prefix belong to another tower
# (vision_tower., draft.).
PREFIXES = ("", "model.", "language_model.model.", "model.language_model.")
# The names that are read: the layer, and k, v or both. `kv_scale` is one number for both sides.
_READ = re.compile(
    rf"(?:{'|'.join(map(re.escape, PREFIXES))})layers\.(0|[1-9][0-9]{{0,5}})\.self_attn\."
    r"(?:([kv])_proj\.(?:\2_scale|output_scale)|(?:attn\.)?(?:([kv])_scale|kv_scale))"
)
_IN_LAYERS = re.compile(r"(|.*?\.)layers\.[0-9]+\.")
# Every scale of a cache, read or not, and those of queries and probabilities.
_OF_CACHE = re.compile(r"(^|[._])(k|v|kv|q|prob|cache)_?((proj\.)?output_|cache_)?scale$|kv_cache")

# The names that `_READ` takes, after `self_attn.`, for messages.
_NAMES = "[kv]_proj.[kv]_scale, [kv]_proj.output_scale, [attn.][kv]_scale, [attn.]kv_scale"
# Scales of queries and of attention's probabilities, which are no part of a stored cache.
_OF_OTHERS = re.compile(r"(^|[._])(q|prob)_?((proj\.)?output_|cache_)?scale$")

# dtype of a scale -> its exact value from its bytes (little-endian).
_VALUE: dict[str, Callable[[bytes], float]] = {
    "F64": lambda raw: float(struct.unpack("<d", raw)[0]),
    "F32": lambda raw: float(struct.unpack("<f", raw)[0]),
    "F16": lambda raw: float(struct.unpack("<e", raw)[0]),
    "BF16": lambda raw: float(struct.unpack("<f", b"\0\0" + raw)[0]),
    "F8_E5M2": lambda raw: float(struct.unpack("<e", b"\0" + raw)[0]),
    "F8_E4M3": lambda raw: _e4m3(raw[0]),
    "F8_E8M0": lambda raw: math.nan if raw[0] == 255 else 2.0 ** (raw[0] - 127),
}

# Key of a scheme -> accepted values: a symmetric, static cache with one number per layer and side. None: an
# absent key.
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
# How the scales were found, and their dtype, which the files state.
_SCHEME_IGNORED = frozenset({"observer", "observer_kwargs", "scale_dtype", "zp_dtype"})
_OF_TYPE = {"float": "fp8_e4m3_static", "int": "int8_static"}

# The same for a quantization_config that quantizes the cache alone.
_CACHE_ONLY: dict[str, tuple[Any, ...]] = {
    "quant_method": ("compressed-tensors",),
    "config_groups": ({}, None),
    "sparsity_config": ({}, None),
    "transform_config": ({}, None),
}
_CACHE_ONLY_IGNORED = dict.fromkeys(
    (SCHEME, "format", "ignore", "quantization_status", "global_compression_ratio", "version")
)


@dataclass(frozen=True)
class Header:
    """One tensor: its dtype as safetensors writes it ("BF16"), and its bytes in `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    def content(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.start)
            return file.read(self.end - self.start)


def read_headers(files: Sequence[Path]) -> dict[str, Header]:
    """Tensors by name. Raises UsageError for an incomplete file."""
    found: dict[str, Header] = {}
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            try:
                header = json.loads(file.read(length) if length < size else b"")
                header.pop("__metadata__", None)
                for key, entry in header.items():
                    start, end = (8 + length + at for at in entry["data_offsets"])
                    found[key] = Header(entry["dtype"], tuple(entry["shape"]), path, start, end)
                last = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            except (ValueError, TypeError, KeyError, IndexError, AttributeError):
                last = -1
        if 8 + length + last != size:
            raise UsageError(f"{path} is not a complete safetensors file; {FETCH_AGAIN}.")
    return found


@dataclass(frozen=True)
class StoredScale:
    """The scale of one side of one layer. tensors: its names in the files; file: the file of the first."""

    value: float
    tensors: tuple[str, ...]
    file: str


Stored = Mapping[tuple[int, str], StoredScale]  # by layer and side, "k" or "v"


def of_cache(name: str) -> bool:
    """Whether a tensor is a scale of the cache and not of a weight."""
    return _OF_CACHE.search(name) is not None


def part_of(name: str) -> tuple[int, str] | None:
    """(layer, "k", "v" or "kv") of a tensor that is read as a scale, else None."""
    found = _READ.fullmatch(name)
    return (int(found[1]), found[2] or found[3] or "kv") if found else None


def of_other_tower(name: str) -> bool:
    """Whether a tensor belongs to layers outside the language model, by its prefix."""
    found = _IN_LAYERS.match(name)
    return found is not None and found[1] not in PREFIXES


def stored_scales(files: Sequence[Path], layers: int) -> dict[tuple[int, str], StoredScale]:
    """The scales in safetensors files for the first `layers` layers; those of other towers are ignored.

    Raises Refused for an unusable value, for two that differ, and for a K or V scale under an unknown name.
    """
    found: dict[tuple[int, str], StoredScale] = {}
    headers = read_headers(files)
    unread = [name for name in headers if of_cache(name) and not part_of(name)]
    if strange := sorted(n for n in unread if not (_OF_OTHERS.search(n) or of_other_tower(n))):
        more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
        raise Refused(
            UNUSABLE,
            f"The checkpoint holds {strange[0]} of {headers[strange[0]].file.name}{more}, which looks like "
            f"a KV cache scale but has none of the names that are read: layers.N.self_attn. with {_NAMES}. "
            "Rename it, or give scales in the matrix.",
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
                    f"The checkpoint holds two scales for {side.upper()} of layer {part[0]}: "
                    f"{before.tensors[0]} of {before.file} is {before.value:.6g}, {name} of "
                    f"{header.file.name} is {value:.6g}. Export it again.",
                )
            before = before or StoredScale(value, (), header.file.name)
            found[part[0], side] = replace(before, tensors=(*before.tensors, name))
    return found


def _value(name: str, header: Header) -> float:
    where = f"The tensor {name} of {header.file.name}"
    if header.dtype not in _VALUE:
        expected = f"expected one of {', '.join(_VALUE)}"
        raise Refused(UNUSABLE, f"{where} is {header.dtype}, {expected}; {FETCH_AGAIN}.")
    if prod(header.shape) != 1:
        raise Refused(
            UNUSABLE,
            f"{where} has shape {list(header.shape)}, expected one scale for all of K or V in a layer, not "
            "one per head or channel. Give scales in the matrix, or a file of kvbench calibrate.",
        )
    value = _VALUE[header.dtype](header.content())
    if SMALLEST <= value <= LARGEST:
        return value
    expected = "expected a finite number above 0"
    if math.isfinite(value) and value > 0:
        expected = f"expected a number that float32 holds, {SMALLEST:.3g} to {LARGEST:.3g}"
    elif value == -1:
        expected = f"which engines write for a scale that was never set, {expected}"
    again = "Export the checkpoint again, or give scales in the matrix."
    raise Refused(UNUSABLE, f"{where} holds {value:.6g}, {expected}. {again}")


def _e4m3(byte: int) -> float:
    sign, exponent, mantissa = (-1.0 if byte & 0x80 else 1.0), byte >> 3 & 0xF, byte & 0x7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def cache_only(config: Mapping[str, Any]) -> bool:
    """Whether a `quantization_config` quantizes only the cache, so that the weights are native."""
    if config.get(SCHEME) is None:
        return False
    if any(config.get(key) not in accepted for key, accepted in _CACHE_ONLY.items()):
        return False
    return all(value is None for key, value in config.items() if key not in _CACHE_ONLY | _CACHE_ONLY_IGNORED)


def check_scheme(config: Mapping[str, Any], fmt: str, name: str) -> None:
    """Raises Refused unless the checkpoint's scales, by its config.json, are for the KV format `fmt`."""
    quantization = config.get("quantization_config")
    scheme = quantization.get(SCHEME) if isinstance(quantization, Mapping) else None
    found, why = "fp8_e4m3_static", f"its config.json has no {SCHEME}, which means E4M3"
    if scheme is not None:
        _check_known(scheme, name)
        found, why = _OF_TYPE[scheme["type"]], f"the {SCHEME} in its config.json has type {scheme['type']}"
    if found != fmt:
        raise Refused(
            "scale_of_another_format",
            f"The scales of the checkpoint {name} are for {found} ({why}), and this cell stores {fmt}; use "
            f"kv_format: {found}, or run kvbench calibrate {name} OUT.json --format {fmt}.",
        )


def _check_known(scheme: Any, name: str) -> None:
    given: Mapping[str, Any] = {SCHEME: scheme}
    rules: dict[str, tuple[Any, ...]] = {SCHEME: ("a mapping",)}
    if isinstance(scheme, Mapping):
        unknown = [key for key in scheme if key not in {*_SCHEME, *_SCHEME_IGNORED}]
        given, rules = scheme, {**_SCHEME, **dict.fromkeys(unknown, (None,))}
    for key, accepted in rules.items():
        value = given.get(key)
        if any(value == one and type(value) is type(one) for one in accepted):
            continue
        expected = " or ".join("no value" if one is None else str(one) for one in accepted)
        raise Refused(
            "kv_cache_scheme_unsupported",
            f"The checkpoint {name} has {key}: {value!s:.80} in its {SCHEME}, expected {expected}: a "
            "symmetric, static 8-bit cache with one K and one V scale per layer. Give scales in the matrix, "
            "or a file of kvbench calibrate.",
        )
