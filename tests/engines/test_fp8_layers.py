"""FP8 linear layers in a model: joined siblings, compiled layers, moves."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from kvbench.engines.reference.weights import fp8_linear as fp8linear
from kvbench.engines.reference.weights.fp8_linear import Fp8Linear, join_siblings, using
from kvbench.engines.reference.weights.quantize_model import quantize_model
from kvbench.errors import KvbenchError
from kvbench_kernels.launches import record
from tests.engines.test_linear import logits, tiny


def fp8_model(biased=False, joined=True):
    """4 heads of 64 on 2: q has 256 rows, k and v 128, whole blocks; gate and up have 320, which are not."""
    model = tiny(biased, hidden_size=256, intermediate_size=320).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    quantize_model(model, "a test")
    if joined:
        join_siblings(model)
    return model


@pytest.mark.parametrize("biased", [False, True])
def test_joined_siblings_give_the_same_in_fewer_products(biased):
    model = fp8_model(biased, joined=False)
    with record() as alone:
        apart = logits(model)
    assert join_siblings(model) == 2  # q, k, v of each layer; gate and up have no whole blocks
    with record() as together:
        assert torch.equal(logits(model), apart)
    assert (len(alone), len(together)) == (2 * 7, 2 * 5)
    assert [launch.product for launch in together][:2] == [(3, 512, 256), (3, 256, 256)]


def test_joined_layers_hold_nothing_twice_and_refuse_to_be_moved_and_cast():
    model = fp8_model()
    first = next(m for m in model.modules() if isinstance(m, Fp8Linear) and m.group)
    assert first._joined is not None
    joined = first._joined[0].untyped_storage().data_ptr()
    assert {m.weight.untyped_storage().data_ptr() for m in first.group} == {joined}
    assert first._joined[0].shape == (512, 256)
    assert sum(m.weight.numel() for m in first.group) == first._joined[0].numel()
    with pytest.raises(KvbenchError, match="before join_siblings"):
        model.to(torch.bfloat16)


def test_only_the_very_same_input_takes_a_sibling_s_product():
    attention, apart = (fp8_model(joined=j).model.layers[0].self_attn for j in (True, False))
    x = torch.randn(2, 256)
    q, k = attention.q_proj(x), attention.k_proj(2 * x)
    assert torch.equal(q, apart.q_proj(x))
    assert torch.equal(k, apart.k_proj(2 * x))


def test_one_compilation_serves_all_layers():
    model, counter = fp8_model(), CompileCounter()
    expected, layers = logits(model), model.model.layers
    compiled = torch.compile(type(layers[0]).forward, backend=counter, fullgraph=True, dynamic=False)
    for layer in layers:
        layer.forward = compiled.__get__(layer)
    assert torch.equal(logits(model), expected)
    assert counter.frame_count == 1


def test_a14_t4_a_cast_of_the_model_leaves_codes_and_scales_as_they_are():
    model = fp8_model(joined=False)
    before = copy.deepcopy(model)
    model.to(torch.bfloat16)
    for a, b in zip(model.modules(), before.modules(), strict=True):
        if isinstance(a, Fp8Linear) and isinstance(b, Fp8Linear):
            assert torch.equal(a.weight.data.view(torch.uint8), b.weight.data.view(torch.uint8))
            assert a.weight_scale_inv.dtype == torch.float32
            assert torch.equal(a.weight_scale_inv.data, b.weight_scale_inv.data)


def test_the_path_is_put_back_after_a_forward():
    def fails():
        with using("w8a8"):
            assert fp8linear._gemm == "w8a8"
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert fp8linear._gemm == "reference"
