"""What the paged attention kernels can do, and what they must know of a KV format. No torch, no triton."""

from __future__ import annotations

import os
from dataclasses import dataclass

PAGE_SIZES = (16, 32, 64)
HEAD_DIMS = range(16, 257, 16)
NO_GPU = "The Triton kernels need a CUDA device, and the cache is on {!r}; use torch."
DTYPES = ("float16", "bfloat16", "float32")
MAX_SPLITS = 256  # programs along a sequence of a decode
# What a matrix may ask of an FP8 linear layer's product (`kvbench_kernels.gemm.fp8_route` describes each).
GEMMS = ("auto", "reference", "w8a16", "w8a8")


@dataclass(frozen=True, eq=False)
class StoredFormat:
    """How a KV format lies in pages. There is one object per format, so two are equal only if they are the
    same.

    payload_dtype: "int8", "float8_e4m3fn", or None for the model's own dtype. scale_granularity: "none",
    "tensor" (one given scale for K and one for V) or "token-head" (one stored per token and KV head).
    scale_dtype: dtype name of a scale, or None. backends: whose code writes the format ("torch", "triton").
    Reading needs no code of its own: a value is code * scale.
    """

    name: str
    payload_dtype: str | None
    scale_granularity: str
    scale_dtype: str | None
    backends: tuple[str, ...]

    @property
    def quantized(self) -> bool:
        return self.payload_dtype is not None

    @property
    def scale_per_row(self) -> bool:
        return self.scale_granularity == "token-head"


@dataclass(frozen=True)
class Accepted:
    """The answer of `supports` where the kernels can do it."""


@dataclass(frozen=True)
class Rejected:
    """The answer where they cannot. reason: a stable word; sentence: the same for a person."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class AttentionNeeds:
    """What one attention layer asks of the kernels.

    dtype: of the queries ("float16", "bfloat16" or "float32"); native pages have it too. device: "cuda" or
    "cpu". interpreter: whether Triton's interpreter runs the kernels, which needs no GPU and measures no
    speed.
    """

    fmt: StoredFormat
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
    """Whether Triton's interpreter runs this process's kernels, by the variable that Triton reads."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


def supports(needs: AttentionNeeds) -> Accepted | Rejected:
    """Whether the kernels can write, decode and prefill this layer; if not, the first reason why."""
    if needs.device != "cuda" and not needs.interpreter:
        return Rejected("no_gpu", NO_GPU.format(needs.device))
    if "triton" not in needs.fmt.backends:
        return Rejected("kv_format", f"No Triton kernel writes KV format {needs.fmt.name!r}; use torch.")
    if needs.dtype not in DTYPES:
        return _rejected("dtype", "query dtype", needs.dtype, ", ".join(DTYPES))
    if needs.kv_heads < 1 or needs.q_heads < 1 or needs.q_heads % needs.kv_heads:
        return Rejected(
            "heads_do_not_divide",
            f"{needs.q_heads} query heads on {needs.kv_heads} KV heads: the query heads must be a multiple "
            "of the "
            f"KV heads; check the model's config.",
        )
    for name, dim in (("head_dim", needs.head_dim), ("value_dim", needs.value_dim)):
        if dim not in HEAD_DIMS:
            return _rejected(name, name, str(dim), "multiples of 16 from 16 to 256")
    if needs.page_size not in PAGE_SIZES:
        sizes = ", ".join(map(str, PAGE_SIZES))
        return _rejected("page_size", "page size", f"{needs.page_size} tokens", sizes)
    if needs.sliding_window is not None and needs.sliding_window < 1:
        return _rejected("sliding_window", "sliding window", f"{needs.sliding_window} tokens", "1 and more")
    if needs.softcap is not None and not needs.softcap > 0:
        return _rejected("softcap", "soft-cap", str(needs.softcap), "numbers above 0")
    return Accepted()


def _rejected(reason: str, what: str, value: str, accepted: str) -> Rejected:
    return Rejected(reason, f"The Triton kernels have no {what} {value}; they take {accepted}.")
