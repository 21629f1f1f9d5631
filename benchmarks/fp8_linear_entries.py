"""What the FP8 linear benchmark times: our paths, each by itself and as routed, and public kernels beside
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.fp8_linear_data import Weights
from kvbench_kernels.support import Accepted, Rejected

Call = Callable[[], Tensor]
Bound = Callable[[Tensor], list[Call]]


@dataclass(frozen=True)
class Entry:
    """bind(weights)(x) -> one call a weight, each giving a new [M, N].

    numerics: "native" (16-bit weights), "w8a16" or "w8a8"; "" = as the route says. quantizes: whether the
    time includes what x needs (w8a8 alone has that). takes(m, n, k, dtype): why there is no such product, or
    "". compiled: by how many processes a shape is warmed, 0 where nothing compiles for long at its first use.
    """

    name: str
    bind: Callable[[Weights], Bound]
    numerics: str
    quantizes: bool = True
    own: bool = False
    takes: Callable[[int, int, int, str], str] = lambda m, n, k, dtype: ""
    compiled: int = 1


# Ours
# ---


def reason(answer: Accepted | Rejected) -> str:
    return answer.sentence if isinstance(answer, Rejected) else ""


def _takes_w8a16(m: int, n: int, k: int, dtype: str) -> str:
    from kvbench_kernels.gemm.w8a16_config import supports_w8a16

    return reason(supports_w8a16(m, n, k, dtype))


def _takes_w8a8(m: int, n: int, k: int, dtype: str) -> str:
    from kvbench_kernels.gemm.w8a8_config import supports_w8a8

    return reason(supports_w8a8(m, n, k, dtype))


def _takes_hopper(m: int, n: int, k: int, dtype: str) -> str:
    from kvbench_kernels.gemm.hopper_gemm_config import supports_hopper_gemm

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return "It is for compute capability 9.0."
    return reason(supports_hopper_gemm(m, n, k, dtype))


def routed(weights: Weights) -> Bound:
    """What a model runs."""
    from kvbench_kernels.gemm.fp8_linear import fp8_linear

    return lambda x: _each(weights, lambda s: fp8_linear(x, weights.codes[s], weights.scales[s]))


def path(name: str) -> Callable[[Weights], Bound]:
    """One path of `fp8_linear`, quantization of x included, whatever the route says."""

    def bind(weights: Weights) -> Bound:
        from kvbench_kernels.gemm import fp8_linear

        run = fp8_linear._PATHS[name]  # type: ignore[index]
        return lambda x: _each(weights, lambda s: run(x, weights.codes[s], weights.scales[s], None))

    return bind


def product(name: str) -> Callable[[Weights], Bound]:
    """One path's product on an x that is quantized already."""

    def bind(weights: Weights) -> Bound:
        from kvbench_kernels.gemm.activation import quantize_activation

        run = _multiplier(name)

        def bound(x: Tensor) -> list[Call]:
            codes, scales = quantize_activation(x)
            return _each(
                weights, lambda s: run(codes, scales, weights.codes[s], weights.scales[s], None, x.dtype)
            )

        return bound

    return bind


def _multiplier(name: str) -> Callable[..., Tensor]:
    if name == "hopper":
        from kvbench_kernels.gemm.hopper_gemm import hopper_w8a8

        return hopper_w8a8
    from kvbench_kernels.gemm.w8a8 import w8a8

    return w8a8


def _each(weights: Weights, call: Callable[[int], Tensor]) -> list[Call]:
    return [lambda s=s: call(s) for s in range(weights.sets)]  # type: ignore[misc]


OWN: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("ours", routed, "", own=True, compiled=0),
        Entry("w8a16", path("w8a16"), "w8a16", own=True, takes=_takes_w8a16),
        Entry("w8a8", path("w8a8"), "w8a8", own=True, takes=_takes_w8a8),
        Entry("hopper", path("hopper"), "w8a8", own=True, takes=_takes_hopper),
        Entry("w8a8_alone", product("w8a8"), "w8a8", False, own=True, takes=_takes_w8a8, compiled=0),
        Entry("hopper_alone", product("hopper"), "w8a8", False, own=True, takes=_takes_hopper, compiled=0),
    )
}
ROUTED = "ours"
# The entry that is the product alone of a path that quantizes x.
ALONE = {"w8a8": "w8a8_alone", "hopper": "hopper_alone"}


# Peers ------------------------------------------------------------------------------------------------------


def cublas(weights: Weights) -> Bound:
    """The layer with 16-bit weights, of the very values that the codes stand for."""
    return lambda x: _each(weights, lambda s: torch.nn.functional.linear(x, weights.dense[s]))


def quantized_tight(x: Tensor) -> tuple[Tensor, Tensor]:
    """As our quantizer gives x [M, K], but the columns of scales a multiple of 4 apart and no further, as
    peers want them.
    """
    from kvbench_kernels.gemm.activation import quantize_activation
    from kvbench_kernels.gemm.blockwise import blocks

    m, k = x.shape
    room = torch.empty(blocks(k), -(-m // 4) * 4, dtype=torch.float32, device=x.device)
    return quantize_activation(x, scales=room[:, :m].t())


def torch_scaled_mm(quantizes: bool) -> Callable[[Weights], Bound]:
    """torch's block-scaled product; torch has no quantizer, so where it is timed, it is ours."""

    def bind(weights: Weights) -> Bound:
        from torch.nn.functional import ScalingType, scaled_mm

        rows, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128

        def bound(x: Tensor) -> list[Call]:
            once = quantized_tight(x)

            def call(s: int) -> Tensor:
                codes, scales = quantized_tight(x) if quantizes else once
                return scaled_mm(
                    codes,
                    weights.codes[s].t(),
                    scales,
                    rows,
                    weights.scales[s].t(),
                    blocks,
                    output_dtype=x.dtype,
                )

            return _each(weights, call)

        return bound

    return bind


def deep_gemm(quantizer: str) -> Callable[[Weights], Bound]:
    """quantizer: "" = x is quantized before, "own" = by the helper that DeepGEMM ships, "ours" = by our
    kernel.
    """

    def bind(weights: Weights) -> Bound:
        import deep_gemm as peer
        from deep_gemm.utils.math import per_token_cast_to_fp8

        def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
            if quantizer != "own":
                return quantized_tight(x)
            codes, scales = per_token_cast_to_fp8(x, use_ue8m0=False)
            return codes, peer.get_mn_major_tma_aligned_tensor(scales)

        def bound(x: Tensor) -> list[Call]:
            once = quantized(x)

            def call(s: int) -> Tensor:
                left = quantized(x) if quantizer else once
                out = torch.empty(x.shape[0], weights.n, dtype=torch.bfloat16, device=x.device)
                peer.fp8_gemm_nt(left, (weights.codes[s], weights.scales[s]), out)
                return out

            return _each(weights, call)

        return bound

    return bind


def flashinfer(weights: Weights) -> Bound:
    from flashinfer.gemm import fp8_blockscale_gemm_sm90 as peer

    return lambda x: _each(weights, lambda s: peer(x, weights.codes[s], None, weights.scales[s]))


def humming(weights: Weights) -> Bound:
    """It holds the scales in bfloat16."""
    from humming.layer import HummingLayer

    layers = []
    for codes, scales in zip(weights.codes, weights.scales, strict=True):
        layer = HummingLayer(
            shape_n=weights.n, shape_k=weights.k, torch_dtype=weights.dtype,
            weight_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
        ).to(weights.device)  # fmt: skip
        layer.load_from_tensors({"weight": codes, "weight_scale_inv": scales})
        layer.transform()
        layers.append(layer)
    return lambda x: _each(weights, lambda s: layers[s](x))


def _fours(m: int, n: int, k: int, dtype: str) -> str:
    return "" if m % 4 == 0 else f"It takes a multiple of 4 rows, not {m}."


PEERS: dict[str, Entry] = {
    e.name: e
    for e in (
        Entry("cublas", cublas, "native", compiled=0),
        Entry("scaled_mm", torch_scaled_mm(False), "w8a8", quantizes=False, takes=_fours, compiled=0),
        Entry("scaled_mm_q", torch_scaled_mm(True), "w8a8", takes=_fours, compiled=0),
        Entry("flashinfer_q", flashinfer, "w8a8"),
        Entry("deepgemm", deep_gemm(""), "w8a8", quantizes=False, compiled=3),
        Entry("deepgemm_q", deep_gemm("own"), "w8a8", compiled=0),
        Entry("deepgemm_oq", deep_gemm("ours"), "w8a8", compiled=0),
        Entry("humming", humming, "w8a16"),
    )
}
NATIVE = "cublas"
# With what x needs included: what each project ships, and the same with our quantizer before a peer's
# product.
WHOLE_PEERS = ("deepgemm_q", "flashinfer_q", "humming")
HYBRIDS = ("scaled_mm_q", "deepgemm_oq")
