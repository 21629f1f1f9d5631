"""Skinny products in bf16 at the shapes of real models: float64's values, the same bits every time, any
launch order.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kvbench.engines.reference.weights.linear import SkinnyLinear, replace_linears
from kvbench_kernels.gemm.skinny_config import Tiling
from kvbench_kernels.gemm.skinny_linear import skinny_linear, skinny_linear_many
from kvbench_kernels.launches import record
from tests.kernels.products import assert_near, assert_same_in_a_graph, made

pytestmark = pytest.mark.gpu
QWEN3_8B = {
    "qkv": ((4096, 1024, 1024), 4096),
    "o": ((4096,), 4096),
    "k": ((1024,), 4096),
    "gate_up": ((12288, 12288), 4096),
    "down": ((4096,), 12288),
    "lm_head": ((151936,), 4096),
}
SMOLLM2_135M = {
    "small qkv": ((576, 192, 192), 576),
    "small gate_up": ((1536, 1536), 576),
    "small down": ((576,), 1536),
    "small lm_head": ((49152,), 576),
}
SHAPES = QWEN3_8B | SMOLLM2_135M
TILINGS = {
    "registers": Tiling("vector", 4, 1024),
    "registers, split": Tiling("vector", 4, 512, splits=3, warps=2),
    "ring": Tiling("vector", 8, 512, stages=4),
    "one step": Tiling("vector", 2, 4096),
    "dot": Tiling("dot", 16, 256, warps=1, stages=4),
    "dot, split": Tiling("dot", 64, 256, splits=4, stages=3),
    "swap, split": Tiling("dot", 64, 128, splits=4, stages=4, swap=True),
    "wide swap": Tiling("dot", 128, 128, stages=3, swap=True),
}


def poison(m: int, ns: tuple[int, ...]) -> None:
    """NaN in the memory that the next outputs will probably get."""
    held = [made(m, n).fill_(torch.nan) for n in ns]
    del held


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_tiling_against_float64(shape: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ns, k = SHAPES[shape]
    weights = [made(n, k, scale=k**-0.5, dtype=dtype) for n in ns]
    biases = [made(n, dtype=dtype) for n in ns]
    for m in (1, 2, 3, 4, 5, 8, 15, 16):
        x = made(m, k, dtype=dtype)
        exact = [x.double() @ w.double().T for w in weights]
        poison(m, ns)
        for out, e in zip(skinny_linear_many(x, weights), exact, strict=True):
            assert_near(out, e)
        for out, e, b in zip(skinny_linear_many(x, weights, biases), exact, biases, strict=True):
            assert_near(out, e + b.double())


@pytest.mark.parametrize("pdl", [False, True], ids=["", "pdl"])
@pytest.mark.parametrize("name", TILINGS)
def test_every_kind_of_tiling_and_its_bits_in_a_graph(name: str, pdl: bool) -> None:
    torch.manual_seed(0)
    tiling = replace(TILINGS[name], pdl=pdl)
    for m in (1, 2, 4) if tiling.kind == "vector" else (2, 16):
        x, w = made(m, 4096), made(4096, 4096, scale=1 / 64)
        product = partial(skinny_linear, w=w, tiling=tiling)
        assert_near(assert_same_in_a_graph(product, x, 6, 20), x.double() @ w.double().T)


def test_weights_above_2_to_the_31_elements() -> None:
    w = torch.zeros(540_000, 4096, device="cuda", dtype=torch.bfloat16)
    assert w.numel() > 2**31
    w[-3:] = made(3, 4096)
    for m in (1, 16):
        x = made(m, 4096)
        out = skinny_linear(x, w)
        assert_near(out[:, -3:], x.double() @ w[-3:].double().T)
        assert not out[:, :-3].any()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(576, 1536, bias=False)
        self.up_proj = nn.Linear(576, 1536, bias=False)
        self.down_proj = nn.Linear(1536, 576, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@torch.no_grad()
def test_a_model_with_its_linears_replaced_also_compiled() -> None:
    torch.manual_seed(0)
    model = Block().to("cuda", torch.bfloat16)
    few, many = made(4, 1, 576), made(1, 64, 576)
    before = [model(few), model(many)]
    assert replace_linears(model) == 3
    assert type(model.up_proj) is SkinnyLinear
    with record() as names:
        after = [model(few), model(many)]
    assert len(names) == 2  # gate and up in one, down; 64 rows stay with F.linear
    assert torch.equal(after[1], before[1])
    torch.testing.assert_close(after[0], before[0], rtol=2e-2, atol=2e-2)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(few), after[0], rtol=2e-2, atol=2e-2)
    with record() as names:
        compiled(few)
    assert len(names) == 2
