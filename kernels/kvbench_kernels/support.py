"""What the paged attention kernels can do, as a question that is answered with a reason. No torch, no triton."""

from __future__ import annotations

import os
from dataclasses import dataclass

KV_FORMATS = ("native", "int8_sym", "int8_static", "fp8_e4m3", "fp8_e4m3_static")
PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = range(16, 257, 16)
NO_GPU = "The Triton kernels need a CUDA device, and the cache is on {!r}; use torch."
DTYPES = ("float16", "bfloat16", "float32")
MAX_SPLITS = 256  # programs along a sequence of a decode
# What a matrix may ask of an FP8 linear layer's product (`kvbench_kernels.gemm.fp8_route` says what each is).
GEMMS = ("auto", "reference", "w8a16", "w8a8")


@dataclass(frozen=True)
class Accepted:
    """`supports(...)` said yes."""


@dataclass(frozen=True)
class Rejected:
    """`supports(...)` said no. `reason` is a stable word, `sentence` tells a person why."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class AttentionNeeds:
    """What one attention layer asks of the kernels.

    dtype: of the queries ("float16", "bfloat16" or "float32"), which native pages have too. device: "cuda" or "cpu".
    interpreter: whether Triton's interpreter runs the kernels, which needs no GPU and is no measure of speed.
    """

    kv_format: str
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    dtype: str
    device: str
    interpreter: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False


def interpreting() -> bool:
    """Whether this process was told to run Triton kernels in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in (
        "1",
        "true",
        "on",
        "y",
        "yes",
    )  # as Triton reads it


def supports(needs: AttentionNeeds) -> Accepted | Rejected:
    """Whether paged_decode and paged_prefill can do it; the first thing that they cannot do otherwise."""
    if needs.device != "cuda" and not needs.interpreter:
        return Rejected("no_gpu", NO_GPU.format(needs.device))
    if needs.kv_format not in KV_FORMATS:
        return _rejected("kv_format", "KV format", repr(needs.kv_format), ", ".join(KV_FORMATS))
    if needs.dtype not in DTYPES:
        return _rejected("dtype", "query dtype", needs.dtype, ", ".join(DTYPES))
    if needs.kv_heads < 1 or needs.q_heads < 1 or needs.q_heads % needs.kv_heads:
        return Rejected(
            "heads_do_not_divide",
            f"{needs.q_heads} query heads on {needs.kv_heads} KV heads: the query heads must be a multiple of the "
            f"KV heads; check the model's config.",
        )
    for name, dim in (("head_dim", needs.head_dim), ("value_dim", needs.value_dim)):
        if dim not in HEAD_DIMS:
            return _rejected(name, name, str(dim), "multiples of 16 from 16 to 256")
    if needs.page_size not in PAGE_SIZES:
        return _rejected(
            "page_size", "page size", f"{needs.page_size} tokens", ", ".join(map(str, PAGE_SIZES))
        )
    if needs.sliding_window is not None and needs.sliding_window < 1:
        return _rejected("sliding_window", "sliding window", f"{needs.sliding_window} tokens", "1 and more")
    if needs.softcap is not None and not needs.softcap > 0:
        return _rejected("softcap", "soft-cap", str(needs.softcap), "numbers above 0")
    return Accepted()


def _rejected(reason: str, what: str, value: str, accepted: str) -> Rejected:
    return Rejected(reason, f"The Triton kernels have no {what} {value}; they take {accepted}.")
