"""The Hopper decode kernel against float64 attention over the dequantized pages, with poison around the
sequences.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvbench.formats.kv import KV_FORMATS
from kvbench_kernels.attention.hopper_decode import paged_decode_hopper, plan_workspace
from kvbench_kernels.attention.hopper_plan import Plan, Tiling, plan_decode
from kvbench_kernels.attention.reference import paged_attention_torch
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.kv.quantize import QUANTIZE, dequantize
from kvbench_kernels.launches import record

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
FORMATS = ["native", "int8_sym", "int8_static", "fp8_e4m3", "fp8_e4m3_static"]
RAGGED = [1, 15, 16, 17, 33, 0, 700]


@dataclass(frozen=True)
class Case:
    """One call's arguments."""

    cache: LayerPages
    q: Tensor
    pages: Tensor
    lengths: Tensor
    scaling: float


def make(
    fmt,
    lengths,
    q_heads=32,
    kv_heads=8,
    dim=128,
    page=16,
    dtype=torch.bfloat16,
    k_size=1.0,
    v_size=1.0,
    q_size=1.0,
    spread=0.0,
):
    """Random pages; spread: bits over which the sizes of V's rows vary. What no sequence owns is NaN, inf or
    full scale.
    """
    torch.manual_seed(1)
    width = max(1, *(-(-length // page) for length in lengths))
    count = len(lengths) * width + 3
    shape = (count, kv_heads, page, dim)
    static = torch.tensor([0.03], device="cuda") if fmt.endswith("static") else None
    row_size = 2.0 ** (torch.rand(shape[:3], device="cuda") * spread).unsqueeze(-1)
    stored = []
    for size in (k_size, v_size * row_size):
        x = torch.randn(shape, device="cuda") * size
        quantized = QUANTIZE[fmt](x.to(dtype) if fmt == "native" else x, static)
        stored.append((quantized.codes, quantized.scales if static is None else static))
    (k, k_scale), (v, v_scale) = stored
    q = (torch.randn(len(lengths), q_heads, dim, device="cuda") * q_size).to(dtype)
    table = torch.randperm(count, device="cuda")[: len(lengths) * width].view(len(lengths), width).int()
    scaling = dim**-0.5 / (q_size * k_size)
    owned = torch.zeros(count, page, dtype=torch.bool, device="cuda")
    for row, length in enumerate(lengths):
        for at, page_id in enumerate(table[row, : -(-length // page)].tolist()):
            owned[page_id, : max(0, length - at * page)] = True
    free = ~owned[:, None].expand(shape[:3])
    for codes, scales in ((k, k_scale), (v, v_scale)):
        if codes.dtype == torch.float8_e4m3fn:
            codes.view(torch.uint8)[free] = 0x7F
        else:
            codes[free] = -128 if codes.dtype == torch.int8 else torch.nan
        if KV_FORMATS[fmt].scale_per_row and scales is not None:
            scales[free] = torch.nan
    # Behind a sequence's last page the table holds numbers that are no pages.
    pages = torch.full((len(lengths), width + 3), 2**30, dtype=torch.int32, device="cuda")
    for row, length in enumerate(lengths):
        used = -(-length // page)
        pages[row, :used] = table[row, :used]
    given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Case(LayerPages(KV_FORMATS[fmt], k, v, k_scale, v_scale), q, pages, given, scaling)


def right_answer(case):
    """float64 attention over the dequantized pages, [B, Hq, D]."""
    _, kv_heads, page, dim = case.cache.k.shape
    out = torch.zeros(case.q.shape, dtype=torch.float64, device="cuda")
    for row, length in enumerate(case.lengths.tolist()):
        if not length:
            continue
        ids = case.pages[row, : -(-length // page)].long()
        keys, values = (
            dequantize(codes[ids], scale if scale is None or scale.ndim == 1 else scale[ids], torch.float32)
            .transpose(0, 1)
            .reshape(1, kv_heads, -1, dim)[:, :, :length]
            .double()
            for codes, scale in case.cache.sides()
        )
        query = case.q[row].double()[None, :, None]
        out[row] = paged_attention_torch(query, keys, values, case.scaling, length - 1)[0, :, 0]
    return out


def run(case, splits, **options):
    out = torch.full_like(case.q, torch.nan)
    where = (case.pages, case.lengths, case.scaling)
    return paged_decode_hopper(case.cache, case.q, *where, splits=splits, out=out, **options)


def assert_right(case, out):
    got, expected = out.double().flatten(1), right_answer(case).flatten(1)
    active = case.lengths > 0
    assert (got[~active] == 0).all()
    got, expected = got[active], expected[active]
    size = expected.abs().amax(1, keepdim=True)
    cosine = torch.nn.functional.cosine_similarity(got / size, expected / size)
    assert cosine.min() >= 0.99999
    # Half a unit in the last place of the output, and the rounding of P: to 8 bits for BF16 pages, to 11
    # otherwise.
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 0.0}[out.dtype]
    operand = 2**-8 if case.cache.k.dtype == torch.bfloat16 else 2**-11
    assert ((got - expected).abs() / size).max() <= rounding + 2 * operand


@pytest.mark.parametrize("splits", [1, 4, 16, 70])
@pytest.mark.parametrize("fmt", FORMATS)
def test_ragged_lengths_and_every_number_of_splits(fmt, splits):
    case = make(fmt, [*RAGGED, 5000])
    assert_right(case, run(case, splits))


SOME = ["native", "int8_sym", "fp8_e4m3"]
HEADS = [(9, 3, 64), (16, 1, 128), (32, 2, 64), (8, 8, 128), (14, 2, 128)]
SIZES = [
    ("int8_sym", 1e-3, 1e-3), ("int8_sym", 1e2, 1e4), ("fp8_e4m3", 1e-3, 1e4), ("fp8_e4m3", 1.0, 1e-30),
    ("fp8_e4m3", 1e-30, 1.0), ("fp8_e4m3", 1e15, 1e30),
]  # fmt: skip
CASES = [
    *((f, RAGGED, dict(zip(("q_heads", "kv_heads", "dim"), h, strict=True)), 3) for f in SOME for h in HEADS),
    *((f, RAGGED, {"page": page}, 3) for f in SOME for page in (32, 64)),
    *((f, RAGGED, {"dtype": dtype}, 4) for f in SOME for dtype in (torch.float16, torch.bfloat16)),
    *(
        (f, [*RAGGED, 3000], {}, Plan(n, 1, Tiling(64, 3, w)))
        for f in SOME
        for w in (1, 2, 4)
        for n in (1, 5, 40)
    ),
    *(
        (f, [n] * b, {}, plan_decode(KV_FORMATS[f], b, 8, n, 132))
        for f in SOME
        for b, n in ((1, 1000), (3, 20000), (40, 300))
    ),
    *((f, [700, 33], {"k_size": k, "v_size": v, "q_size": q}, 4) for f, k, v in SIZES for q in (1e-6, 1e6)),
    *((f, [3000, 33], {"spread": 12.0}, 8) for f in ("int8_sym", "fp8_e4m3")),
    ("int8_sym", [3000, 40, 600], {}, Plan(32, least=256)),
]


@pytest.mark.parametrize(("fmt", "lengths", "options", "splits"), CASES, ids=str)
def test_against_float64(fmt, lengths, options, splits):
    """Head groups, page sizes, dtypes, tilings, planned divisions, tiny and huge values, short sequences."""
    case = make(fmt, lengths, **options)
    assert_right(case, run(case, splits))


@pytest.mark.parametrize("fmt", ["native", "int8_sym", "fp8_e4m3"])
def test_a_sharp_softmax_moves_the_reference_many_times(fmt):
    case = make(fmt, [2000])
    sharp = replace(case, scaling=case.scaling * 40)
    assert_right(sharp, run(sharp, 2))


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_query_of_zeros_gives_the_mean(fmt):
    case = make(fmt, RAGGED)
    case.q[:, ::3] = 0
    assert_right(case, run(case, 2))


@pytest.mark.parametrize("fmt", ["native", "int8_sym"])
def test_a_graph_is_replayed_with_new_lengths_and_gives_the_same_bits(fmt):
    case = make(fmt, [900, 64, 5000])
    workspace = plan_workspace(3, 32, 8, 128, 40, case.q.device)
    first = run(case, 40, workspace=workspace)
    reads = torch.zeros(2, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(case, 40, workspace=workspace, reads=reads)
        reads.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = run(case, 40, workspace=workspace, reads=reads)
    torch.cuda.synchronize()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)
    assert not workspace.counters.any()
    assert reads.tolist() == [3 * 5964, 0 if fmt == "native" else 3 * 5964]
    case.lengths[1] = 0
    graph.replay()
    torch.cuda.synchronize()
    assert not out[1].any()
    assert torch.equal(out[::2], first[::2])


def spoil(case, part):
    """NaN in one element of K, or in one scale: token 100 of the last sequence, KV head 5. Which outputs it
    reaches.
    """
    tensor = getattr(case.cache, part)
    page = case.cache.k.shape[2]
    at = (int(case.pages[-1, 100 // page]), 5, 100 % page, *([7] if part == "k" else []))
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[at] = 0x7F
    else:
        tensor[at] = torch.nan
    reached = torch.zeros(case.q.shape, dtype=torch.bool, device="cuda")
    group = case.q.shape[1] // case.cache.k.shape[1]
    reached[-1, 5 * group : 6 * group] = True
    return reached


@pytest.mark.parametrize("splits", [1, 4, 70])
@pytest.mark.parametrize(
    ("fmt", "part"),
    [
        ("native", "k"),
        ("fp8_e4m3", "k"),
        ("fp8_e4m3_static", "k"),
        ("int8_sym", "k_scale"),
        ("int8_sym", "v_scale"),
        ("fp8_e4m3", "k_scale"),
        ("fp8_e4m3", "v_scale"),
    ],
)
def test_a11_t2_one_nan_is_seen_by_its_own_heads_alone(fmt, part, splits):
    case = make(fmt, [*RAGGED, 5000])
    clean = run(case, splits)
    reached = spoil(case, part)
    out = run(case, splits)
    assert torch.equal(right_answer(case).isnan(), reached)
    assert torch.equal(out.isnan(), reached)
    assert torch.equal(out[~reached], clean[~reached])


def test_a12_pages_above_2_to_the_31_elements():
    torch.manual_seed(1)
    count = 131_200
    k = torch.zeros(count, 8, 16, 128, dtype=torch.int8, device="cuda")
    assert k.numel() > 2**31
    scale = torch.ones(count, 8, 16, dtype=torch.float16, device="cuda")
    q = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    outs = []
    for first in (0, count - 3):
        k[first : first + 3] = torch.randint(
            -127, 128, (3, 8, 16, 128), generator=torch.Generator().manual_seed(2)
        )
        scale[first : first + 3] = 0.02
        pages = torch.arange(first, first + 3, dtype=torch.int32, device="cuda")[None]
        lengths = torch.tensor([40], dtype=torch.int32, device="cuda")
        case = Case(LayerPages(KV_FORMATS["int8_sym"], k, k, scale, scale), q, pages, lengths, 128**-0.5)
        outs.append(run(case, 2))
    assert outs[0].abs().sum() > 0
    assert torch.equal(outs[0], outs[1])


def test_a_launch_is_recorded_by_name():
    case = make("int8_sym", [40])
    with record() as launches:
        run(case, 2)
    assert [launch.name for launch in launches] == ["paged_decode_hopper"]
    assert "mma.sync" in launches[0].compiled.asm["ptx"]  # what evidence reads the execution precision from


@pytest.mark.parametrize(
    ("changes", "splits", "words"),
    [
        ({"scaling": -1.0}, 2, "Scaling -1.0"),
        ({"k_scale": None}, 2, "needs the scales"),
        ({}, 300, "300 splits"),
    ],
)
def test_what_it_cannot_do_is_an_error(changes, splits, words):
    case = make("int8_sym", [40])
    if "k_scale" in changes:
        changes = {"cache": case.cache._replace(**changes)}
    with pytest.raises(ValueError, match=words):
        run(replace(case, **changes), splits)
