"""The FP8 weight kernels on small shapes, with every kind of tiling, compared with the torch reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from kvbench_kernels.gemm import activation, blockwise, w8a8, w8a8_config, w8a16, w8a16_config
from kvbench_kernels.launches import record

Share = tuple[int, int]  # (i, n): every n-th case from the i-th on
Report = Callable[
    [str, Any, Any, float], int
]  # name, found, due, share of the largest that it may be off -> 1 if it is

# Rows of weights and columns: no whole blocks of 128, then whole ones, which the copy engine and Hopper's
# kernel take.
RAGGED, WHOLE = (200, 720), (256, 640)
LONG = (256, 1152)  # steps enough for two parts of a tile
W8A16 = (
    w8a16.Tiling("vector", 8, 512, warps=2),
    w8a16.Tiling("vector", 4, 256, splits=2, warps=2, stages=3, pdl=True),
    w8a16.Tiling("dot", 16, 128, warps=1, stages=4),
    w8a16.Tiling("dot", 64, 256, splits=2, stages=3, pdl=True),
    w8a16.Tiling("dot", 64, 128, splits=3, stages=4, swap=True),
    w8a16.Tiling("dot", 128, 128, stages=3, swap=True),
    w8a16.Tiling("dot", 64, 128, stages=3, swap=True, cvt=False),
)  # fmt: skip
W8A8 = (
    w8a8.Tiling(16, 64, splits=3, swap=True), w8a8.Tiling(32, 128, swap=True, tma=False),
    w8a8.Tiling(64, 64, swap=True, stages=6, pdl=False), w8a8.Tiling(64, 128, splits=2, tma=False),
    w8a8.Tiling(128, 128, warps=8, stages=3, registers=128), w8a8.Tiling(128, 256, warps=8, stages=3),
    w8a8.Tiling(64, 256, splits=2, stages=3), w8a8.Tiling(64, 64, stages=3, ctas=1, group=2),
)  # fmt: skip
SHARED_BYTES = 224 * 1024  # of a program on a Hopper GPU
OFF = 2e-2


def _operands(
    m: int, n: int, k: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [m, k], codes [n, k], scales, bias [n]."""
    x, w, bias = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    return x, *blockwise.quantize_blocks(w), bias


def _named(run: Callable[[], Tensor]) -> tuple[str, Tensor]:
    """(the kernel's name, its result)."""
    with record() as launches:
        found = run()
    return launches[-1].name, found


def quantizer(device: str, dtype: torch.dtype, report: Report, share: Share = (0, 1)) -> int:
    """Bytes and scales of the activation quantizer in every dtype, few elements a thread and many."""
    wrong = 0
    for m, k in ((1, 128), (3, 1168), (37, 640), (530, 4096))[share[0] :: share[1]]:
        if device != "cuda" and m * k > 2**15:
            continue  # the interpreter would take minutes
        for of_x in activation.DTYPES:
            x = torch.randn(m, k, device=device).to(of_x)
            found, due = activation.quantize_activation(x), blockwise.quantize_activation_torch(x)
            name = f"fp8_quantize_activation {m}x{k} {of_x}"
            wrong += report(f"{name} codes", found[0].view(torch.uint8), due[0].view(torch.uint8), 0)
            wrong += report(f"{name} scales", found[1], due[1], 0)
    return wrong


def few_rows(device: str, dtype: torch.dtype, report: Report, share: Share = (0, 1)) -> int:
    """Every kind of tiling on ragged and whole blocks; those that were measured at the rows that they are
    for.
    """
    kinds = [(t, m) for t in W8A16 for m in ((1, 3) if t.kind == "vector" else (5, 33, 100))]
    cases = [(*kind, *shape) for kind in kinds for shape in (RAGGED, WHOLE)]
    cases += [(t, m, *WHOLE) for (m, _, _), t in sorted(w8a16_config.MEASURED.items(), key=str)]
    wrong = 0
    for tiling, m, n, k in list(dict.fromkeys(cases))[share[0] :: share[1]]:
        if tiling.stages * tiling.block_k * (tiling.block_n + 2 * w8a16_config.rows_padded(m)) > SHARED_BYTES:
            continue  # made for fewer rows
        x, codes, scales, bias = _operands(m, n, k, device, dtype)
        name, found = _named(lambda: w8a16.w8a16(x, codes, scales, bias, tiling))  # noqa: B023
        due = blockwise.fp8_dequantize_matmul_torch(x.float(), codes, scales, bias.float())
        wrong += report(f"{name} {m} {n}x{k} {tiling}", found, due, OFF)
    return wrong


def many_rows(device: str, dtype: torch.dtype, report: Report, share: Share = (0, 1)) -> int:
    """As `few_rows`, of the portable kernel that quantizes x."""
    cases = [(t, m, *shape) for t in W8A8 for m in (1, 70, 200) for shape in (RAGGED, WHOLE)]
    cases += [(t, min(m, 200), *WHOLE) for (m, _, _), t in sorted(w8a8_config.MEASURED.items(), key=str)]
    wrong = 0
    for tiling, m, n, k in list(dict.fromkeys(cases))[share[0] :: share[1]]:
        x, codes, scales, bias = _operands(m, n, k, device, dtype)
        given = (*activation.quantize_activation(x), codes, scales)
        name, found = _named(lambda: w8a8.w8a8(*given, bias, dtype, tiling))  # noqa: B023
        due = w8a8.w8a8_torch(*given, bias.float(), torch.float32)
        wrong += report(f"{name} {m} {n}x{k} {tiling}", found, due, OFF)
    return wrong


def hopper(device: str, dtype: torch.dtype, report: Report, share: Share = (0, 1)) -> int:
    """Every kind of tiling of the Hopper kernel with two stages, with a bias and shared tiles or without, and
    those that were measured.
    """
    if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        return 0
    from kvbench_kernels.gemm import hopper_gemm, hopper_gemm_config

    wrong = 0
    cases: list[tuple[hopper_gemm.HopperTiling, bool]] = []
    for groups, parts, block_n in product((1, 2, 3), (1, 2), (64, 128)):
        tiling = hopper_gemm.HopperTiling(groups, parts, block_n, 2, splits=2)
        other = replace(tiling, splits=1, buffers=2, ctas=2 if groups == 1 else 1, turns=groups > 1)
        cases += [(t, t is tiling) for t in (tiling, other) if t.problem() is None]
    measured = {tiling for ranges in hopper_gemm_config.MEASURED.values() for _, tiling in ranges}
    cases += [(tiling, False) for tiling in sorted(measured, key=str)]
    n, k = LONG
    for tiling, biased in cases[share[0] :: share[1]]:
        for m in (1, 70, 300):
            x, codes, scales, bias = _operands(m, n, k, device, dtype)
            added = bias if biased else None
            given = (*activation.quantize_activation(x), codes, scales)
            name, found = _named(lambda: hopper_gemm.hopper_w8a8(*given, added, dtype, tiling=tiling))  # noqa: B023
            due = w8a8.w8a8_torch(*given, None if added is None else added.float(), torch.float32)
            wrong += report(f"{name} {m} {n}x{k} {tiling} bias {biased}", found, due, OFF)
    return wrong


def compiler(device: str, dtype: torch.dtype, report: Report, share: Share = (0, 1)) -> int:
    """Tickets of groups of warps without anything of ours around them: each program's threads note the same,
    all differ.
    """
    if device != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        return 0
    from benchmarks.sanitize_compiler import four_warps_and_one, groups_of_four_warps, no_roles

    wrong, programs = 0, 16
    for kernel, threads in (
        (no_roles, (128,)),
        (groups_of_four_warps, (128, 128)),
        (four_warps_and_one, (128, 32)),
    ):
        tickets = torch.zeros(2, dtype=torch.int32, device=device)
        taken = torch.full((programs, 2, 128), -1, dtype=torch.int32, device=device)
        kernel[(programs,)](tickets, taken, num_warps=4)
        for who, count in enumerate(threads):
            due = torch.arange(programs, device=device)[:, None].expand(programs, count)
            wrong += report(
                f"{kernel.fn.__name__}, group {who}", taken[:, who, :count].sort(dim=0).values, due, 0
            )
    return wrong


# What can be run by itself: (device, dtype of x, report, share) -> how many results were wrong.
PARTS: dict[str, Callable[[str, torch.dtype, Report, Share], int]] = {
    "quantizer": quantizer,
    "w8a16": few_rows,
    "w8a8": many_rows,
    "hopper_gemm": hopper,
    "compiler": compiler,
}
