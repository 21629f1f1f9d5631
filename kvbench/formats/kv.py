"""KV and weight formats: frozen descriptors and exact byte formulas. No torch here.

A descriptor is the one place that says what a format stores. A KV format whose payload is in `PAYLOADS` takes
one entry in `KV_FORMATS` and one line in the table `kvbench_kernels.kv.quantize.QUANTIZE`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import UsageError
from kvbench_kernels.support import StoredFormat

DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}

# The range of float32, in which static scales are kept: its smallest subnormal and its largest number.
SMALLEST, LARGEST = 2.0**-149, (2 - 2.0**-23) * 2.0**127

SIDES = ("k", "v")  # what a cache holds of a token


@dataclass(frozen=True)
class Payload:
    """The codes of an 8-bit dtype and the error of a stored element that is not clipped.

    qmax: largest magnitude of a code; codes are from -qmax to qmax. The error is at most the larger of
    `of_element` times the element and `of_scale` times the scale; bound: the same for a person.
    """

    qmax: float
    of_element: float
    of_scale: float
    bound: str


PAYLOADS: dict[str, Payload] = {
    "int8": Payload(127.0, 0.0, 0.5, "half its scale"),
    "float8_e4m3fn": Payload(448.0, 2.0**-4, 2.0**-10, "1/16 of the element, or scale / 1024"),
}


@dataclass(frozen=True)
class KnownRow:
    """A row quantized by hand, for the reference quantizer. given: the static scale; scale: stored."""

    values: tuple[float, ...]
    codes: tuple[float, ...]
    given: float | None = None
    scale: float | None = None


@dataclass(frozen=True, eq=False)
class KVFormat(StoredFormat):
    """How one element of K or V is stored. No field has a default: a new format must state each.

    scale_margin: how many times amax / qmax a stored scale per row may be, before it is rounded up.
    """

    scale_margin: float | None
    known_row: KnownRow
    summary: str

    def __post_init__(self) -> None:
        row, quantized, per_row = self.known_row, self.quantized, self.scale_per_row
        paired = 0 < len(row.values) == len(row.codes) and (row.scale is not None) == per_row
        needs = {
            "a payload of PAYLOADS": self.payload_dtype in (None, *PAYLOADS),
            "a scale granularity of SCALE_KINDS": self.scale_granularity in SCALE_KINDS,
            "scales exactly where the payload is quantized": quantized == (self.scale_kind != "none"),
            "a scale dtype of DTYPE_BYTES where there are scales": (self.scale_dtype in DTYPE_BYTES)
            == quantized,
            "a scale margin where a scale is stored per row": (self.scale_margin is not None) == per_row,
            "a known row with one code per value and a scale of its kind": paired
            and (row.given is not None) == (self.scale_kind == "static"),
            "backend torch, which can always write it": "torch" in self.backends,
        }
        if wrong := [text for text, holds in needs.items() if not holds]:
            raise ValueError(f"The descriptor of KV format {self.name!r} needs {'; '.join(wrong)}.")

    @property
    def scale_kind(self) -> str:
        """ "none", "static" (given in the matrix) or "dynamic" (computed when a token is written)."""
        return SCALE_KINDS.get(self.scale_granularity, self.scale_granularity)

    @property
    def payload(self) -> Payload | None:
        """What is known of the codes, or None where values are stored as they are."""
        return PAYLOADS[self.payload_dtype] if self.payload_dtype else None

    @property
    def qmax(self) -> float | None:
        """Largest magnitude of a code (127 for int8, 448 for e4m3), or None."""
        return self.payload.qmax if self.payload else None

    @property
    def scale_bytes(self) -> int:
        """Bytes of one stored scale (0 when the format stores none)."""
        return DTYPE_BYTES[self.scale_dtype] if self.scale_dtype else 0


# Scale granularity -> scale kind.
SCALE_KINDS = {"none": "none", "tensor": "static", "token-head": "dynamic"}
_BOTH = ("torch", "triton")

KV_FORMATS: dict[str, KVFormat] = {
    f.name: f
    for f in (
        KVFormat(
            "native", None, "none", None, _BOTH, None,
            KnownRow((3.0, -3.0, 0.01, 2.0), (3.0, -3.0, 0.01, 2.0)),
            "the model's own dtype, unchanged",
        ),
        KVFormat(
            "int8_sym", "int8", "token-head", "float16", _BOTH, 1 + 2.0**-10,
            # 3 / 127 = 0.0236220... is between the FP16 numbers 0x260c and 0x260d and is rounded up.
            KnownRow((3.0, -3.0, 0.01, 2.0, 0.5, -1.75), (127, -127, 0, 85, 21, -74),
                     scale=0.0236358642578125),
            "symmetric INT8, one FP16 scale a token and KV head, rounded up",
        ),
        KVFormat(
            "int8_static", "int8", "tensor", "float32", _BOTH, None,
            KnownRow((1.25, 0.75, 100.0, -100.0, 0.2), (2, 2, 127, -127, 0), given=0.5),
            "symmetric INT8, one given scale for K and one for V a layer",
        ),
        KVFormat(
            "fp8_e4m3", "float8_e4m3fn", "token-head", "float32", _BOTH, 1.0,
            # 1.0625 and 19 are ties; they go to the even mantissa, here and in the next format.
            KnownRow((448.0, -448.0, 1.0625, 19.0, 0.0), (448.0, -448.0, 1.0, 20.0, 0.0), scale=1.0),
            "FP8 E4M3FN, one F32 scale a token and KV head",
        ),
        KVFormat(
            "fp8_e4m3_static", "float8_e4m3fn", "tensor", "float32", _BOTH, None,
            KnownRow((0.53125, 9.5, 300.0, -300.0), (1.0, 20.0, 448.0, -448.0), given=0.5),
            "FP8 E4M3FN, one given scale for K and one for V a layer",
        ),
    )
}  # fmt: skip


def error_bound(payload_dtype: str | None) -> str:
    """The largest error of a stored element that is not clipped, for a person."""
    return PAYLOADS[payload_dtype].bound if payload_dtype else "none"


@dataclass(frozen=True)
class WeightFormat:
    """How the weight [N, K] of a linear layer is stored. payload_dtype: None for the engine's own dtype;
    scale_dtype: of the scales that quantizing makes; block: rows and columns that share a scale.
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
class StoredBytes:
    """Bytes of a layer's KV storage or of a weight, split as they are reported. All integers."""

    payload: int
    scales: int

    @property
    def total(self) -> int:
        return self.payload + self.scales


def weight_bytes(
    fmt: WeightFormat, n: int, k: int, native_dtype: str, scale_dtype: str = "float32"
) -> StoredBytes:
    """Exact bytes of a weight [n, k]; a block that a dimension cuts costs a whole scale."""
    payload = n * k * DTYPE_BYTES[fmt.payload_dtype or native_dtype]
    if fmt.block is None:
        return StoredBytes(payload, 0)
    rows, columns = fmt.block
    return StoredBytes(payload, -(-n // rows) * -(-k // columns) * DTYPE_BYTES[scale_dtype])


@dataclass(frozen=True)
class KVShape:
    """What one layer's K and V look like: `kv_heads` heads of `head_dim` (K) and `value_dim` (V) elements."""

    kv_heads: int
    head_dim: int
    value_dim: int


def kv_bytes(fmt: KVFormat, shape: KVShape, tokens: int, native_dtype: str) -> StoredBytes:
    """Exact bytes of `tokens` token slots of one layer; a per-tensor scale is two elements a layer."""
    elements = tokens * shape.kv_heads * (shape.head_dim + shape.value_dim)
    scales = 2 * tokens * shape.kv_heads if fmt.scale_per_row else 2
    return StoredBytes(elements * DTYPE_BYTES[fmt.payload_dtype or native_dtype], scales * fmt.scale_bytes)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens: ceil(tokens / page_size); 0 tokens need 0 pages."""
    return -(-tokens // page_size)


def page_bytes(fmt: KVFormat, shape: KVShape, page_size: int, native_dtype: str) -> int:
    """Bytes that belong to one page of one layer: payload, and scales a token (no per-tensor scale)."""
    empty, one = (kv_bytes(fmt, shape, tokens, native_dtype).total for tokens in (0, page_size))
    return one - empty


def get_max_kv_blocks(
    budget_bytes: int, fmt: KVFormat, shapes: Sequence[KVShape], page_size: int, native_dtype: str
) -> int:
    """Pages that a budget holds, in all layers and with every scale counted. shapes: one a layer. Raises
    UsageError for a model without layers, a page without tokens or an unknown dtype.
    """
    if not shapes or page_size < 1:
        raise UsageError(
            f"Pages of {page_size} tokens in {len(shapes)} layers take no bytes, so no budget says how many "
            "there are; both must be at least 1."
        )
    if native_dtype not in DTYPE_BYTES:
        raise UsageError(f"dtype {native_dtype!r} is unknown; choose one of {', '.join(DTYPE_BYTES)}.")
    fixed = sum(kv_bytes(fmt, shape, 0, native_dtype).total for shape in shapes)
    page = sum(page_bytes(fmt, shape, page_size, native_dtype) for shape in shapes)
    return max((budget_bytes - fixed) // page, 0)
