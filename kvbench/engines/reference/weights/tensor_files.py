"""The tensors of a model folder's safetensors files: dtype and shape from the headers, values on request."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from kvbench.errors import KvbenchError
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
