"""Decode through the store against an oracle on tensors, and many decode steps without a model.

The oracle quantizes the *original* K/V, dequantizes in float64 and attends by plain einsum. A store that
loses a scale, a page or a head therefore differs from it, and so does an attention that reads the wrong one.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvbench.engines.reference.attention import Chunk, Mask
from kvbench.engines.reference.backends import TORCH, Backend
from kvbench.engines.reference.engine import static_scales, store_format
from kvbench.engines.reference.kv.layer import dtype_name
from kvbench.engines.reference.kv.store import PagedKVStore
from kvbench.evidence.attention_values import TOLERANCE, element_error
from kvbench.formats.kv import KV_FORMATS, SIDES, KVFormat, KVShape, pages_for
from kvbench.runners.context import Context, Measurement
from kvbench_kernels.kv.quantize import QUANTIZE

# The model-free run is small, so that thousands of steps over a growing context take seconds.
STEP_HEADS, STEP_SHAPE, STEP_VOCAB = 4, KVShape(2, 64, 64), 256
BUCKETS = 128


@dataclass(frozen=True)
class Geometry:
    name: str
    q_heads: int
    shape: KVShape


GEOMETRIES = (Geometry("mha", 4, KVShape(4, 64, 64)), Geometry("gqa", 8, KVShape(2, 64, 64)))
VARIANTS = ("plain", "zero-rows", "strided")


@dataclass(frozen=True)
class Case:
    """variant: "zero-rows": a token's K and V are all zero; "strided": K, V and Q are views."""

    geometry: Geometry
    dtype: torch.dtype
    length: int
    variant: str

    @property
    def name(self) -> str:
        return f"{self.geometry.name} {dtype_name(self.dtype)} L{self.length} {self.variant}"


def run(ctx: Context) -> Measurement:
    """On one thread: thousands of tiny CPU operations would each wait for the slowest thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _run(ctx)
    finally:
        torch.set_num_threads(threads)


def _run(ctx: Context) -> Measurement:
    engine = ctx.engine(sequences=1, tokens=ctx.spec["page_size"])
    model = engine.model
    scales = static_scales(ctx.spec["scale"], model)
    stored, resolved = store_format(engine.decision), KV_FORMATS[engine.decision.kv_format.resolved]
    scale = scales[0] if scales and resolved.scale_kind == "static" else None
    page, splits, options = ctx.spec["page_size"], ctx.spec["kv_splits"], ctx.options
    bench = Bench(stored, resolved, scale, page, model.device, options["seed"], engine.backend, splits)
    own = Geometry("model", engine.layers[0].q_heads, engine.layers[0].shape)
    cases = [
        Case(*case) for case in itertools.product((*GEOMETRIES, own), TOLERANCE, options["lengths"], VARIANTS)
    ]
    total = len(cases) + 1
    rows, worst, worst_case = [], (0.0, 0.0), ""
    for index, case in enumerate(cases):
        ctx.progress(index, total, case.name)
        row, error = bench.decode(case)
        rows.append(row)
        if error[0] > worst[0]:
            worst, worst_case = error, case.name
    ctx.progress(len(cases), total, f"{options['steps']} steps without a model")
    steps = bench.steps(options["steps"], model.dtype)
    sizes = {"q_heads": STEP_HEADS, "kv_heads": STEP_SHAPE.kv_heads, "head_dim": STEP_SHAPE.head_dim}
    facts = {
        **sizes,
        "seed": options["seed"],
        "steps": options["steps"],
        "vocabulary": STEP_VOCAB,
        "step_dtype": dtype_name(model.dtype),
        "max_abs_is": f"largest of each {-(-options['steps'] // BUCKETS)} steps",
        "scale": scale,
        "element_error": {"share_of_bound": worst[0], "max_abs": worst[1], "case": worst_case},
        "error_beside_outlier": error_beside_outlier(resolved, scale[0] if scale else None, 0),
        "oracle": "float64 einsum on the reference quantizer's codes of the original tensors",
    }
    return Measurement({"cases": rows, "steps": steps}, facts)


@dataclass(frozen=True)
class Bench:
    """stored: the format of the store; resolved: the format it must behave as; scale: (K, V) if static;
    backend: of the kernels that write and attend; splits: their programs along a sequence.
    """

    stored: KVFormat
    resolved: KVFormat
    scale: tuple[float, float] | None
    page_size: int
    device: torch.device
    seed: int
    backend: Backend = TORCH
    splits: int | None = None

    def decode(self, case: Case) -> tuple[dict[str, Any], tuple[float, float]]:
        """One decode step: its row, and K/V's worst error as a share of its bound and absolute."""
        geometry, length, shape = case.geometry, case.length, case.geometry.shape
        draw = self._draws(case.dtype)
        q = draw(1, geometry.q_heads, 1, shape.head_dim)
        k, v = (draw(length, shape.kv_heads, dim) for dim in (shape.head_dim, shape.value_dim))
        if case.variant == "strided":
            q, k, v = strided(q), strided(k), strided(v)
        if case.variant == "zero-rows":
            k[length // 2] = v[length // 2] = 0
        scaling = shape.head_dim**-0.5

        store = self._store(self.stored, shape, 2 * pages_for(length, self.page_size) + 1, case.dtype)
        _shuffle(store, random.Random(self.seed))
        seq = store.add()
        if length > 1:  # written as by a prefill and a decode step
            _append(store, seq, k[:-1], v[:-1])
        out = self._decode(store, seq, q[:, :, 0], k[-1:], v[-1:], scaling)[0].double()

        scales = self.scale or (None, None)
        pair = [(x, s, dequantized(self.resolved, x, s)) for x, s in zip((k, v), scales, strict=True)]
        oracle_k, oracle_v = (values for _, _, values in pair)
        expected = attention(q[0, :, 0].double(), oracle_k, oracle_v, scaling)
        both = out.flatten(), expected.flatten()
        row = {
            "name": case.name,
            "length": length,
            "q_heads": geometry.q_heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "dtype": dtype_name(case.dtype),
            "max_abs": (out - expected).abs().max().item(),
            "cosine": F.cosine_similarity(*both, dim=0).item() if any(x.any() for x in both) else 1.0,
            "bound": TOLERANCE[case.dtype] * max(1.0, oracle_v.abs().max().item()),
        }
        return row, max((element_error(self.resolved, *x) for x in pair), key=lambda error: error[0])

    def steps(self, steps: int, dtype: torch.dtype) -> dict[str, Any]:
        """Grow one sequence by tokens in a native store and in this format's; attend in both.

        Returns each step's argmax agreement (0 or 1) on a small random vocabulary, the largest logit
        difference (bucket maxima over the steps) and the smallest cosine of two logit rows.
        """
        draw, dim = self._draws(dtype), STEP_SHAPE.head_dim
        q = draw(steps, 1, STEP_HEADS, 1, dim)
        k, v = (draw(steps, 1, STEP_SHAPE.kv_heads, dim) for _ in SIDES)
        vocabulary = draw(STEP_HEADS * dim, STEP_VOCAB, dtype=torch.float32)
        logits = []
        for fmt in (KV_FORMATS["native"], self.stored):
            store = self._store(fmt, STEP_SHAPE, pages_for(steps, self.page_size), dtype)
            seq, outputs = store.add(), []
            for step in range(steps):
                out = self._decode(store, seq, q[step, :, :, 0], k[step], v[step], dim**-0.5)
                outputs.append(out.flatten())
            logits.append(torch.stack(outputs).float() @ vocabulary)
        native, candidate = logits
        max_abs = (candidate - native).abs().amax(dim=-1)
        buckets = torch.split(max_abs, -(-steps // BUCKETS))
        return {
            "argmax_equal": (candidate.argmax(-1) == native.argmax(-1)).int().tolist(),
            "max_abs": [round(bucket.max().item(), 9) for bucket in buckets],
            "cosine_min": F.cosine_similarity(candidate.double(), native.double(), dim=-1).min().item(),
        }

    def _draws(self, own: torch.dtype) -> Callable[..., Tensor]:
        """draw(*shape): N(0, 1) in the dtype, by the seed."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, dtype: torch.dtype = own) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.device, dtype)

        return draw

    def _decode(
        self, store: PagedKVStore, seq: int, q: Tensor, k: Tensor, v: Tensor, scaling: float
    ) -> Tensor:
        """One token through the resolved backend: q [1, Hq, D], k and v [1, H, D] -> [1, Hq, Dv]."""
        start = store.length(seq)
        store.reserve(seq, 1)
        attention = self.backend.attention(store, Chunk([seq], [start], [1]), splits=self.splits)
        out = attention.attend(0, q, k, v, scaling, Mask())
        store.commit(seq, 1)
        return out

    def _store(self, fmt: KVFormat, shape: KVShape, pages: int, dtype: torch.dtype) -> PagedKVStore:
        scale = [self.scale] if self.scale is not None and fmt.scale_kind == "static" else None
        return PagedKVStore(fmt, [shape], self.page_size, pages, dtype, self.device, scale, self.backend)


def _append(store: PagedKVStore, seq: int, k: Tensor, v: Tensor) -> None:
    start, n = store.length(seq), len(k)
    store.reserve(seq, n)
    store.write(0, store.slots_for(seq, start, n), k, v)
    store.commit(seq, n)


def _shuffle(store: PagedKVStore, rng: random.Random) -> None:
    """Fill every page with large stale values and free them in random order."""
    shape = store.shapes[0]
    seqs = [store.add() for _ in range(store.num_pages)]
    for seq in seqs:
        stale = torch.full(
            (store.page_size, shape.kv_heads, 1), 1e4, dtype=store.native_dtype, device=store.device
        )
        _append(store, seq, stale.expand(-1, -1, shape.head_dim), stale.expand(-1, -1, shape.value_dim))
    rng.shuffle(seqs)
    for seq in seqs:
        store.free(seq)


def strided(x: Tensor) -> Tensor:
    """The same values as a view of a larger tensor, with offset and gaps."""
    wide = x.new_full((*x.shape[:-2], x.shape[-1] + 3, x.shape[-2] + 2), torch.nan)
    return wide[..., 1:-2, 1:-1].transpose(-1, -2).copy_(x)


def dequantized(fmt: KVFormat, x: Tensor, scale: float | None) -> Tensor:
    """The exact float64 round trip of `x [..., D]`. scale: of a static format."""
    given = None if scale is None else torch.tensor(scale, dtype=torch.float32, device=x.device)
    quantized = QUANTIZE[fmt.name](x, given)
    values = quantized.codes.double()
    if quantized.scales is not None:
        return values * quantized.scales.double()[..., None]
    return values if given is None else values * given.double()


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """q [Hq, D], k [L, H, D], v [L, H, Dv] in float64 -> [Hq, Dv]; head h reads KV head h // (Hq / H)."""
    groups = q.shape[0] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    weights = (torch.einsum("hd,lhd->hl", q, k) * scaling).softmax(dim=-1)
    return torch.einsum("hl,lhd->hd", weights, v)


def error_beside_outlier(fmt: KVFormat, scale: float | None, seed: int) -> dict[str, float]:
    """Relative RMSE of 127 N(0, 1) channels next to one that is 1, 30 or 100 times as large."""
    found = {}
    for factor in (1, 30, 100):
        x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(seed))
        x[:, 0] *= factor
        error = (dequantized(fmt, x, scale) - x.double())[:, 1:]
        found[f"x{factor}"] = (error.square().mean() / x[:, 1:].double().square().mean()).sqrt().item()
    return found
