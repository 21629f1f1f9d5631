"""FP8 weights that are not what the cell asks for, or are and are not used; and what stays native beside
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from kvbench.engines.reference import kind, load
from kvbench.engines.reference.load import LoadedModel, load_model
from kvbench.engines.reference.weights import fp8_linear as fp8linear
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.evidence.stored_weights import fp8_modules
from kvbench.runners import gemm, latency
from kvbench.runners.context import Context, Measurement
from kvbench.selftest.fault import Fault
from kvbench_kernels.gemm import fp8_linear
from kvbench_kernels.gemm.blockwise import dequantize_blocks, fp8_dequantize_matmul_torch
from kvbench_kernels.launches import launched
from kvbench_kernels.launches import product as product_of

Broken = AbstractContextManager[Any]


def after_load(change: Callable[[LoadedModel], object]) -> Callable[[], Broken]:
    """An inject: `change` is made to every model with FP8 weights when it has been loaded."""

    def loading(*rest: Any) -> LoadedModel:
        loaded = load_model(*rest)
        if loaded.weights.format != "native":
            with torch.no_grad():
                change(loaded)
        return loaded

    return lambda: patch.object(kind, "load_model", loading)


def named(loaded: LoadedModel, end: str) -> Tensor:
    return next(p for name, p in loaded.model.named_parameters() if name.endswith(end))


def dequantized() -> Broken:
    """The loader quantizes and puts the dequantized weight into a plain layer."""

    def quantizing(model: nn.Module, name: str) -> Any:
        facts = quantize_model(model, name)
        for module_name, module in fp8_modules(model).items():
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight.data = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)
            plain.register_parameter("bias", module.bias)
            model.set_submodule(module_name, plain.requires_grad_(False))
        return facts

    return patch.object(load, "quantize_model", quantizing)


def product(change: Callable[[Tensor], Tensor]) -> Callable[[], Broken]:
    """An inject: the reference product works with other scales."""

    def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_dequantize_matmul_torch(x, codes, change(scales), bias)

    return lambda: patch.dict(fp8_linear._PATHS, reference=multiply)


def other_kernel() -> Broken:
    def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        launched("cublas")
        return nn.functional.linear(x, dequantize_blocks(codes, scales, x.dtype), bias)

    return patch.dict(fp8_linear._PATHS, reference=multiply)


def wrong_at(rows: int) -> Callable[[], Broken]:
    """An inject: the reference product takes other scales at this number of rows."""

    def multiply(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_dequantize_matmul_torch(x, codes, scales * 1.25 if len(x) == rows else scales, bias)

    return lambda: patch.dict(fp8_linear._PATHS, reference=multiply)


def replaced_by_the_run() -> Broken:
    """The second run of a model, after its probes, leaves a layer with other code."""
    honest = latency.run

    def run(ctx: Context) -> Measurement:
        measured = honest(ctx)
        if ctx.spec["weights"] != "native":
            shadow(ctx.model)
        return measured

    return patch.object(latency, "run", run)


def wrong_in_batches() -> Broken:
    """The product is right for a matrix, and wrong for the [1, M, K] that the model gives it."""
    honest = fp8linear.fp8_linear_op

    def op(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = honest(x, codes, scales * 1.25 if x.ndim == 3 else scales, bias)
        return y

    return patch.object(fp8linear, "fp8_linear_op", op)


def mlps_dropped_by_the_run() -> Broken:
    """As below, from the second run of a model on."""
    honest = latency.run

    def run(ctx: Context) -> Measurement:
        for module in ctx.model.model.modules() if ctx.spec["weights"] != "native" else ():
            if isinstance(module, LlamaMLP):
                module.forward = dropping(module.forward)
        return honest(ctx)

    return patch.object(latency, "run", run)


def dropping(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.zeros_like(forward(x))


def products_renamed() -> Broken:
    """The runner measures each layer under the name of the next one of its kind."""
    honest = gemm.products

    def products(model: nn.Module) -> list[gemm.Product]:
        found = honest(model)
        return [replace(one, names=one.alike[0].names) if one.alike else one for one in found]

    return patch.object(gemm, "products", products)


def products_left_out() -> Broken:
    honest = gemm.products
    return patch.object(gemm, "products", lambda model: honest(model)[1:])


def shadow(loaded: LoadedModel) -> None:
    """A layer computes with a dequantized copy, and reports the name of the expected kernel."""
    module = fp8_modules(loaded.model)["model.layers.2.mlp.down_proj"]
    copy = dequantize_blocks(module.weight.data, module.weight_scale_inv.data)

    def forward(x: Tensor) -> Tensor:
        with product_of(x.numel() // x.shape[-1], *copy.shape):
            launched("fp8_dequantize_matmul_torch")
        return nn.functional.linear(x, copy)

    module.forward = forward  # type: ignore[method-assign]


def layer_between(loaded: LoadedModel) -> None:
    """Samples of the source are of layers 0, 1 and 3 of 4."""
    fp8_modules(loaded.model)["model.layers.2.mlp.down_proj"].weight_scale_inv.data.mul_(1.5)


def quantized_wrongly_between() -> Broken:
    """The same before the checksum is taken: the 7 modules of layer 2 are the 15th to the 21st."""
    honest, made = Fp8Linear.quantized.__func__, count()  # type: ignore[attr-defined]

    def quantized(cls: type[Fp8Linear], linear: nn.Linear) -> Fp8Linear:
        layer: Fp8Linear = honest(cls, linear)
        if next(made) // 7 % 4 == 2:
            layer.weight_scale_inv.data.mul_(1.5)
        return layer

    return patch.object(Fp8Linear, "quantized", classmethod(quantized))


def copies(loaded: LoadedModel) -> Iterator[Tensor]:
    for module in fp8_modules(loaded.model).values():
        yield dequantize_blocks(module.weight.data, module.weight_scale_inv.data, torch.bfloat16)


def copy_in_a_layer(loaded: LoadedModel) -> None:
    for module, copy in zip(fp8_modules(loaded.model).values(), copies(loaded), strict=True):
        vars(module)["shadow"] = copy


def copy_in_the_model(loaded: LoadedModel) -> None:
    vars(loaded.model)["shadows"] = list(copies(loaded))


def mlp_dropped() -> Broken:
    """Computed, so that every product is counted, and thrown away."""
    honest = LlamaMLP.forward
    return patch.object(LlamaMLP, "forward", lambda self, x: torch.zeros_like(honest(self, x)))


FAULTS: dict[str, Fault] = {
    "weights_dequantized_at_load": Fault(
        "FP8 weights are dequantized when they are loaded.",
        "fp8_weights", dequantized, r"q_proj is stored as native \(float32\), expected fp8_block128",
        silent=False),
    "gemm_ignores_scales": Fault(
        "The product takes the codes for the weight.",
        "fp8_weights", product(torch.ones_like),
        r"doubling the scales of \S*q_proj does not double its output"),
    "gemm_takes_scales_of_other_blocks": Fault(
        "The product takes the scales in the reverse order.",
        "fp8_weights", product(lambda s: s.flip(0).flip(1)),
        r"q_proj is .* away from the product with its codes and scales"),
    "gemm_rounds_scales": Fault(
        "The product rounds its FP32 scales to BF16.",
        "fp8_weights", product(torch.Tensor.bfloat16),
        r"q_proj is .* away from the product with its codes and scales"),
    "gemm_by_another_kernel": Fault(
        "A library multiplies by the dequantized weight.",
        "fp8_weights", other_kernel, r"cublas computed .* and path reference was expected"),
    "gemm_on_a_shadow": Fault(
        "One layer multiplies by a dequantized copy of its weight.",
        "fp8_weights", after_load(shadow),
        r"doubling the scales of model\.layers\.2\.mlp\.down_proj does not double its output"),
    "gemm_wrong_at_two_rows": Fault(
        "The product takes other scales at two rows, of a decode step of two sequences.",
        "fp8_weights", wrong_at(2),
        r"q_proj is .* away from the product with its codes and scales, by path reference at 2 rows"),
    "layer_replaced_by_the_run": Fault(
        "A run leaves a layer that multiplies by a copy, when the model's probes have been taken.",
        "fp8_weights", replaced_by_the_run,
        r"doubling the scales of model\.layers\.2\.mlp\.down_proj does not double its output"),
    "gemm_wrong_in_batches": Fault(
        "The product takes other scales for [1, M, K] than for [M, K].",
        "fp8_weights", wrong_in_batches, r"q_proj is .* away from the product with its codes and scales"),
    "mlps_dropped_by_the_run": Fault(
        "A run drops the MLPs of its model, whose probes have been taken.",
        "fp8_weights", mlps_dropped_by_the_run,
        r"the output of model\.layers\.0\.mlp\.down_proj reaches no logit"),
    "gemm_measures_another_layer": Fault(
        "The runner of products measures a layer under another's name.",
        "fp8_products", products_renamed, r"The layer measured as \S+ is another layer of the model",
        silent=False),
    "gemm_leaves_a_shape_out": Fault(
        "The runner of products measures all shapes but one.",
        "fp8_products", products_left_out, r"as one product \d+ times, but 0 would be measured",
        silent=False),
    "weights_changed_in_a_layer_between_samples": Fault(
        "The scales of a layer that no sample is of are changed after loading.",
        "fp8_weights", after_load(layer_between),
        r"layers\.2\.mlp\.down_proj: codes or scales are not those that the layer was loaded with"),
    "weights_quantized_wrongly_in_a_layer_between_samples": Fault(
        "The scales of a layer that no sample is of are wrong from the beginning.",
        "fp8_weights", quantized_wrongly_between,
        r"layers\.2\.self_attn\.q_proj: stored values were made up to .* from the native weight"),
    "weights_held_twice_in_a_layer": Fault(
        "Each FP8 layer keeps a 16-bit copy of its weight.",
        "fp8_weights", after_load(copy_in_a_layer),
        r"q_proj holds \d+ B beside its codes, in shadow: its weight a second time", silent=False),
    "weights_held_twice_in_the_model": Fault(
        "The model keeps 16-bit copies of its FP8 weights outside of the layers.",
        "fp8_weights", after_load(copy_in_the_model),
        r"the model holds \d+ B outside its parameters, in shadows", silent=False),
    "norm_changed_at_load": Fault(
        "The last norm, which stays native, is changed after loading.",
        "fp8_weights", after_load(lambda m: named(m, "model.norm.weight").mul_(1.01)),
        r"model\.norm\.weight, which is native, is not what was loaded"),
    "output_layer_changed_at_load": Fault(
        "The output layer, which stays native, is changed after loading.",
        "fp8_weights", after_load(lambda m: named(m, "lm_head.weight").mul_(1.01)),
        r"lm_head\.weight, which is native, is not what was loaded"),
    "bias_changed_at_load": Fault(
        "The bias of an FP8 layer is changed after loading.",
        "fp8_biases", after_load(lambda m: named(m, "layers.2.self_attn.k_proj.bias").zero_()),
        r"layers\.2\.self_attn\.k_proj\.bias, which is native, is not what was loaded"),
    "mlp_output_dropped": Fault(
        "The MLP of each layer is computed, and its output thrown away.",
        "fp8_weights", mlp_dropped, r"the output of model\.layers\.0\.mlp\.gate_proj reaches no logit"),
}  # fmt: skip
