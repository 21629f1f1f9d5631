"""Rows whose codes were worked out by hand: what holds the reference quantizers, by which stored data is judged, to their format."""

from __future__ import annotations

import torch

from kvbench_kernels.kv.quantize import QUANTIZE

# KV format -> (row, given scale or None, its codes, the scale that is stored or None).
# int8_sym: 3 / 127 = 0.0236220..., which lies between the FP16 numbers 0x260c and 0x260d and is rounded up.
# e4m3: 1.0625 and 19 are ties, which go to the even mantissa.
_KNOWN: dict[str, tuple[list[float], float | None, list[float], float | None]] = {
    "native": ([3.0, -3.0, 0.01, 2.0], None, [3.0, -3.0, 0.01, 2.0], None),
    "int8_sym": ([3.0, -3.0, 0.01, 2.0, 0.5, -1.75], None, [127, -127, 0, 85, 21, -74], 0.0236358642578125),
    "int8_static": ([1.25, 0.75, 100.0, -100.0, 0.2], 0.5, [2, 2, 127, -127, 0], None),
    "fp8_e4m3": ([448.0, -448.0, 1.0625, 19.0, 0.0], None, [448.0, -448.0, 1.0, 20.0, 0.0], 1.0),
    "fp8_e4m3_static": ([0.53125, 9.5, 300.0, -300.0], 0.5, [1.0, 20.0, 448.0, -448.0], None),
}


def reference_fault(fmt: str) -> str:
    """What the reference quantizer of a format gets wrong, or "". A format without a row here is not looked at."""
    if fmt not in _KNOWN:
        return ""
    row, given, codes, scale = _KNOWN[fmt]
    made = QUANTIZE[fmt](torch.tensor(row), None if given is None else torch.tensor(given))
    got, due = made.codes.double().tolist(), torch.tensor(codes).double().tolist()
    if got != due:
        return f"the reference quantizer of {fmt} gives codes {got} for {row}, due are {due}"
    stored = None if made.scales is None else made.scales.item()
    if stored != scale:
        return f"the reference quantizer of {fmt} gives scale {stored} for {row}, due is {scale}"
    return ""
