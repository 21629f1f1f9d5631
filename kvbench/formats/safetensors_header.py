"""Headers of safetensors files, and the bytes of one of their tensors. No torch: `plan` reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UsageError

FETCH_AGAIN = "fetch the checkpoint again, or export it again"


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
