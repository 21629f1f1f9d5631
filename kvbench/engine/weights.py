"""What is known of a loaded model's weights: the format that they are in, where it came from, and which modules it is of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench_kernels.blockwise import BLOCK, quantize_blocks

CHECKPOINT, ON_LOAD, NATIVE = "checkpoint", "quantized on load", "native"


@dataclass(frozen=True)
class Sample:
    """What a block row of a module's weight must be, taken from its source and kept on the host.

    row: where the strip begins, a multiple of 128; codes [r, K], scales [1, ceil(K/128)], of the checkpoint, or of the
    reference quantizer on `native` [r, K], which is None for a checkpoint.
    """

    module: str
    row: int
    codes: Tensor
    scales: Tensor
    native: Tensor | None = None


@dataclass(frozen=True)
class WeightFacts:
    """format: a name of `kvbench.formats.WEIGHT_FORMATS`, as loaded. source: one of the three words above.

    modules: dotted names of the quantized linear layers, in the model's order. warnings: sentences for the report.
    scale_dtypes: dtype names of the scales as the checkpoint stores them, with how many tensors have each.
    samples: of the modules of the first, the middle and the last layer. checksums: of every module's codes and scales, as
    they were when they were made or read.
    load_seconds: from the call until the weights are on the device, by a monotonic clock.
    """

    format: str = "native"
    source: str = NATIVE
    modules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    scale_dtypes: Mapping[str, int] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    checksums: Mapping[str, int] = field(default_factory=dict)
    load_seconds: float = 0.0


def sampled(modules: Sequence[str]) -> frozenset[str]:
    """Those of the first, the middle and the last layer: of the numbers that the names hold first."""
    layer = {name: int(found[0]) for name in modules if (found := re.findall(r"\.(\d+)\.", name))}
    last = max(layer.values(), default=0)
    return frozenset(name for name, at in layer.items() if at in (0, last // 2, last))


def strips(rows: int) -> Iterator[slice]:
    """The first and the last block row of a weight with so many rows."""
    for start in sorted({0, (rows - 1) // BLOCK * BLOCK}):
        yield slice(start, min(start + BLOCK, rows))


def samples_of_native(module: str, weight: Tensor) -> Iterator[Sample]:
    """weight [N, K], before it is quantized."""
    for rows in strips(len(weight)):
        native = weight[rows].detach().cpu().clone()
        yield Sample(module, rows.start, *quantize_blocks(native), native)


def samples_of_checkpoint(module: str, codes: Tensor, scales: Tensor) -> Iterator[Sample]:
    """codes [N, K] and scales as the file holds them; scales of one byte, which are powers of two, as float32."""
    one_byte = scales.element_size() == 1
    held = scales.view(torch.float8_e8m0fnu).float() if one_byte else scales
    for rows in strips(len(codes)):
        first = rows.start // BLOCK
        yield Sample(module, rows.start, codes[rows].cpu().clone(), held[first : first + 1].cpu().clone())


def checksum(codes: Tensor, scales: Tensor) -> int:
    """One number of all bytes and their places: a change of any, or an exchange of two, gives another."""
    total = 0
    for tensor in (codes, scales):
        values = tensor.detach().contiguous().view(torch.uint8).flatten()
        words = F.pad(values, (0, -len(values) % 8)).view(torch.int64)
        places = torch.arange(1, len(words) + 1, device=words.device) * _ODD + 1
        total = (total * _ODD + int((words * places).sum())) % (1 << 63)
    return total


_ODD = 0x5851F42D4C957F2D  # of 64 bits; products wrap around
