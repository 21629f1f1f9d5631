"""What the kernels support, and how a KV format is stored. Imports neither torch nor triton."""

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
    """How a KV format lies in pages. Each format has one object, and two objects are never equal.

    payload_dtype: "int8", "float8_e4m3fn", or None for the model's dtype. scale_granularity: "none", "tensor"
    (one given scale each for K and V) or "token-head" (one stored per token and KV head). scale_dtype: dtype
    name of a scale, or None. backends: which ones write the format ("torch", "triton"); a value is code *
    scale, so all of them read it.
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
    """The kernels can do it."""


@dataclass(frozen=True)
class Rejected:
    """The kernels cannot do it. reason: a stable word; sentence: the explanation for a person."""

    reason: str
    sentence: str


@dataclass(frozen=True)
class AttentionNeeds:
    """What one attention layer needs.

    dtype: one of `DTYPES`, of the queries and of native pages. device: "cuda" or "cpu". interpreter: whether
    Triton's interpreter runs the kernels.
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
    """Whether Triton's interpreter runs the kernels of this process (TRITON_INTERPRET)."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


def supports(needs: AttentionNeeds) -> Accepted | Rejected:
    """Whether the kernels can write, decode and prefill this layer; if not, the first reason."""
    if needs.device != "cuda" and not needs.interpreter:
        return Rejected("no_gpu", NO_GPU.format(needs.device))
    if "triton" not in needs.fmt.backends:
        return Rejected("kv_format", f"No Triton kernel writes KV format {needs.fmt.name!r}; use torch.")
    if needs.dtype not in DTYPES:
        return _no("dtype", f"query dtype {needs.dtype}", ", ".join(DTYPES))
    if needs.kv_heads < 1 or needs.q_heads < 1 or needs.q_heads % needs.kv_heads:
        return Rejected(
            "heads_do_not_divide",
            f"{needs.q_heads} query heads on {needs.kv_heads} KV heads: the query heads must be a multiple "
            "of the KV heads; check the model's config.",
        )
    dims, window, cap = "multiples of 16 from 16 to 256", needs.sliding_window, needs.softcap
    for reason, found, fits, accepted in (
        ("head_dim", f"head_dim {needs.head_dim}", needs.head_dim in HEAD_DIMS, dims),
        ("value_dim", f"value_dim {needs.value_dim}", needs.value_dim in HEAD_DIMS, dims),
        ("page_size", f"page size {needs.page_size} tokens", needs.page_size in PAGE_SIZES, "16, 32, 64"),
        ("sliding_window", f"sliding window {window} tokens", window is None or window >= 1, "1 and more"),
        ("softcap", f"soft-cap {cap}", cap is None or cap > 0, "numbers above 0"),
    ):
        if not fits:
            return _no(reason, found, accepted)
    return Accepted()


def _no(reason: str, found: str, accepted: str) -> Rejected:
    return Rejected(reason, f"The Triton kernels have no {found}; they take {accepted}.")


def supports_product(
    name: str, m: int, n: int, k: int, dtype: str, dtypes: tuple[str, ...], rows: int, multiple: int
) -> Accepted | Rejected:
    """Whether the product `name` takes x [m, k] and a weight [n, k].

    dtypes: the accepted ones. rows: the largest m, 0 for any. multiple: what K must be a multiple of.
    """
    if dtype not in dtypes:
        return Rejected("dtype", f"dtype {dtype} has no {name} product; it takes {', '.join(dtypes)}.")
    if m < 1 or (rows and m > rows):
        return Rejected("rows", f"{m} rows of x are outside {f'1 to {rows}' if rows else '1 and more'}.")
    if n < 1 or k < 1 or k % multiple:
        return Rejected("shape", f"A weight of {n} x {k} does not fit: K must be a multiple of {multiple}.")
    return Accepted()
