"""Linear layers replaced for decode: one op a group where the skinny path is taken, else no change."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from kvbench.engines.reference.weights import linear
from kvbench.engines.reference.weights.linear import SkinnyLinear, replace_linears, takes_skinny

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def tiny(biased=False, **sizes):
    torch.manual_seed(0)
    kind, config = (Qwen2ForCausalLM, Qwen2Config) if biased else (LlamaForCausalLM, LlamaConfig)
    return kind(config(**{**SIZES, **sizes})).eval()


@torch.no_grad()
def logits(model):
    return model(torch.tensor([[3, 5, 7]]), use_cache=False).logits


@pytest.fixture
def taken(monkeypatch):
    """The skinny path is taken on the CPU too (there the op is its torch twin): outputs of each op call."""
    calls = []
    one, many = linear.skinny_linear_op, linear.skinny_linear_many_op

    def one_call(x, weight, bias):
        calls.append(1)
        return one(x, weight, bias)

    def many_call(x, weights, biases):
        calls.append(len(weights))
        return many(x, weights, biases)

    monkeypatch.setattr(linear, "takes_skinny", lambda x, weight: True)
    monkeypatch.setattr(linear, "skinny_linear_op", one_call)
    monkeypatch.setattr(linear, "skinny_linear_many_op", many_call)
    return calls


@pytest.mark.parametrize("biased", [False, True])
def test_on_a_cpu_nothing_changes(biased):
    model = tiny(biased)
    before, names = logits(model), list(model.state_dict())
    assert replace_linears(model) == 2 * 7 + 1
    assert torch.equal(logits(model), before)
    assert list(model.state_dict()) == names
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {SkinnyLinear}
    assert replace_linears(model) == 0


@pytest.mark.parametrize(("biased", "grouped"), [(False, True), (True, True), (False, False)])
def test_the_skinny_path_gives_the_same_with_one_op_a_group_or_linear(biased, grouped, taken):
    model = tiny(biased)
    before = logits(model)
    replace_linears(model, grouped=grouped)
    assert torch.equal(logits(model), before)
    assert taken == ([3, 1, 2, 1] * 2 + [1] if grouped else [1] * 15)
    assert all(m.ahead is None for m in model.modules() if isinstance(m, SkinnyLinear))
    assert torch.equal(logits(copy.deepcopy(model)), before)


def siblings(**linears):
    return nn.ModuleDict({f"{name}_proj": made for name, made in linears.items()})


@torch.no_grad()
def test_a_sibling_with_another_input_computes_for_itself(taken):
    model = siblings(gate=nn.Linear(8, 4), up=nn.Linear(8, 4))
    replace_linears(model)
    a, b = torch.randn(1, 8), torch.randn(1, 8)
    model.gate_proj(a)
    for x in (b, a):
        assert torch.equal(model.up_proj(x), nn.functional.linear(x, *model.up_proj.parameters()))


def test_subclasses_and_unlike_siblings_are_left_alone(taken):
    class Adapter(nn.Linear):
        pass

    model = siblings(gate=nn.Linear(8, 4), up=Adapter(8, 4), q=Adapter(8, 4))
    assert replace_linears(model) == 1
    assert type(model.up_proj) is Adapter
    model = siblings(gate=nn.Linear(8, 4), up=nn.Linear(8, 4, bias=False))
    assert replace_linears(model) == 2
    model.gate_proj(torch.zeros(1, 8))
    assert taken == [1]


def test_the_path_is_chosen_from_device_rows_shape_and_dtype():
    weight = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")

    def on_cuda(*shape, dtype=torch.bfloat16):
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return FakeTensor(mode, torch.empty(*shape, dtype=dtype, device="meta"), torch.device("cuda"))

    assert takes_skinny(on_cuda(4, 1, 32), weight)
    assert takes_skinny(on_cuda(1, 16, 32), weight)
    assert not takes_skinny(on_cuda(1, 17, 32), weight)
    assert not takes_skinny(on_cuda(0, 32), weight)
    assert not takes_skinny(on_cuda(1, 32, dtype=torch.float32), weight)
    assert not takes_skinny(on_cuda(1, 32), weight.T.contiguous().T)
    assert not takes_skinny(on_cuda(1, 20), weight[:, :20].contiguous())
    assert not takes_skinny(torch.empty(1, 32, dtype=torch.bfloat16), weight)


@torch.no_grad()
def test_ops_compile_in_one_graph_and_their_fakes_have_the_shapes():
    x, a, b, bias = torch.randn(2, 1, 8), torch.randn(4, 8), torch.randn(6, 8), torch.randn(4)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(linear.skinny_linear_op, (x, a, bias), test_utils=checks)
    torch.library.opcheck(linear.skinny_linear_many_op, (x, [a, b], []), test_utils=checks)

    def both(x):
        p, q = linear.skinny_linear_many_op(x, [a, b], [])
        return linear.skinny_linear_op(x, a, bias) + p + q.sum()

    assert torch.equal(torch.compile(both, fullgraph=True, backend="eager")(x), both(x))


@torch.no_grad()
def test_layers_compiled_one_by_one_share_one_compilation(monkeypatch):
    monkeypatch.setattr(linear, "takes_skinny", lambda x, weight: True)
    model, counter = tiny(), CompileCounter()
    layers = model.model.layers
    x, position = torch.randn(1, 1, 32), torch.zeros(1, 1, dtype=torch.long)
    rope = model.model.rotary_emb(x, position)
    before = [layer(x, position_embeddings=rope) for layer in layers]
    replace_linears(model)
    torch._dynamo.reset()
    for layer in layers:
        layer.compile(fullgraph=True, dynamic=False, backend=counter)
    for _ in range(2):
        for layer, out in zip(layers, before, strict=True):
            torch.testing.assert_close(layer(x, position_embeddings=rope), out)
    assert counter.frame_count <= 2
