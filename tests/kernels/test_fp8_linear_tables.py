"""The pure parts of the FP8 linear benchmark: the error that a result may have, goals, tables, the route
suggested.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import fp8_linear, fp8_linear_goals
from benchmarks.fp8_linear import Layer, Ready, numbers, prepare
from benchmarks.fp8_linear_data import BOUNDS, SHAPES, Case, Weights, distance, fault_of
from benchmarks.fp8_linear_entries import (
    ALONE,
    HYBRIDS,
    OWN,
    PEERS,
    ROUTED,
    WHOLE_PEERS,
    Bound,
    Entry,
    cublas,
)
from benchmarks.fp8_linear_goals import GOALS, Row, errors, evaluate, failures, suggested_route
from benchmarks.goals import goal_lines, outcome

CPU = torch.device("cpu")


def row(m: int, entry: str, us: float | None, shape: str = "o", **more: Any) -> Row:
    return Row(shape, m, *SHAPES[shape], entry, us, us, us, **more)


def values(goal: str, rows: list[Row]) -> dict[str, float | None]:
    return {f.cell: f.value for f in evaluate(GOALS[goal], rows)}


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(1)
    return Weights(192, 256, CPU, torch.float16, cold=2 * 192 * 256)


def test_products_are_due_in_float32_of_the_values_of_the_codes(weights: Weights) -> None:
    case = Case(weights, 3)
    assert weights.sets == 2
    scales = weights.scales[1].double()
    wide = weights.codes[1].double() * scales.repeat_interleave(128, 0)[:192].repeat_interleave(128, 1)
    torch.testing.assert_close(case.due[1].double(), case.x.double() @ wide.t(), rtol=1e-5, atol=1e-5)
    off, _ = distance(case.due_quantized, case.due)
    assert 1e-2 < off < BOUNDS["w8a8"]  # eight bits of x


def test_as_many_weights_as_make_them_cold() -> None:
    assert Weights(256, 128, CPU, torch.float32, cold=100_000).sets == 4
    assert Weights(256, 128, CPU, torch.float32, cold=1).sets == 2
    assert Weights(256, 128, CPU, torch.float32, cold=0).sets == 1


def test_one_wrong_element_is_found_and_nothing_unwritten_passes() -> None:
    due = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    assert fault_of(distance([due.clone()], [due]), 6e-3) == ""
    near = due * (1 + 3e-3)
    assert fault_of(distance([due, near], [due, due]), 6e-3) == ""
    assert "relative error 3.00e-03" in fault_of(distance([due, near], [due, due]), 2e-3)
    spot = due.clone()
    spot[1, 77] += 0.1
    assert "an element is off by" in fault_of(distance([spot], [due]), 6e-3)
    spot[1, 77] = math.nan
    assert "relative error nan" in fault_of(distance([due, spot], [due, due]), 6e-3)


def entry_of(result: Tensor | Exception, **more: Any) -> Entry:
    def bind(weights: Weights) -> Bound:
        def call() -> Tensor:
            if isinstance(result, Exception):
                raise result
            return result

        return lambda x: [call] * weights.sets

    return Entry("made", bind, "native", **more)


def test_an_entry_has_a_time_only_when_its_result_is_right(weights: Weights) -> None:
    case = Case(weights, 4)

    def prepared(entry: Entry) -> Ready | Row:
        return prepare(case, "tiny", entry, lambda: entry.bind(weights))

    assert isinstance(prepared(Entry("cublas", cublas, "native")), Ready)
    for entry, word, why in (
        (entry_of(torch.zeros(4, 192)), "WRONG", "relative error 1.00e"),
        (entry_of(ImportError("no such peer")), "absent", "no such peer"),
        (entry_of(RuntimeError("it broke")), "failed", "it broke"),
        (entry_of(torch.zeros(4, 192), takes=lambda m, n, k, dtype: f"not {m} rows"), "-", "not 4 rows"),
    ):
        found = prepared(entry)
        assert isinstance(found, Row)
        assert (found.word, found.us) == (word, None)
        assert why in found.failed


def test_the_reference_is_routed_and_named_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from kvbench_kernels.gemm.fp8_linear import target_of

    target_of.cache_clear()
    layer = Layer("tiny", CPU)
    ours, theirs = layer.measure(2, [OWN[ROUTED], PEERS["cublas"]], 3)
    target_of.cache_clear()
    assert (ours.path, ours.kernels) == ("reference", ("fp8_dequantize_matmul_torch",))
    assert ours.us is not None
    assert ours.us_min is not None
    assert ours.us_max is not None
    assert ours.us_min <= ours.us <= ours.us_max
    assert theirs.us is not None
    assert ours.off_weight is not None
    assert ours.off_weight < 1e-3
    assert ours.off_product is None


def test_speed_is_over_cublas_of_the_same_cell() -> None:
    rows = [
        row(1, ROUTED, 10.0), row(1, "cublas", 15.0), row(2048, ROUTED, 100.0), row(2048, "cublas", 130.0),
        row(100, ROUTED, 10.0), row(100, "cublas", 9.0), row(3, ROUTED, 10.0),
        row(3, "cublas", None, failed="no"),
    ]  # fmt: skip
    assert values("B2 decode", rows) == {"o M=1": 1.5, "o M=3": None}
    assert values("B2 prefill", rows) == {"o M=2048": 1.3}
    assert values("B2 everywhere", rows)["o M=100"] == pytest.approx(0.9)
    lines = goal_lines({"B2 everywhere": GOALS["B2 everywhere"]}, lambda goal: evaluate(goal, rows))
    assert lines[0].startswith("B2 everywhere: missed.")
    assert "worst o M=100 ours 0.9)" in lines[0]
    assert lines[1:] == ["    misses at o M=100 ours 0.9", "    o M=3 ours no number"]


def test_peers_count_with_what_x_needs() -> None:
    rows = [
        row(8, ROUTED, 10.0), row(8, "deepgemm", 5.0), row(8, "scaled_mm", 5.0), row(8, "deepgemm_oq", 8.0),
        row(8, "humming", 9.0), row(8, "flashinfer_q", 11.0), row(7, ROUTED, 10.0), row(128, ROUTED, 10.0),
    ]  # fmt: skip
    assert values("B1 peers", rows) == {"o M=8": pytest.approx(10 / 9)}
    assert values("B1 hybrids", rows) == {"o M=8": pytest.approx(10 / 8)}
    for name in (*WHOLE_PEERS, *HYBRIDS):
        assert PEERS[name].quantizes, name
    assert not any((OWN | PEERS)[name].quantizes for name in ALONE.values())


def test_teraflops_are_of_the_path_that_is_routed() -> None:
    flops = 2 * 4096 * 4096 * 4096
    rows = [
        row(4096, ROUTED, 125.0, path="hopper", kernels=("q", "hopper")), row(4096, "w8a8_alone", 200.0),
        row(4096, "hopper_alone", 100.0), row(2048, ROUTED, 1.0, path="w8a8"),
    ]  # fmt: skip
    assert values("B3 product", rows) == {"o M=4096": pytest.approx(flops / 100 / 1e6)}
    assert values("B3 quantized", rows) == {"o M=4096": pytest.approx(flops / 125 / 1e6)}
    assert outcome(evaluate(GOALS["B3 names"], rows)) == "missed"  # the second has no kernel's name
    assert outcome(evaluate(GOALS["B3 names"], rows[:3])) == "reached"


def test_every_goal_has_its_cells_in_the_default_run() -> None:
    shapes = fp8_linear.QWEN.split(",")
    everything = [
        row(m, ROUTED, 1.0, shape)
        for shape in shapes
        for m in (*numbers(fp8_linear.ROWS), *numbers(fp8_linear.ODD))
    ]
    for name, goal in GOALS.items():
        assert evaluate(goal, everything), name
        assert set(goal.get("rows", ())) <= set(numbers(fp8_linear.ROWS)), name
        assert goal["measure"] in fp8_linear_goals.MEASURES, name
    assert outcome(evaluate(GOALS["B1 peers"], everything)) == "not measured"
    names = list(map(fp8_linear_goals.short, fp8_linear.ENTRIES))
    assert len(set(names)) == len(fp8_linear.ENTRIES)


def test_a_line_has_times_and_words() -> None:
    here = {
        r.entry: r
        for r in (
            row(8, ROUTED, 10.0, path="w8a16", kernels=("w8a16_dot",)), row(8, "cublas", 16.0),
            row(8, "humming", None, word="absent", failed="ModuleNotFoundError"),
        )
    }  # fmt: skip
    text = fp8_linear_goals.line(here, ["ours", "humming", "hopper", "cublas"])
    assert text.split() == ["o", "8", "10.0", "absent", "-", "16.0", "0.625", "0.0%", "w8a16:", "w8a16_dot"]


def test_errors_are_the_largest_of_an_entry_and_failures_come_once() -> None:
    rows = [
        row(1, ROUTED, 1.0, path="w8a16", off_weight=1e-3),
        row(2, ROUTED, 1.0, path="w8a16", off_weight=2e-3),
        row(64, ROUTED, 1.0, path="w8a8", off_weight=3e-2, off_product=1e-3),
        row(1, "humming", None, word="absent", failed="no module"),
        row(2, "humming", None, word="absent", failed="no module"),
        row(1, "hopper", None, word="-", failed="too few"),
    ]  # fmt: skip
    assert [line.split() for line in errors(rows)[1:]] == [
        ["ours", "w8a16", "2.0e-03", "-"],
        ["ours", "w8a8", "3.0e-02", "1.0e-03"],
    ]
    assert failures(rows) == ["humming o M=1 and 1 more: no module"]


def test_the_route_suggested_is_the_fastest_path_by_shape_and_rows() -> None:
    rows = [
        row(1, "w8a16", 8.0), row(1, "w8a8", 12.0), row(1, "hopper", 10.0),
        row(64, "w8a16", 14.0), row(64, "w8a8", 11.0), row(64, "hopper", 12.0),
        row(4096, "hopper", 110.0), row(4096, "scaled_mm_q", 109.0), row(4096, "scaled_mm", 90.0),
        row(3, ROUTED, 1.0), row(1, "w8a16", 8.0, "qkv"), row(1, "hopper", 1.0, "qkv"),
    ]  # fmt: skip
    assert suggested_route(rows)[1:] == [
        "    (4096, 4096): 1 w8a16 8.0, 64 w8a8 11.0, 4096 hopper 110.0  # o",
        "    (6144, 4096): 1 hopper 1.0  # qkv",
    ]


def test_numbers_are_checked() -> None:
    assert numbers("1,64") == [1, 64]
    assert numbers("") == []
    for wrong in ("0", "-1", "x", "1,2.5"):
        with pytest.raises(SystemExit, match="no whole number from 1 on"):
            numbers(wrong)
