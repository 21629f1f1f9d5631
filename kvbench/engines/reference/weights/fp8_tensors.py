"""The codes and scales of FP8 weights as a file holds them, checked: what is not a number, or not a scale, is
named."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.engines.reference.weights.tensor_files import TensorFiles
from kvbench.errors import KvbenchError
from kvbench.formats.fp8_checkpoint import E4M3, SCALE_DTYPES, Fp8Config
from kvbench_kernels.gemm.blockwise import BLOCK, scale_shape
from kvbench_kernels.kv.quantize import E4M3_MAX

_MAGNITUDE = 0x7F  # all bits but the sign; all of them set is the NaN


def read_codes(name: str, files: TensorFiles, key: str, shape: tuple[int, ...]) -> Tensor:
    """The codes of a weight [N, K], float8_e4m3fn. Raises KvbenchError for another dtype or shape, or a code
    that is NaN."""
    stored = files.stored[key]
    if stored.dtype != E4M3:
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} is {stored.dtype}; of the 8-bit floats only {E4M3} "
            "is read. Export the checkpoint again, in E4M3FN."
        )
    if stored.shape != shape:
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} has shape {list(stored.shape)}, the model wants "
            f"{list(shape)}. Correct config.json, or fetch the checkpoint again."
        )
    codes = files.read(key)
    broken = (codes.view(torch.uint8) & _MAGNITUDE) == _MAGNITUDE
    if broken.any():
        at = broken.nonzero()[0].tolist()
        byte = int(codes.view(torch.uint8)[tuple(at)])
        raise KvbenchError(
            f"The tensor {key} of the checkpoint {name} holds nan at index {at} (the byte 0x{byte:02X}, in "
            "E4M3 an overflow when it was exported); no result on such weights means anything. Fetch the "
            "checkpoint again, or export it again."
        )
    return codes


def read_scales(name: str, files: TensorFiles, key: str, codes: Tensor, fp8: Fp8Config) -> tuple[Tensor, str]:
    """(scales of `codes`, dtype name in the file): float32, bfloat16 and float16 as stored, powers of two as
    float32. Raises KvbenchError naming key and index for another shape or dtype, or a scale that is none:
    NaN, infinite, negative, 0 over codes that are not, or so large that a code times it is no float32."""
    stored, wanted = files.stored[key], scale_shape(*codes.shape)
    if stored.shape != wanted:
        raise KvbenchError(
            f"The scales {key} of the checkpoint {name} have shape {list(stored.shape)}; a weight "
            f"{list(codes.shape)} in {BLOCK}x{BLOCK} blocks has scales {list(wanted)}. Export the "
            "checkpoint again."
        )
    scales = files.read(key)
    if fp8.ue8m0 and scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    dtype = str(scales.dtype).removeprefix("torch.")
    if scales.dtype == torch.float8_e8m0fnu:
        scales = scales.float()
    elif dtype not in SCALE_DTYPES.values():
        accepted = ", ".join([*SCALE_DTYPES.values(), "float8_e8m0fnu"])
        raise KvbenchError(
            f"The scales {key} of the checkpoint {name} are {dtype}; accepted are {accepted}. Export the "
            "checkpoint again."
        )
    _check_scales(name, key, codes, scales, fp8)
    return scales, dtype


def _check_scales(name: str, key: str, codes: Tensor, scales: Tensor, fp8: Fp8Config) -> None:
    values = scales.float()
    wrong, why = ~values.isfinite() | (values < 0), "a scale is a finite number above 0"
    if not wrong.any():
        wrong, why = ~(values * E4M3_MAX).isfinite(), "times 448, the largest code, it overflows float32"
    if not wrong.any() and (values == 0).any():
        wrong, why = _zero_over_codes(codes, values), "the codes of that block are not all 0"
    if not wrong.any() and fp8.ue8m0:
        wrong, why = torch.frexp(values).mantissa != 0.5, "scale_fmt ue8m0 says powers of two"
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise KvbenchError(
            f"The scales {key} of the checkpoint {name} hold {values[tuple(at)].item()} at index {at}; "
            f"{why}. Export the checkpoint again."
        )


def _zero_over_codes(codes: Tensor, values: Tensor) -> Tensor:
    """Whether a block's scale is 0 and a code of it is not: bool, in the scales' shape."""
    wrong = values == 0
    for row, column in wrong.nonzero().tolist():
        block = codes[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
        wrong[row, column] = bool((block.view(torch.uint8) & _MAGNITUDE).any())
    return wrong
