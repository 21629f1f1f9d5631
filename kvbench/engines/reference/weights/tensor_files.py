"""The tensors of a model folder's safetensors files, and the checks that all of them are read as meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from kvbench.errors import KvbenchError
from kvbench.formats.checkpoint_scales import of_cache, of_other_tower, part_of
from kvbench.models.source import weight_files


@dataclass(frozen=True)
class Stored:
    """A tensor as the file's header describes it; `file` is open while its `TensorFiles` is."""

    file: Any
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """Use it in a `with`. Tensors are read one by one; on a CPU they are views of the mapped file."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self._folder, self._device = folder, device
        self._stack = ExitStack()
        self.stored: dict[str, Stored] = {}

    def __enter__(self) -> TensorFiles:
        with self._stack:  # closes what is open when a later file cannot be read
            for path in weight_files(self._folder):
                file = self._stack.enter_context(safe_open(path, framework="pt", device=self._device))
                for key in file.keys():  # noqa: SIM118 (no mapping, only this method)
                    if key in self.stored:
                        raise KvbenchError(
                            f"Two files of {self._folder} hold the tensor {key}; fetch the checkpoint again."
                        )
                    part = file.get_slice(key)
                    self.stored[key] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def ignore(self, patterns: list[str]) -> None:
        """Drop the tensors whose names match a pattern."""
        self.stored = {k: s for k, s in self.stored.items() if not any(re.search(p, k) for p in patterns)}

    def read(self, key: str) -> Tensor:
        tensor: Tensor = self.stored[key].file.get_tensor(key)
        return tensor

    def fp8(self) -> list[str]:
        """Names of the tensors that are 8-bit floats of any kind, block scales of one byte aside."""
        return [k for k, s in self.stored.items() if s.dtype.startswith("F8") and s.dtype != "F8_E8M0"]


def check_finite(name: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises KvbenchError for a weight that is NaN or infinite, naming tensor and index."""
    for key, tensor in tensors:
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if all(bound.isfinite() for bound in tensor.aminmax()):  # no mask as large as the tensor
            continue
        at = (~tensor.isfinite()).nonzero()[0].tolist()
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} holds {tensor[tuple(at)].item()} at index {at}; no "
            "result on such weights means anything. Fetch the checkpoint again, or export it again."
        )


# Last parts of the names of scales and of other tensors that belong to codes.
_SCALES = re.compile(
    r"(scale|scales|scale_inv|zero_point|zeros|qweight|qzeros|g_idx|absmax|quant_map|quant_state)(\.|$)"
    r"|_scale_inv$"
)


def check_plain(name: str, folder: Path, model: Any) -> None:
    """KvbenchError for codes in a checkpoint whose config names no quantization: no scale would be read."""
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
