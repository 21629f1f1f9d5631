"""KV and weight formats: frozen descriptors and exact byte formulas. No torch here.

A format says how values are stored: payload element, scale kind (static or dynamic), scale granularity (one a
tensor, or one a token and KV head) and scale element. Everything that must be counted is counted from these
descriptors; the engine's live tensors must come out at exactly the same number of bytes.

Adding a format starts with an entry in `KV_FORMATS`; docs/extending.md has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import UsageError

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}

# What float32, in which static scales are kept, holds: its smallest subnormal and its largest number.
SMALLEST, LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127

SIDES = ("k", "v")  # what a cache holds of a token


@dataclass(frozen=True)
class KVFormat:
    """How one element of K or V is stored.

    payload_dtype: storage dtype name, or None for the model's own dtype (`native`).
    scale_kind: "none", "static" (given in the matrix) or "dynamic" (computed when written).
    scale_granularity: "none", "tensor" (one scale for K and one for V in a layer) or "token-head".
    scale_dtype: dtype name of a stored scale, or None.
    qmax: largest magnitude of a code (127 for int8, 448 for e4m3), or None.
    """

    name: str
    payload_dtype: str | None
    scale_kind: str
    scale_granularity: str
    scale_dtype: str | None
    qmax: float | None
    summary: str

    @property
    def quantized(self) -> bool:
        return self.payload_dtype is not None

    def payload_bytes(self, native_dtype: str) -> int:
        """Bytes of one stored element; `native_dtype` is the model's dtype name."""
        return DTYPE_BYTES[self.payload_dtype or native_dtype]

    @property
    def scale_bytes(self) -> int:
        """Bytes of one stored scale (0 when the format stores none)."""
        return DTYPE_BYTES[self.scale_dtype] if self.scale_dtype else 0


KV_FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat("native", None, "none", "none", None, None, "the model's own dtype, unchanged"),
        KVFormat("int8_sym", "int8", "dynamic", "token-head", "float16", 127.0,
                 "symmetric INT8, one FP16 scale a token and KV head, rounded up"),
        KVFormat("int8_static", "int8", "static", "tensor", "float32", 127.0,
                 "symmetric INT8, one given scale for K and one for V a layer"),
        KVFormat("fp8_e4m3", "float8_e4m3fn", "dynamic", "token-head", "float32", 448.0,
                 "FP8 E4M3FN, one F32 scale a token and KV head"),
        KVFormat("fp8_e4m3_static", "float8_e4m3fn", "static", "tensor", "float32", 448.0,
                 "FP8 E4M3FN, one given scale for K and one for V a layer"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class WeightFormat:
    """How the weight [N, K] of a linear layer is stored; norms, embeddings and biases keep the engine's dtype.

    payload_dtype: storage dtype name, or None for the engine's own dtype (`native`). scale_dtype: dtype name of the
    scales that quantizing makes (a checkpoint may store narrower ones), or None. block: rows and columns that share a
    scale, or None.
    """

    name: str
    payload_dtype: str | None
    scale_dtype: str | None
    block: tuple[int, int] | None
    summary: str

    @property
    def quantized(self) -> bool:
        return self.payload_dtype is not None


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat("native", None, None, None, "the checkpoint's own dtype, cast to the engine's dtype"),
        WeightFormat("fp8_block128", "float8_e4m3fn", "float32", (128, 128),
                     "FP8 E4M3FN with one F32 scale a 128x128 block"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of one linear layer's weight. All integers."""

    payload: int
    scales: int

    @property
    def total(self) -> int:
        return self.payload + self.scales


def weight_bytes(
    fmt: WeightFormat, n: int, k: int, native_dtype: str, scale_dtype: str = "float32"
) -> WeightBytes:
    """Exact bytes of a weight [n, k]. A block at the end of a dimension costs a whole scale, however small it is.

    scale_dtype: dtype name of the stored scales; a checkpoint may hold bfloat16 or float16 ones.
    """
    payload = n * k * DTYPE_BYTES[fmt.payload_dtype or native_dtype]
    if fmt.block is None:
        return WeightBytes(payload, 0)
    rows, columns = fmt.block
    return WeightBytes(payload, -(-n // rows) * -(-k // columns) * DTYPE_BYTES[scale_dtype])


@dataclass(frozen=True)
class KVShape:
    """What one layer's K and V look like: `kv_heads` heads of `head_dim` (K) and `value_dim` (V) elements."""

    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class KVBytes:
    """Bytes of a layer's KV storage, split the way they are reported. All integers."""

    payload: int
    scales: int

    @property
    def total(self) -> int:
        return self.payload + self.scales


def kv_bytes(fmt: KVFormat, shape: KVShape, tokens: int, native_dtype: str) -> KVBytes:
    """Exact bytes of `tokens` token slots of one layer (K and V together).

    For one page of 16 tokens, 8 heads of 128: int8_sym 33,280 B against 65,536 B native 16-bit (0.5078125).
    A per-tensor scale costs two scale elements a layer, however many tokens there are.
    """
    elements = tokens * shape.kv_heads * (shape.head_dim + shape.value_dim)
    if fmt.scale_granularity == "token-head":
        scales = 2 * tokens * shape.kv_heads * fmt.scale_bytes
    elif fmt.scale_granularity == "tensor":
        scales = 2 * fmt.scale_bytes
    else:
        scales = 0
    return KVBytes(elements * fmt.payload_bytes(native_dtype), scales)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens: ceil(tokens / page_size); 0 tokens need 0 pages."""
    return -(-tokens // page_size)


def page_bytes(fmt: KVFormat, shape: KVShape, page_size: int, native_dtype: str) -> int:
    """Bytes that belong to one page of one layer: payload, and scales a token; a per-tensor scale is no page's."""
    empty, one = (kv_bytes(fmt, shape, tokens, native_dtype).total for tokens in (0, page_size))
    return one - empty


def get_max_kv_blocks(
    budget_bytes: int, fmt: KVFormat, shapes: Sequence[KVShape], page_size: int, native_dtype: str
) -> int:
    """Pages that a budget holds, in all layers and with every scale counted; 0 when not one fits.

    shapes: one a layer. Raises UsageError for a model without layers, a page without tokens or an unknown dtype.
    """
    if not shapes or page_size < 1:
        raise UsageError(
            f"Pages of {page_size} tokens in {len(shapes)} layers take no bytes, so no budget says how many there are; "
            "both must be at least 1."
        )
    if native_dtype not in DTYPE_BYTES:
        raise UsageError(f"dtype {native_dtype!r} is unknown; choose one of {', '.join(DTYPE_BYTES)}.")
    fixed = sum(kv_bytes(fmt, shape, 0, native_dtype).total for shape in shapes)
    page = sum(page_bytes(fmt, shape, page_size, native_dtype) for shape in shapes)
    return max((budget_bytes - fixed) // page, 0)
