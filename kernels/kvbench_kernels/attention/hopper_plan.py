"""When the Hopper decode kernel serves, and how a call is divided. Pure functions: no torch, no triton.

The numbers were measured on an H200 (132 SMs) with 32 query heads, 8 KV heads, head_dim 128 and page 16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench_kernels.support import MAX_SPLITS, Accepted, AttentionNeeds, Rejected, StoredFormat

# Partial results merged at a time, by warps a program. There are two levels of merging.
FAN = {1: 16, 2: 16, 4: 32}
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64)
MAX_GROUP = 16  # query heads a KV head: the rows of one tensor core tile

# `payload_dtype` -> the kernel's kind of payload.
KINDS = {None: "native", "int8": "int8", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Tiling:
    """How a program works: tokens a tile, tiles its ring holds, warps that share a tile."""

    tile: int
    stages: int
    warps: int


ONE_WARP = Tiling(32, 2, 1)
ONE_WARP_DEEP = Tiling(32, 3, 1)
TWO_WARPS = Tiling(64, 2, 2)
FOUR_WARPS = Tiling(64, 2, 4)
FOUR_WARPS_DEEP = Tiling(64, 3, 4)


@dataclass(frozen=True)
class Plan:
    """How a call is divided.

    splits: most programs along a sequence. least: fewest tokens a program takes, so that a short sequence
    uses fewer.
    """

    splits: int
    least: int = 1
    tiling: Tiling = ONE_WARP


def plan_decode(
    fmt: StoredFormat, batch: int, kv_heads: int, max_length: int, sms: int, mean_length: float | None = None
) -> Plan:
    """The division that was fastest. max_length, mean_length: tokens of the longest and the average sequence.

    All programs are resident at once where the sequences are alike (a second wave, if it is not full, costs
    as much as a full one). Little work is done by few programs of four warps, which hide latency within a
    tile; much work by many programs of one or two, which need little or no synchronization. Where the longest
    sequence is more than twice the average one, programs are smaller, so that the GPU's scheduler evens them
    out.
    """
    kind = KINDS[fmt.payload_dtype]
    mean = float(max_length if mean_length is None else mean_length)
    rows = max(1, batch * kv_heads)
    work = rows * mean
    if max_length > 2 * mean:
        least = max(128, round(work / (22 * sms)))
        wanted = math.ceil(max_length / (4 * least))
        return _plan(wanted, max_length, TWO_WARPS if kind == "int8" else ONE_WARP, least)
    if kind == "native":
        if rows <= 16 and work <= 600_000:
            return _plan(16 if max_length <= 4096 or rows > 8 else 32, max_length, FOUR_WARPS_DEEP)
        long = rows <= 32 and work > 600_000
        return _plan(round(2 * sms / rows), max_length, ONE_WARP_DEEP if long else ONE_WARP)
    few = rows <= 16 if kind == "fp8" else 2 * rows <= 3 * sms  # splitting E4M3 takes fewer instructions
    if few and work <= 1_100_000:
        return _plan(_four_warp_splits(3 * sms // rows, max_length), max_length, FOUR_WARPS)
    if work <= 400_000:
        return _plan(4 * sms // rows, max_length, ONE_WARP)
    if kind == "int8" or rows < 64 or 8 * sms // rows <= 2:
        return _plan(4 * sms // rows, max_length, TWO_WARPS)
    return _plan(8 * sms // rows, max_length, ONE_WARP)


def _four_warp_splits(wanted: int, max_length: int) -> int:
    """Two tiles a program where there are more than 16; a second level of merging only from four tiles a
    program on.
    """
    tiles = -(-max_length // FOUR_WARPS.tile)
    splits = min(wanted, max(16, tiles // 2))
    return FAN[4] if FAN[4] < splits and tiles < 4 * splits else splits


def _plan(splits: int, max_length: int, tiling: Tiling, least: int = 1) -> Plan:
    tiles = max(1, -(-max_length // tiling.tile))
    return Plan(max(1, min(splits, tiles, MAX_SPLITS)), least, tiling)


def execution(fmt: StoredFormat, dtype: str) -> str:
    """Dtype of the tensor cores' operands and of the accumulator, for a KV format and the dtype of native
    pages.
    """
    operand = "float16" if fmt.quantized else dtype
    return f"{operand} x {operand} -> float32"


def supports_hopper(needs: AttentionNeeds, capability: tuple[int, int]) -> Accepted | Rejected:
    """Whether paged_decode_hopper can do it; the first thing that it cannot do otherwise. paged_decode serves
    the rest.

    capability: the device's compute capability, (9, 0) for an H200.
    """
    if needs.device != "cuda" or needs.interpreter or capability[0] != 9:
        found = (
            f"compute capability {capability[0]}.{capability[1]}" if needs.device == "cuda" else needs.device
        )
        return Rejected(
            "no_hopper", f"The Hopper kernel needs a GPU of compute capability 9 and found {found}."
        )
    if needs.dtype not in ("float16", "bfloat16"):
        return Rejected(
            "dtype", f"The Hopper kernel rounds queries to 16 bits; {needs.dtype} queries need paged_decode."
        )
    if needs.kv_heads < 1 or needs.q_heads % needs.kv_heads or needs.q_heads // needs.kv_heads > MAX_GROUP:
        return Rejected(
            "heads_do_not_divide" if needs.kv_heads < 1 or needs.q_heads % needs.kv_heads else "group",
            f"{needs.q_heads} query heads on {needs.kv_heads} KV heads; the Hopper kernel takes 1 to "
            f"{MAX_GROUP} a KV head.",
        )
    if needs.head_dim not in HEAD_DIMS or needs.value_dim != needs.head_dim:
        return Rejected(
            "head_dim",
            f"head_dim {needs.head_dim} for K and {needs.value_dim} for V; the Hopper kernel takes 64 or "
            "128 for both.",
        )
    if needs.page_size not in PAGE_SIZES:
        return Rejected(
            "page_size", f"Pages of {needs.page_size} tokens; the Hopper kernel takes 16, 32 and 64."
        )
    for name, given in (
        ("sliding_window", needs.sliding_window is not None),
        ("softcap", needs.softcap is not None),
        ("sinks", needs.sinks),
    ):
        if given:
            return Rejected(name, f"The Hopper kernel has no {name}; paged_decode has.")
    return Accepted()
