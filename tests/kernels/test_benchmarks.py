"""The GPU benchmarks without a GPU: oracles, who may have a time, how goals and tables are worked out."""

import math

import pytest
import torch

from benchmarks import attention, attention_data, attention_goals, engine, fp8_linear, fp8_linear_goals
from benchmarks.attention_data import Data
from benchmarks.engine import Result
from benchmarks.fp8_linear import Layer, Ready, prepare
from benchmarks.fp8_linear_data import BOUNDS, SHAPES, Case, Weights, distance, fault_of
from benchmarks.fp8_linear_entries import ALONE, HYBRIDS, OWN, PEERS, ROUTED, WHOLE_PEERS, Entry, cublas
from benchmarks.goals import chosen, goal_lines, outcome
from kvbench_kernels.gemm.fp8_linear import target_of
from kvbench_kernels.kv.quantize import dequantize

CPU, GB = torch.device("cpu"), 10**9


def attention_rows(*found, nbytes=GB):
    """Rows of (cell, entry, microseconds)."""
    return [attention_goals.Row(*at, nbytes, us, us, us, cosine=1.0) for *at, us in found]


def linear_row(m, entry, us, shape="o", **more):
    return fp8_linear_goals.Row(shape, m, *SHAPES[shape], entry, us, us, us, **more)


def linear_rows(*found):
    return [linear_row(*x) for x in found]


@pytest.fixture
def weights():
    torch.manual_seed(1)
    return Weights(192, 256, CPU, torch.float16, cold=2 * 192 * 256)


# What results are compared with


@pytest.mark.parametrize(
    "fmt", ["native", "int8_sym", "fp8_e4m3", "int8_static", "fp8_e4m3_static", "fp8_plain"]
)
def test_attention_is_due_of_the_values_of_the_codes(fmt):
    torch.manual_seed(3)
    data = Data((37, 5), sets=2, device="cpu")
    k, v, k_scale, v_scale = data.paged(fmt)
    s, b, head, length = 1, 0, 9, 37  # query head 9 reads KV head 2

    def value(codes, scale, token):
        page = s * data.pages + int(data.table[b, token // 16])
        x = codes[page, 2, token % 16]
        if fmt == "fp8_plain":
            return x.double()
        if scale is not None and scale.numel() > 1:
            scale = scale[page, 2, token % 16]
        return dequantize(x, scale, torch.float32).double()

    keys = torch.stack([value(k, k_scale, t) for t in range(length)])
    values = torch.stack([value(v, v_scale, t) for t in range(length)])
    wanted = (keys @ data.q[s, b, head].double() / math.sqrt(128)).softmax(0) @ values
    torch.testing.assert_close(data.oracle(fmt)[s, b, head].double(), wanted, rtol=1e-5, atol=1e-6)


def test_layouts_hold_the_same_values():
    torch.manual_seed(4)
    data = Data((33, 33), sets=2, device="cpu")
    k, v = data.contiguous
    page = data.pages + int(data.table[1, 2])  # token 32 of sequence 1 in set 1
    assert torch.equal(k[1, 1, :, 32], data.k[page, :, 0])
    assert torch.equal(v[1, 1, :, 32], data.v[page, :, 0])
    codes, _, scales, _ = data.tokens_first("int8_sym")
    own, _, own_scales, _ = data.paged("int8_sym")
    assert torch.equal(codes[page, 0], own[page, :, 0])
    assert torch.equal(scales[page, 0], own_scales[page, :, 0].float())


def test_products_are_due_in_float32_of_the_values_of_the_codes(weights):
    case = Case(weights, 3)
    scales = weights.scales[1].double()
    wide = weights.codes[1].double() * scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    torch.testing.assert_close(case.due[1].double(), case.x.double() @ wide.t(), rtol=1e-5, atol=1e-5)
    off, _ = distance(case.due_quantized, case.due)
    assert 1e-2 < off < BOUNDS["w8a8"]  # eight bits of x
    sets = [Weights(256, 128, CPU, torch.float32, cold=cold).sets for cold in (100_000, 1, 0)]
    assert sets == [4, 2, 1], "as many weights as leave the cache, and two where any are cold"


def test_nothing_wrong_or_unwritten_passes_a_comparison():
    due = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    assert attention_data.compare(due, due)[0] == pytest.approx(1.0, abs=1e-12)
    assert attention_data.compare(-due, due)[0] == pytest.approx(-1.0)
    near, spot = due * (1 + 3e-3), due.clone()
    assert fault_of(distance([due, near], [due, due]), 6e-3) == ""
    assert "relative error 3.00e-03" in fault_of(distance([due, near], [due, due]), 2e-3)
    spot[1, 77] += 0.1
    assert "an element is off by" in fault_of(distance([spot], [due]), 6e-3)
    spot[1, 77] = math.nan
    assert "relative error nan" in fault_of(distance([due, spot], [due, due]), 6e-3)
    assert math.isnan(attention_data.compare(spot, due)[0])


# Who has a time


@pytest.mark.parametrize(
    ("result", "word", "why"),
    [
        (torch.zeros(4, 192), "WRONG", "relative error 1.00e"),
        (ImportError("no such peer"), "absent", "no such peer"),
        (RuntimeError("it broke"), "failed", "it broke"),
        ("not 4 rows", "-", "not 4 rows"),
    ],
    ids=str,
)
def test_an_entry_has_a_time_only_when_its_result_is_right(weights, result, word, why):
    def call():
        if isinstance(result, Exception):
            raise result
        return result

    takes = {"takes": lambda m, n, k, dtype: result} if isinstance(result, str) else {}
    entry = Entry("made", lambda w: lambda x: [call] * w.sets, "native", **takes)
    found = prepare(Case(weights, 4), "tiny", entry, lambda: entry.bind(weights))
    assert (found.word, found.us) == (word, None)
    assert why in found.failed


def test_a_right_entry_is_timed_and_the_route_is_named(weights, monkeypatch):
    entry = Entry("cublas", cublas, "native")
    assert isinstance(prepare(Case(weights, 4), "tiny", entry, lambda: entry.bind(weights)), Ready)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    target_of.cache_clear()
    ours, theirs = Layer("tiny", CPU).measure(2, [OWN[ROUTED], PEERS["cublas"]], 3)
    target_of.cache_clear()
    assert (ours.path, ours.kernels) == ("reference", ("fp8_dequantize_matmul_torch",))
    assert ours.us_min <= ours.us <= ours.us_max
    assert theirs.us is not None
    assert ours.off_weight < 1e-3


def test_entries_take_turns_forwards_and_backwards():
    ready = [attention.Ready(None, [], 1, row) for row in attention_rows(*(("a", x, None) for x in "xyz"))]
    seen = []

    def take(entry):
        seen.append(entry.row.entry)
        return float(len(seen))

    assert attention.alternate(ready, 2, take) == [[1.0, 6.0], [2.0, 5.0], [3.0, 4.0]]
    assert seen == ["x", "y", "z", "z", "y", "x"]
    timed = attention.timed(ready[0].row, [4.0, 9.0, 1.0])
    assert (timed.us, timed.us_min, timed.us_max) == (4.0, 1.0, 9.0)


# Goals: values by cell and entry, and what is printed

COSTS = attention_rows(
    ("a", "native", 10.0), ("a", "int8_sym", 5.0), ("a", "fp8_e4m3", 5.5), ("a", "sdpa_cudnn", 9.0),
    ("a", "sdpa_flash", 12.0), ("a", "fi_fa2_fp8", 8.0), ("a", "fi_xqa_fp8", 5.2), ("b", "native", 1.0),
)  # fmt: skip
ATTENTION = {
    "A4 everywhere": {"a int8_sym": 2.0, "a fp8_e4m3": 10 / 5.5},
    "A3 SDPA": {"a native": 10 / 9, "b native": None},
    "A6": {"a int8_sym": 5 / 5.2, "a fp8_e4m3": 5.5 / 5.2},
    "A2 elsewhere": {},  # 1 GB is not elsewhere
}


@pytest.mark.parametrize(("goal", "values"), ATTENTION.items())
def test_attention_is_compared_within_a_cell(goal, values):
    found = attention_goals.evaluate(attention_goals.GOALS[goal], COSTS, 4.0)
    assert {f"{f.cell} {f.entry}": f.value for f in found} == pytest.approx(values)


def test_a_share_is_of_the_copy_bandwidth_and_a_size_counts_scales():
    goal = attention_goals.GOALS["A1 large"]
    rows = attention_rows(("8x32768", "int8_sym", 250.0))  # 1 GB in 250 us: 4 TB/s
    shares = [attention_goals.evaluate(goal, rows, b)[0] for b in (4.0, 4.5)]
    assert [(f.value, f.reached) for f in shares] == [(1.0, True), (pytest.approx(4 / 4.5), False)]
    small = attention_rows(("8x32768", "int8_sym", 250.0), nbytes=499_999_999)
    assert attention_goals.evaluate(goal, small, 4.0) == []
    # 8 heads x (K and V) x (128 codes and one scale) a token
    sizes = {"int8_sym": 8 * 2 * (128 + 2), "fp8_e4m3": 8 * 2 * (128 + 4), "native": 8 * 2 * 256}
    assert {fmt: attention_data.bytes_of(fmt, (3, 4)) for fmt in sizes} == {
        f: 7 * x for f, x in sizes.items()
    }


def test_a_goal_without_a_number_is_never_reached():
    def said(*rows):
        goal = {"A4 everywhere": attention_goals.GOALS["A4 everywhere"]}
        return goal_lines(goal, lambda goal: attention_goals.evaluate(goal, rows, 4.0))

    rows = attention_rows(("a", "native", 10.0), ("a", "int8_sym", 5.0), ("b", "native", 8.0))
    failed = attention_goals.Row("b", "int8_sym", GB, failed="FAILED: cosine")
    (slow,) = attention_rows(("b", "int8_sym", 10.0))
    assert said(*rows[:2])[0].startswith("A4 everywhere: reached. ")
    assert said()[0].startswith("A4 everywhere: not measured. ")
    assert said(*rows, failed)[0].startswith("A4 everywhere: not measured. ")
    first, second = said(*rows, slow)
    assert first.startswith("A4 everywhere: missed. ")
    assert "(speedup >= 1.0; worst b int8_sym 0.8)" in first
    assert second == "    misses at b int8_sym 0.8"
    lines = attention_goals.table([*attention_rows(("a", "native", 250.0)), failed], 4.0).splitlines()
    assert lines[1].split() == ["a", "native", "250.00", "250.00", "-", "250.00", "4.00", "100.0%", "0.0e+00"]
    assert lines[2].split(maxsplit=2) == ["b", "int8_sym", "FAILED: cosine"]


FLOPS = 2 * 4096**3
SPEEDS = linear_rows(
    (1, ROUTED, 10.0), (1, "cublas", 15.0), (2048, ROUTED, 100.0), (2048, "cublas", 130.0), (3, ROUTED, 10.0),
    (100, ROUTED, 10.0), (100, "cublas", 9.0),
)  # fmt: skip
RIVALS = linear_rows(
    (8, ROUTED, 10.0), (8, "deepgemm", 5.0), (8, "scaled_mm", 5.0), (8, "deepgemm_oq", 8.0), (8, "humming", 9.0),
    (8, "flashinfer_q", 11.0), (7, ROUTED, 10.0), (128, ROUTED, 10.0),
)  # fmt: skip
PATHS = [
    linear_row(4096, ROUTED, 125.0, path="hopper", kernels=("q", "hopper")),
    *linear_rows((4096, "w8a8_alone", 200.0), (4096, "hopper_alone", 100.0)),
]
LINEAR = [
    ("B2 decode", SPEEDS, {"o M=1": 1.5, "o M=3": None}),
    ("B2 prefill", SPEEDS, {"o M=2048": 1.3}),
    ("B2 everywhere", SPEEDS, {"o M=1": 1.5, "o M=2048": 1.3, "o M=3": None, "o M=100": 0.9}),
    ("B1 peers", RIVALS, {"o M=8": 10 / 9}),
    ("B1 hybrids", RIVALS, {"o M=8": 10 / 8}),
    ("B3 product", PATHS, {"o M=4096": FLOPS / 100 / 1e6}),
    ("B3 quantized", PATHS, {"o M=4096": FLOPS / 125 / 1e6}),
]


@pytest.mark.parametrize(("goal", "rows", "values"), LINEAR, ids=[x[0] for x in LINEAR])
def test_products_are_compared_with_what_does_the_same_work(goal, rows, values):
    found = fp8_linear_goals.evaluate(fp8_linear_goals.GOALS[goal], rows)
    assert {f.cell: f.value for f in found} == pytest.approx(values)
    assert all(PEERS[name].quantizes for name in (*WHOLE_PEERS, *HYBRIDS))
    assert not any((OWN | PEERS)[name].quantizes for name in ALONE.values())


def test_a_path_needs_the_kernel_of_its_name():
    goal = fp8_linear_goals.GOALS["B3 names"]
    assert outcome(fp8_linear_goals.evaluate(goal, PATHS)) == "reached"
    unnamed = linear_row(2048, ROUTED, 1.0, path="w8a8")
    assert outcome(fp8_linear_goals.evaluate(goal, [*PATHS, unnamed])) == "missed"


def test_lines_of_the_products():
    absent = linear_row(8, "humming", None, word="absent", failed="no module")
    here = [
        linear_row(8, ROUTED, 10.0, path="w8a16", kernels=("w8a16_dot",), off_weight=2e-3),
        linear_row(8, "cublas", 16.0), absent,
    ]  # fmt: skip
    line = fp8_linear_goals.line({r.entry: r for r in here}, ["ours", "humming", "hopper", "cublas"])
    assert line.split() == ["o", "8", "10.0", "absent", "-", "16.0", "0.625", "0.0%", "w8a16:", "w8a16_dot"]
    rows = [
        *here, linear_row(1, ROUTED, 1.0, path="w8a16", off_weight=1e-3),
        linear_row(9, "humming", None, word="absent", failed="no module"),
    ]  # fmt: skip
    assert [x.split() for x in fp8_linear_goals.errors(rows)[1:]] == [["ours", "w8a16", "2.0e-03", "-"]]
    assert fp8_linear_goals.failures(rows) == ["humming o M=8 and 1 more: no module"]


def test_the_route_suggested_is_the_fastest_path_by_shape_and_rows():
    rows = linear_rows(
        (1, "w8a16", 8.0), (1, "w8a8", 12.0), (64, "w8a16", 14.0), (64, "w8a8", 11.0), (3, ROUTED, 1.0),
        (4096, "hopper", 110.0), (4096, "scaled_mm", 90.0), (1, "w8a16", 8.0, "qkv"), (1, "hopper", 1.0, "qkv"),
    )  # fmt: skip
    assert fp8_linear_goals.suggested_route(rows)[1:] == [
        "    (4096, 4096): 1 w8a16 8.0, 64 w8a8 11.0, 4096 hopper 110.0  # o",
        "    (6144, 4096): 1 hopper 1.0  # qkv",
    ]


def test_the_engine_s_slope_is_what_context_adds_over_what_it_adds_to_native():
    results = [
        Result("itl_ms", cell, entry, value)
        for cell, times in (("1x1024", (4.0, 3.9, 4.1)), ("1x131072", (8.0, 5.9, 6.6)))
        for entry, value in zip(("native", "int8_sym", "fp8_e4m3"), times, strict=True)
    ]
    peers = [
        Result("peer_itl_ms", "1x1024", "native", 4.0),
        Result("peer_itl_ms", "1x1024", "transformers", 6.8),
    ]

    def values(goal, results):
        return {f"{f.cell} {f.entry}": f.value for f in engine.evaluate(engine.GOALS[goal], results)}

    slopes = {"1x131072 int8_sym": 0.5, "1x131072 fp8_e4m3": 0.625}
    assert values("C2 slope", results) == pytest.approx(slopes)
    assert values("C2 slope", results[3:]) == dict.fromkeys(slopes)
    assert values("C2 break-even", results) == pytest.approx(
        {"1x1024 int8_sym": 3.9 / 4, "1x1024 fp8_e4m3": 4.1 / 4}
    )
    assert values("C4 1x1k", results + peers) == pytest.approx({"1x1024 transformers": 1.7})


# The command lines


def test_every_goal_has_its_cells_in_the_default_run():
    setup = engine.SETUPS["qwen3-8b"]
    measured = {
        "itl_ms": setup.itl, "ttft_ms": setup.ttft, "peer_itl_ms": setup.peer,
        "weights_itl_ms": setup.weights_itl, "weights_ttft_ms": setup.weights_ttft,
    }  # fmt: skip
    due = [(goal, measured.get(goal["metric"], "").split(",")) for goal in engine.GOALS.values()]
    due += [(goal, attention.CELLS.split(",")) for goal in attention_goals.GOALS.values()]
    assert [goal for goal, cells in due if not set(goal.get("cells", ())) <= set(cells)] == []
    numbers = fp8_linear.numbers
    rows = [*numbers(fp8_linear.ROWS), *numbers(fp8_linear.ODD)]
    everything = [linear_row(m, ROUTED, 1.0, shape) for shape in fp8_linear.QWEN.split(",") for m in rows]
    assert all(fp8_linear_goals.evaluate(goal, everything) for goal in fp8_linear_goals.GOALS.values())


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (attention_data.lengths_of, ["8", "8x", "x8", "0x4", "8x-1", "axb"]),
        (engine.shape_of, ["mixed"]),
        (fp8_linear.numbers, ["0", "-1", "x", "1,2.5"]),
        (lambda names: chosen(names, ["a", "b"], "The peer"), ["a,d"]),
    ],
)
def test_arguments_are_checked(call, wrong):
    for text in wrong:
        with pytest.raises(
            SystemExit, match=r"neither BATCHxCONTEXT|not BATCHxCONTEXT|no whole|'d' is unknown"
        ):
            call(text)
    assert attention_data.lengths_of("3x20") == (20, 20, 20)
    assert sum(attention_data.lengths_of("mixed")) == 65536 + 31 * 4096
