"""What is known of a loaded model's weights: their format, where it came from, and which modules have it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvbench_kernels.gemm.blockwise import BLOCK, dequantize_blocks, quantize_blocks

CHECKPOINT, ON_LOAD, NATIVE = "checkpoint", "quantized on load", "native"


@dataclass(frozen=True)
class Sample:
    """The expected values of one block row of a module's weight, on the host. row: its first row, a multiple
    of 128; codes [r, K] and scales [1, ceil(K/128)]: the checkpoint's, or the reference quantizer's on
    `native` [r, K]."""

    module: str
    row: int
    codes: Tensor
    scales: Tensor
    native: Tensor | None = None


@dataclass(frozen=True)
class WeightFacts:
    """format: a name of `kvbench.formats.kv.WEIGHT_FORMATS`, as loaded. source: one of the three words above.

    modules: names of the quantized linear layers, in the model's order. cache_scales: names of the KV cache
    scales in the files. stored: layers whose weight is FP8 by the files' headers. scale_dtypes: dtype in the
    files -> number of scales. samples: of the first, the middle and the last layer. checksums: of every
    module's codes and scales when they were made or read; native: of every other parameter. shares: of every
    module quantized on load, `share_of_bound`. load_seconds: until the weights are on the device."""

    format: str = "native"
    source: str = NATIVE
    modules: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    cache_scales: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    scale_dtypes: Mapping[str, int] = field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    checksums: Mapping[str, int] = field(default_factory=dict)
    native: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    load_seconds: float = 0.0


def sampled(modules: Sequence[str]) -> frozenset[str]:
    """The modules of the first, the middle and the last layer, by the first number in their names."""
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
    """codes [N, K] and scales as the file holds them; one-byte scales (powers of two) become float32."""
    one_byte = scales.element_size() == 1
    held = scales.view(torch.float8_e8m0fnu).float() if one_byte else scales
    for rows in strips(len(codes)):
        first = rows.start // BLOCK
        yield Sample(module, rows.start, codes[rows].cpu().clone(), held[first : first + 1].cpu().clone())


def checksum(*tensors: Tensor) -> int:
    """A number that changes with any byte, and when two bytes change places."""
    total = 0
    for tensor in tensors:
        values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK]
            words = F.pad(part, (0, -len(part) % 8)).view(torch.int64)
            places = torch.arange(1, len(words) + 1, device=words.device) * _ODD + 1
            total = (total * _ODD + int((words * places).sum())) % (1 << 63)
    return total


_ODD = 0x5851F42D4C957F2D  # of 64 bits; products wrap around
_CHUNK = 1 << 27  # bytes at a time: places take as much again


def native_checksums(model: nn.Module, converted: Iterable[str]) -> dict[str, int]:
    """Checksums of the parameters that are not the weights of the `converted` modules, by name."""
    stored = {f"{module}.{name}" for module in converted for name in ("weight", "weight_scale_inv")}
    return {name: checksum(p) for name, p in model.named_parameters() if name not in stored}


def share_of_bound(native: Tensor, codes: Tensor, scales: Tensor) -> float:
    """Worst distance of a dequantized value from the native weight [N, K], as a share of E4M3's rounding: a
    16th of the element, or half of the smallest step for the block's largest element."""
    worst = []
    for start in range(0, len(native), BLOCK):
        w = native[start : start + BLOCK].double()
        largest = torch.stack([part.abs().amax() for part in torch.split(w, BLOCK, 1)])
        step = (largest / 448).repeat_interleave(BLOCK)[: w.shape[1]]
        bound = torch.maximum(w.abs() / 16, step * 2.0**-10) * (1 + 1e-5)
        row = start // BLOCK
        off = (dequantize_blocks(codes[start : start + BLOCK], scales[row : row + 1]).double() - w).abs()
        worst.append((off / bound.clamp(min=1e-300)).max())
    return torch.stack(worst).max().nan_to_num(nan=torch.inf).item()
