"""Which layers the Hopper decode kernel takes, and how a call is divided. Imports no torch and no triton.

The numbers were measured on an H200 (132 SMs) with 32 query heads, 8 KV heads, head_dim 128 and page 16.
"""

import math
from dataclasses import dataclass

from kvbench_kernels.support import MAX_SPLITS, Accepted, AttentionNeeds, Rejected, StoredFormat

# Warps a program -> partial results merged at a time. There are two levels of merging.
FAN = {1: 16, 2: 16, 4: 32}
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64)
MAX_GROUP = 16  # query heads a KV head: the rows of one tensor core tile

# `payload_dtype` -> the kernel's kind of payload.
KINDS = {None: "native", "int8": "int8", "float8_e4m3fn": "fp8"}


@dataclass(frozen=True)
class Tiling:
    """A program's tokens a tile, tiles in its ring, and warps that share a tile."""

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
    """How a call is divided. splits: the most programs along a sequence; least: a program's fewest tokens."""

    splits: int
    least: int = 1
    tiling: Tiling = ONE_WARP


def plan_decode(
    fmt: StoredFormat, batch: int, kv_heads: int, max_length: int, sms: int, mean_length: float | None = None
) -> Plan:
    """The fastest division measured. max_length, mean_length: tokens of the longest and average sequence.

    For sequences of similar length all programs are resident at once (an incomplete second wave costs as
    much as a full one). Little work runs in few programs of four warps, which hide latency within a tile;
    much work in many programs of one or two, which synchronize less. If the longest sequence is over twice
    the average, programs are smaller, so that the GPU's scheduler balances them.
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
    """Two tiles a program above 16 tiles; a second level of merging only from four tiles a program on."""
    tiles = -(-max_length // FOUR_WARPS.tile)
    splits = min(wanted, max(16, tiles // 2))
    return FAN[4] if FAN[4] < splits and tiles < 4 * splits else splits


def _plan(splits: int, max_length: int, tiling: Tiling, least: int = 1) -> Plan:
    tiles = max(1, -(-max_length // tiling.tile))
    return Plan(max(1, min(splits, tiles, MAX_SPLITS)), least, tiling)


def execution(fmt: StoredFormat, dtype: str) -> str:
    """Operands and accumulator of the tensor cores; dtype: of native pages."""
    operand = "float16" if fmt.quantized else dtype
    return f"{operand} x {operand} -> float32"


def supports_hopper(needs: AttentionNeeds, capability: tuple[int, int]) -> Accepted | Rejected:
    """Whether paged_decode_hopper takes this layer at compute `capability`, (9, 0) for an H200."""
    no_group = needs.kv_heads < 1 or needs.q_heads % needs.kv_heads
    found = needs.device
    if found == "cuda":
        found = f"compute capability {capability[0]}.{capability[1]}"
    heads = f"{needs.q_heads} query heads on {needs.kv_heads} KV heads; it takes 1 to {MAX_GROUP} a KV head"
    dims = f"head_dim {needs.head_dim} for K and {needs.value_dim} for V; it takes 64 or 128 for both"
    for fits, reason, sentence in (
        (
            needs.device == "cuda" and not needs.interpreter and capability[0] == 9,
            "no_hopper",
            f"it needs a GPU of compute capability 9 and found {found}",
        ),
        (needs.dtype in ("float16", "bfloat16"), "dtype", f"{needs.dtype} queries; it takes 16 bits"),
        (not no_group, "heads_do_not_divide", heads),
        (no_group or needs.q_heads // needs.kv_heads <= MAX_GROUP, "group", heads),
        (needs.value_dim == needs.head_dim in HEAD_DIMS, "head_dim", dims),
        (needs.page_size in PAGE_SIZES, "page_size", f"pages of {needs.page_size}; it takes 16, 32 and 64"),
        (needs.sliding_window is None, "sliding_window", "it has no sliding_window"),
        (needs.softcap is None, "softcap", "it has no softcap"),
        (not needs.sinks, "sinks", "it has no sinks"),
    ):
        if not fits:
            return Rejected(reason, f"The Hopper kernel cannot do this layer: {sentence}. Use paged_decode.")
    return Accepted()
