"""Checks of a checkpoint without quantization in its config: no codes and no unread scale in its files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.engines.reference.weights.tensor_files import TensorFiles
from kvbench.errors import KvbenchError
from kvbench.formats.checkpoint_scales import of_cache, of_other_tower, part_of

# Last parts of the names of scales and of other tensors that belong to codes.
_SCALES = re.compile(
    r"(scale|scales|scale_inv|zero_point|zeros|qweight|qzeros|g_idx|absmax|quant_map|quant_state)(\.|$)"
    r"|_scale_inv$"
)


def check_plain(name: str, folder: Path, model: Any) -> None:
    """Raises KvbenchError for 8-bit codes, which transformers would cast without their scale."""
    own = {key: tensor.is_floating_point() for key, tensor in model.state_dict().items()}
    with TensorFiles(folder) as files:
        if found := files.fp8():
            raise KvbenchError(_coded(name, found[0], files.stored[found[0]].dtype))
        for key, stored in files.stored.items():
            # A file may leave out the prefix that the model has, or have one more.
            if stored.dtype[0] in "IU" and any(
                floating and (f".{k}".endswith(f".{key}") or f".{key}".endswith(f".{k}"))
                for k, floating in own.items()
            ):
                raise KvbenchError(_coded(name, key, stored.dtype))


def _coded(name: str, key: str, dtype: str) -> str:
    return (
        f"The checkpoint {name} holds {key} as {dtype}, but its config.json has no quantization_config that "
        "says with which scale. Give the FP8 checkpoint with its own config.json, or the unquantized one."
    )


def check_unread(name: str, keys: Iterable[object]) -> tuple[str, ...]:
    """A sentence on `keys`, the tensors that the model does not take. KV cache scales are left out: a cell
    may read them. KvbenchError for the scale of a weight, without which the weight is wrong."""
    unread = [key for key in sorted(map(str, keys)) if not of_cache(key)]
    if weights := [key for key in unread if _SCALES.search(key)]:
        raise KvbenchError(
            f"The checkpoint {name} holds {weights[0]}{_more(weights)}, which nothing reads: its "
            "config.json has no quantization_config that says what it scales. Give the checkpoint with its "
            "own config.json, or the unquantized one."
        )
    return (f"The model takes no {unread[0]}{_more(unread)} of the checkpoint's files.",) if unread else ()


def unread_cache_scales(keys: Iterable[str], layers: int) -> tuple[str, ...]:
    """Sentences on the cache scales that a cell does not read; layers: how many the model has."""
    why: dict[str, list[str]] = {}
    for key in sorted(keys):
        part = part_of(key)
        if of_other_tower(key):
            reason = "they are of other layers than the language model's."
        elif part is not None and part[0] >= layers:
            reason = f"the model has {layers} layers, and these are of later ones."
        else:
            reason = "a static KV format takes its scales from `scale`, and these with `scale: checkpoint`."
        why.setdefault(reason, []).append(key)
    return tuple(
        f"The checkpoint holds scales of a KV cache ({unread[0]}{_more(unread)}), which are not read: "
        f"{reason}"
        for reason, unread in why.items()
    )


def _more(keys: Sequence[str]) -> str:
    return f" and {len(keys) - 1} more" if len(keys) > 1 else ""
