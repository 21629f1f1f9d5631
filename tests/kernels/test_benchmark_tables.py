"""The pure parts of the GPU benchmarks: cells, goals, tables, and the oracle that an entry must match to have
a time.
"""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks import attention, attention_data, attention_entries, attention_goals, engine
from benchmarks.attention import Ready
from benchmarks.attention_data import Data
from benchmarks.attention_goals import Row, evaluate
from benchmarks.engine import Result
from benchmarks.goals import Goal, chosen, goal_lines, outcome
from kvbench_kernels.kv.quantize import dequantize

GB = 10**9


def row(cell: str, entry: str, us: float | None, nbytes: int = GB) -> Row:
    return Row(cell, entry, nbytes, us, us, us, cosine=1.0)


def test_a_cell_is_a_batch_and_a_context() -> None:
    assert attention_data.lengths_of("3x20") == (20, 20, 20)
    assert all(attention_data.lengths_of(cell) for cell in attention.CELLS.split(","))
    assert sum(attention_data.lengths_of("mixed")) == 65536 + 31 * 4096
    for wrong in ("8", "8x", "x8", "0x4", "8x-1", "axb"):
        with pytest.raises(SystemExit, match="neither BATCHxCONTEXT"):
            attention_data.lengths_of(wrong)


def test_bytes_count_the_scales() -> None:
    # 8 heads x (K and V) x (128 codes and one scale) a token
    assert attention_data.bytes_of("int8_sym", (3, 4)) == 7 * 8 * 2 * (128 + 2)
    assert attention_data.bytes_of("fp8_e4m3", (1,)) == 8 * 2 * (128 + 4)
    assert attention_data.bytes_of("native", (1,)) == 8 * 2 * 256
    assert attention_entries.PEERS["fi_xqa_fp8"].nbytes((10,)) == 10 * 8 * 2 * 128
    assert attention_entries.PEERS["vllm_int8"].nbytes((10,)) == attention_data.bytes_of("int8_sym", (10,))


def test_a_share_is_of_the_copy_bandwidth() -> None:
    goal = attention_goals.GOALS["A1 large"]
    (found,) = evaluate(goal, [row("8x32768", "int8_sym", 250.0)], b=4.0)  # 1 GB in 250 us: 4 TB/s
    assert (found.value, found.reached) == (1.0, True)
    (found,) = evaluate(goal, [row("8x32768", "int8_sym", 250.0)], b=4.5)
    assert found.value == pytest.approx(4 / 4.5)
    assert not found.reached


def test_goals_pick_cells_by_bytes_or_by_name() -> None:
    rows = [
        row("a", "int8_sym", 1.0, 499_999_999),
        row("b", "int8_sym", 1.0, 500_000_000),
        row("64x4096", "int8_sym", 142.0),
    ]
    assert [f.cell for f in evaluate(attention_goals.GOALS["A1 large"], rows, 4.0)] == ["b", "64x4096"]
    assert [f.cell for f in evaluate(attention_goals.GOALS["A1 136 MB"], rows, 4.0)] == ["a"]
    (found,) = evaluate(attention_goals.GOALS["A1 8x32k, 64x4k"], rows, 4.0)
    assert (found.cell, found.reached) == ("64x4096", False)


def test_ratios_compare_entries_of_one_cell() -> None:
    rows = [
        row("a", "native", 10.0), row("a", "int8_sym", 5.0), row("a", "fp8_e4m3", 5.5),
        row("a", "sdpa_cudnn", 9.0), row("a", "sdpa_flash", 12.0), row("a", "fi_fa2_fp8", 8.0),
        row("a", "fi_xqa_fp8", 5.2), row("b", "native", 1.0),
    ]  # fmt: skip

    def values(goal: str) -> dict[str, float | None]:
        return {f"{f.cell} {f.entry}": f.value for f in evaluate(attention_goals.GOALS[goal], rows, 4.0)}

    assert values("A4 everywhere") == {"a int8_sym": 2.0, "a fp8_e4m3": pytest.approx(10 / 5.5)}
    assert values("A3 SDPA") == {"a native": pytest.approx(10 / 9), "b native": None}
    assert values("A6") == {"a int8_sym": pytest.approx(5 / 5.2), "a fp8_e4m3": pytest.approx(5.5 / 5.2)}
    assert values("A2 elsewhere") == {}  # 1 GB is not elsewhere


def test_the_size_can_be_another_entrys() -> None:
    rows = [
        row("a", "native", 10.0, GB),
        row("a", "int8_sym", 6.0, GB // 2),
        row("b", "native", 1.0, GB - 1),
        row("b", "int8_sym", 1.0, GB),
    ]
    (found,) = evaluate(attention_goals.GOALS["A4 large"], rows, 4.0)
    assert (found.cell, found.reached) == ("a", False)


def test_a_goal_without_a_number_is_never_reached() -> None:
    goal = attention_goals.GOALS["A4 everywhere"]
    rows = [row("a", "native", 10.0), row("a", "int8_sym", 5.0)]
    assert outcome(evaluate(goal, rows, 4.0)) == "reached"
    assert outcome([]) == "not measured"
    failed = Row("b", "int8_sym", GB, failed="FAILED: cosine")
    assert outcome(evaluate(goal, [*rows, row("b", "native", 1.0), failed], 4.0)) == "not measured"
    slow = row("c", "int8_sym", 11.0)
    assert (
        outcome(evaluate(goal, [*rows, row("b", "native", 1.0), failed, row("c", "native", 10.0), slow], 4.0))
        == "missed"
    )


def test_writes_are_one_launch_and_short() -> None:
    once = replace(row("write 8", "write int8_sym", 2.5), kernels=("kv_write",))
    assert outcome(evaluate(attention_goals.GOALS["A5 time"], [once], 4.0)) == "reached"
    assert outcome(evaluate(attention_goals.GOALS["A5 launches"], [once], 4.0)) == "reached"
    twice = replace(once, kernels=("kv_write", "kv_write"))
    assert outcome(evaluate(attention_goals.GOALS["A5 launches"], [twice], 4.0)) == "missed"
    assert (
        outcome(evaluate(attention_goals.GOALS["A5 launches"], [replace(once, kernels=())], 4.0))
        == "not measured"
    )


def lines_of(rows: list[Row], *names: str) -> list[str]:
    goals: dict[str, Goal] = {name: attention_goals.GOALS[name] for name in names or attention_goals.GOALS}
    return goal_lines(goals, lambda goal: evaluate(goal, rows, 4.0))


def test_each_goal_is_printed_with_its_worst_number() -> None:
    rows = [
        row("a", "native", 10.0),
        row("a", "int8_sym", 5.0),
        row("b", "native", 8.0),
        row("b", "int8_sym", 10.0),
    ]
    lines = lines_of(rows, "A4 everywhere")
    assert lines[0].startswith("A4 everywhere: missed. ")
    assert "(speedup >= 1.0; worst b int8_sym 0.8)" in lines[0]
    assert lines[1:] == ["    misses at b int8_sym 0.8"]
    assert lines_of([row("a", "native", 1.0)], "A3 SDPA")[1:] == ["    a native no number"]
    assert [": not measured. " in line for line in lines_of([])] == [True] * len(attention_goals.GOALS)


def test_a_failed_entry_is_a_line_without_a_time() -> None:
    text = attention_goals.table(
        [row("a", "native", 250.0), Row("a", "fi_xqa_fp8", GB, failed="cannot run: ImportError: no")], 4.0
    )
    lines = text.splitlines()
    assert lines[1].split() == ["a", "native", "250.00", "250.00", "-", "250.00", "4.00", "100.0%", "0.0e+00"]
    assert lines[2].split(maxsplit=2) == ["a", "fi_xqa_fp8", "cannot run: ImportError: no"]


def test_entries_take_turns_forwards_and_backwards() -> None:
    ready = [Ready(None, [], 1, row("a", name, None)) for name in "xyz"]
    seen: list[str] = []

    def take(entry: Ready) -> float:
        seen.append(entry.row.entry)
        return float(len(seen))

    times = attention.alternate(ready, 2, take)
    assert seen == ["x", "y", "z", "z", "y", "x"]
    assert times == [[1.0, 6.0], [2.0, 5.0], [3.0, 4.0]]
    timed = attention.timed(ready[0].row, [4.0, 9.0, 1.0])
    assert (timed.us, timed.us_min, timed.us_max) == (4.0, 1.0, 9.0)


def test_names_of_a_list_are_checked() -> None:
    assert chosen("a,b", ["a", "b", "c"], "The peer") == ["a", "b"]
    assert chosen("", ["a"], "The peer") == []
    with pytest.raises(SystemExit, match="'d' is unknown; choose from a, b"):
        chosen("a,d", ["a", "b"], "The peer")


@pytest.mark.parametrize(
    "fmt", ["native", "int8_sym", "fp8_e4m3", "int8_static", "fp8_e4m3_static", "fp8_plain"]
)
def test_the_oracle_attends_to_the_values_of_the_codes(fmt: str) -> None:
    torch.manual_seed(3)
    data = Data((37, 5), sets=2, device="cpu")
    k, v, k_scale, v_scale = data.paged(fmt)
    oracle = data.oracle(fmt)
    s, b, head, length = 1, 0, 9, 37  # query head 9 reads KV head 2

    def value(codes: torch.Tensor, scale: torch.Tensor | None, token: int) -> torch.Tensor:
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
    torch.testing.assert_close(oracle[s, b, head].double(), wanted, rtol=1e-5, atol=1e-6)


def test_layouts_hold_the_same_values() -> None:
    torch.manual_seed(4)
    data = Data((33, 33), sets=2, device="cpu")
    k, v = data.contiguous
    assert k.shape == (2, 2, 8, 33, 128)
    page = data.pages + int(data.table[1, 2])  # token 32 of sequence 1 in set 1
    assert torch.equal(k[1, 1, :, 32], data.k[page, :, 0])
    assert torch.equal(v[1, 1, :, 32], data.v[page, :, 0])
    codes, _, scales, _ = data.tokens_first("int8_sym")
    own, _, own_scales, _ = data.paged("int8_sym")
    assert torch.equal(codes[page, 0], own[page, :, 0])
    assert own_scales is not None
    assert scales is not None
    assert torch.equal(scales[page, 0], own_scales[page, :, 0].float())
    with pytest.raises(ValueError, match="one length"):
        _ = Data((3, 4), sets=1, device="cpu").contiguous


def test_nothing_unwritten_passes_the_comparison() -> None:
    wanted = torch.randn(2, 3, 4)
    assert attention_data.compare(wanted, wanted)[0] == pytest.approx(1.0, abs=1e-12)
    got = wanted.clone()
    got[1, 2, 0] = math.nan
    cosine, _ = attention_data.compare(got, wanted)
    assert math.isnan(cosine)
    assert not cosine >= 0.5
    got[1, 2] = -wanted[1, 2]
    assert attention_data.compare(got, wanted)[0] == pytest.approx(-1.0)


def values_of(name: str, results: list[Result]) -> dict[str, float | None]:
    return {f"{f.cell} {f.entry}": f.value for f in engine.evaluate(engine.GOALS[name], results)}


def test_the_slope_is_what_context_adds_over_what_it_adds_to_native() -> None:
    results = [
        Result("itl_ms", cell, entry, value)
        for cell, entry, value in (
            ("1x1024", "native", 4.0), ("1x1024", "int8_sym", 3.9), ("1x1024", "fp8_e4m3", 4.1),
            ("1x131072", "native", 8.0), ("1x131072", "int8_sym", 5.9), ("1x131072", "fp8_e4m3", 6.6),
        )
    ]  # fmt: skip
    assert values_of("C2 slope", results) == {
        "1x131072 int8_sym": pytest.approx(0.5),
        "1x131072 fp8_e4m3": pytest.approx(0.625),
    }
    assert outcome(engine.evaluate(engine.GOALS["C2 slope"], results)) == "missed"
    assert values_of("C2 slope", results[3:]) == {"1x131072 int8_sym": None, "1x131072 fp8_e4m3": None}
    assert values_of("C1 1x128k", results) == {"1x131072 native": 8.0}
    assert outcome(engine.evaluate(engine.GOALS["C1 1x128k"], results)) == "reached"
    assert values_of("C2 break-even", results) == {
        "1x1024 int8_sym": pytest.approx(3.9 / 4),
        "1x1024 fp8_e4m3": pytest.approx(4.1 / 4),
    }
    assert outcome(engine.evaluate(engine.GOALS["C2 break-even"], results)) == "missed"


def test_ratios_stay_within_a_metric_and_a_cell() -> None:
    results = [
        Result("peer_itl_ms", "1x1024", "native", 4.0), Result("peer_itl_ms", "1x1024", "transformers", 6.8),
        Result("itl_ms", "1x1024", "native", 1.0),
        Result("peer_itl_ms", "32x8192", "transformers", failed="failed: no memory"),
    ]  # fmt: skip
    assert values_of("C4 1x1k", results) == {"1x1024 transformers": pytest.approx(1.7)}
    assert values_of("C4 32x8k", results) == {"32x8192 transformers": None}
    assert outcome(engine.evaluate(engine.GOALS["C4 32x8k"], results)) == "not measured"
    timed = [
        Result("peer_itl_ms", "a", "native", 4.0, 3.0, 5.0, 3),
        Result("peer_itl_ms", "a", "transformers", 6.8, 6.0, 7.0, 3),
    ]
    assert engine.table(timed).splitlines()[1].endswith("6.800  (6.000 - 7.000, n = 3)  1.700 of native")
    assert engine.table(results).splitlines()[3].endswith("failed: no memory")


def test_every_goal_of_the_engine_has_its_cells_in_the_default_run() -> None:
    setup = engine.SETUPS["qwen3-8b"]
    measured = {
        "itl_ms": setup.itl, "ttft_ms": setup.ttft, "peer_itl_ms": setup.peer,
        "weights_itl_ms": setup.weights_itl,
        "weights_ttft_ms": setup.weights_ttft,
    }  # fmt: skip
    for name, goal in engine.GOALS.items():
        assert set(goal.get("cells", ())) <= set(measured.get(goal["metric"], "").split(",")), name
    assert all(engine.shape_of(cell) for cells in measured.values() for cell in cells.split(","))
    with pytest.raises(SystemExit, match="not BATCHxCONTEXT"):
        engine.shape_of("mixed")


def test_every_goal_of_the_kernels_has_its_cells_in_the_default_run() -> None:
    for name, goal in attention_goals.GOALS.items():
        assert set(goal.get("cells", ())) <= set(attention.CELLS.split(",")), name
        known = {*attention.FORMATS.split(","), *(f"write {f}" for f in attention.FORMATS.split(","))}
        assert set(goal["entries"]) <= known, name
