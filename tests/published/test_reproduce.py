"""A published table and invented rows: same shape, flipped order, flipped sign, missing rows."""

import json
import math

import pytest

from kvbench.matrix.cells import CELL_KEYS, Cell
from kvbench.metrics.collect import METRICS, Row
from kvbench.published.catalogue import TABLES, files, named
from kvbench.published.reproduce import (
    AGREES,
    COMPUTED,
    DIFFERS,
    LEFT_OUT,
    NOT_RUN,
    OPEN,
    SHOWN,
    Compared,
    Order,
    Ours,
    Rule,
    Shape,
    compare,
    direction,
    order_of,
    stated_change,
)  # fmt: skip
from kvbench.published.table import read
from kvbench.report.compare.reproduction import Reproduced, as_json, as_markdown, as_text
from tests.factories.jobs import kvbench


class Made:
    """A run with cells of given keys and metrics of theirs."""

    def __init__(self):
        self.cells: list[Cell] = []
        self.rows: list[Row] = []

    def cell(self, keys, variant="", **values):
        """values: a number, or (value, low, high)."""
        same = [c for c in self.cells if c.spec == {**CELL_KEYS, **keys}]
        at = same[0].id if same else f"c{len(self.cells)}"
        if not same:
            self.cells.append(Cell(at, at, {**CELL_KEYS, **keys}, (), at))
        for metric, value in values.items():
            v, low, high = value if isinstance(value, tuple) else (value, None, None)
            note = "" if v is not None else "refused: no GPU here"
            self.rows.append(Row(at, metric, variant, v, METRICS[metric].unit, low=low, high=high, note=note))
        return self

    @property
    def ours(self):
        return Ours(self.cells, self.rows)


def shape_of(name, made):
    found = TABLES[name]
    return compare(read(files(found)[0]).lines, found.rules, found.stand_ins, made.ours)


def of(name):
    return list(read(files(TABLES[name])[0]).lines)


def states(shape):
    return [row.state for row in shape.rows]


def page(native=65_536, int8=33_280):
    made = Made().cell({"kv_format": "native", "context": 16}, kv_bytes_total=native)
    return made.cell({"kv_format": "int8_sym", "context": 16}, kv_bytes_total=int8)


def test_bytes_are_equal_or_differ_by_one_and_two_cells_that_fit_are_no_measurement():
    good = shape_of("int8_sym/page-bytes", page())
    assert (states(good), good.exit_code, good.rows[0].ratio) == ([AGREES], 0, 1.0)
    bad = shape_of("int8_sym/page-bytes", page(int8=33_281))
    assert (states(bad), bad.exit_code) == ([DIFFERS], 1)
    assert bad.rows[0].sentence == "baseline equal; candidate is 33,281 B, published 33280 B."
    made = page()
    made.cell({"kv_format": "int8_sym", "context": 16, "batch": 2}, kv_bytes_total=66_560)
    shape = shape_of("int8_sym/page-bytes", made)
    assert states(shape) == [NOT_RUN]
    assert "2 cells" in shape.rows[0].sentence


def memory():
    made = Made()
    for model, layers, heads, tokens in (
        ("tinyllama-1.1b-cache", 22, 4, 160),
        ("qwen2.5-0.5b-cache", 24, 2, 160),
        ("tinyllama-1.1b-cache", 22, 4, 4096),
        ("smollm-135m-cache", 30, 3, 4096),
    ):
        codes = 2 * layers * tokens * heads * 64
        at = {"model": model, "context": tokens}
        made.cell({**at, "kv_format": "native"}, kv_bytes_total=2 * codes)
        made.cell({**at, "kv_format": "int8_static", "scale": 1.0}, kv_bytes_total=codes + 2 * layers * 4)
    return made


def test_a_table_that_prints_mib_as_mb_is_read_as_it_was_meant_and_it_is_said():
    shape = shape_of("int8_static/memory", memory())
    assert (states(shape), shape.exit_code) == ([AGREES] * 5, 0)
    said = [row.sentence for row in shape.rows]
    assert said[0].startswith("baseline equal as MiB, which is printed as MB")
    assert said[3] == "baseline equal; candidate equal."
    assert all(row.ratio == pytest.approx(1, abs=4e-3) for row in shape.rows)


def test_bytes_a_token_are_of_the_cells_slots():
    made = Made().cell(
        {"context": 20}, kv_bytes_total=147_456 * 32, kv_bytes_payload=147_456 * 32, kv_bytes_scales=0
    )
    made.cell({"context": 20, "kv_format": "fp8_e4m3"}, kv_bytes_total=76_032 * 32, kv_bytes_payload=73_728 * 32,
              kv_bytes_scales=2_304 * 32)  # fmt: skip
    assert states(shape_of("fp8/kv-bytes", made)) == [AGREES] * 3


BASE = {(1, 1024): 7.85, (1, 4096): 10.29, (1, 16384): 20.58, (8, 1024): 20.84, (8, 4096): 25.31}
PUBLISHED = {(1, 1024): 0.93, (1, 4096): 0.77, (1, 16384): 0.58, (8, 1024): 1.10, (8, 4096): 1.15}
NO_SPLITS = {(1, 1024): 1.06, (1, 4096): 1.16, (1, 16384): 1.29, (8, 1024): 1.06, (8, 4096): 1.18}


def itl(auto=PUBLISHED, one=NO_SPLITS, spread=0.001, weights_ratio=0.6):
    """A run with these ratios of FP8 to native KV (both with FP8 weights), paired with native."""
    made = Made()

    def ratio(x):
        return x, x * (1 - spread), x * (1 + spread)

    for batch, context in PUBLISHED:
        at = {"batch": batch, "context": context}
        base = BASE[batch, context]
        made.cell({**at, "weights": "native"}, itl_ms=base / weights_ratio)
        made.cell({**at, "weights": "fp8_block128"}, itl_ms=base, itl_ratio=ratio(weights_ratio))
        for splits, table in ((None, auto), (1, one)):
            made.cell(
                {**at, "weights": "fp8_block128", "kv_format": "fp8_e4m3", "kv_splits": splits},
                itl_ms=base * table[batch, context],
                itl_ratio=ratio(weights_ratio * table[batch, context]),
            )
    return made


def test_the_same_signs_and_order_agree_on_other_hardware_but_for_lines_not_measured():
    """The run's are milder all over: 1 + half of what is published."""
    milder = [{k: 1 + (v - 1) / 2 for k, v in table.items()} for table in (PUBLISHED, NO_SPLITS)]
    shape = shape_of("fp8/itl", itl(*milder))
    assert (set(states(shape)), shape.exit_code) == ({AGREES}, 0)
    first = shape.rows[0]
    assert first.published["change"].startswith("0.93x")
    assert first.ours["change"].startswith("0.965x")
    changes = next(o for o in shape.orders if o.column == "itl_ms, change of fp8 KV against bfloat16 KV")
    assert (changes.alike, changes.flipped) == (10, ())
    # a line that was not measured has its reason
    made = itl()
    for at, row in enumerate(made.rows):
        if row.cell == made.cells[2].id:
            made.rows[at] = Row(row.cell, row.metric, "", None, row.unit, note="refused: no GPU here.")
    shape = shape_of("fp8/itl", made)
    assert (states(shape).count(NOT_RUN), states(shape).count(AGREES)) == (1, 9)
    assert (shape.rows[0].sentence, shape.exit_code) == ("refused: no GPU here.", 3)
    assert set(states(shape_of("fp8/itl", Made()))) == {NOT_RUN}
    assert "no cell of the run with weights fp8_block128" in shape_of("fp8/itl", Made()).rows[0].sentence


def test_a_flipped_sign_or_order_differs_and_what_is_not_told_apart_is_open():
    shape = shape_of("fp8/itl", itl({**PUBLISHED, (1, 1024): 1.03}))
    assert (states(shape)[0], shape.rows[0].sentence) == (DIFFERS, "published down, ours up.")
    assert shape.exit_code == 1
    shape = shape_of("fp8/itl", itl({**PUBLISHED, (1, 4096): 0.5, (1, 16384): 0.9}))
    assert set(states(shape)) == {AGREES}
    changes = next(o for o in shape.orders if o.column == "itl_ms, change of fp8 KV against bfloat16 KV")
    assert (len(changes.flipped), shape.exit_code) == (1, 1)
    assert all(context in changes.flipped[0] for context in ("context 4096", "context 16384"))
    # what the intervals do not tell apart is open
    shape = shape_of("fp8/itl", itl(spread=0.2))
    assert OPEN in states(shape)
    assert DIFFERS not in states(shape)
    assert (shape.exit_code, shape.verdict) == (4, "the data cannot tell")


def test_a_rates_change_is_that_of_the_time_upside_down():
    """Decode by batch, fused against bfloat16 and dequantized; other engines are left out."""
    made = Made()
    fused = {1: 92.34 * 1.55, 4: 354.32, 8: 408.7, 16: 1794.6, 32: 2702.0}
    native = {1: 92.34, 4: 350.64, 8: 686.52, 16: 1304.1, 32: 2000.0}
    slow = {1: 28.49, 4: 110.21, 8: 218.1, 16: 427.0, 32: 817.6}
    for batch in native:
        at = {"batch": batch, "context": 128}
        made.cell({**at, "weights": "native"}, decode_tok_s=native[batch])
        for gemm, rate in (("auto", fused[batch]), ("reference", slow[batch])):
            made.cell({**at, "weights": "fp8_block128", "gemm": gemm}, decode_tok_s=rate, itl_ms=1000 * batch / rate,
                      itl_ratio=native[batch] / rate)  # fmt: skip
    shape = shape_of("fp8/decode", made)
    for state, line in zip(states(shape), of("fp8/decode"), strict=True):
        of_what = line.texts["of"]
        against = line.texts.get("against", of_what)
        left_out = of_what == "fp8 SIMT" or against.endswith(("vLLM", "SIMT"))
        measured = AGREES if line.metric == "decode_tok_s" else SHOWN
        assert state == (LEFT_OUT if left_out else measured), line
    assert shape.exit_code == 0
    assert shape.rows[0].ours["change"].startswith("1.55x")


def quality(both, mmlu):
    native, fp8 = {"weights": "native"}, {"weights": "fp8_block128"}
    cache = {**fp8, "kv_format": "fp8_e4m3"}
    made = Made().cell(native, weight_bytes=16e9).cell(fp8, weight_bytes=9e9)
    tight = (0.05, 0.04, 0.06)
    for keys, ppl, pt in ((native, None, None), (fp8, tight, mmlu), (cache, both, (0.1, 0.0, 0.2))):
        made.cell(keys, "wikitext2 rows512", ppl=18.9, **({"ppl_delta_pct": ppl} if ppl else {}))
        for data in ("ceval 0-shot", "mmlu 0-shot"):
            made.cell(keys, data, mcq_accuracy=0.7, **({"mcq_delta_pt": pt} if pt else {}))
    return made


def test_accuracy_agrees_where_both_stay_within_the_published_target():
    small = (0.1, 0.0, 0.2)
    shape = shape_of("fp8/quality", quality(small, small))
    assert (states(shape).count(AGREES), states(shape).count(LEFT_OUT), shape.exit_code) == (7, 2, 0)
    assert shape.rows[0].sentence == "both no change beyond the published target."
    worse = shape_of("fp8/quality", quality(small, (-3.0, -4.0, -2.0)))
    assert [row.state for row in worse.rows[1:3]] == [DIFFERS, DIFFERS]
    few = shape_of("fp8/quality", quality((0.1, -20, 25), (0.0, -27.0, 27.0)))
    assert states(few).count(OPEN) == 5  # ppl of the cache, and both question sets of both
    assert few.exit_code == 4


def test_the_scale_sweep_is_an_order_of_tokens():
    def sweep(at_1, at_005):
        made = Made()
        for scale, tokens in ((1.0, at_1), (0.05, at_005)):
            made.cell({"kv_format": "int8_static", "scale": scale}, gen_useful_tokens=tokens)
        return shape_of("int8_static/scale", made)

    good = sweep(0, 130)
    assert (states(good), good.exit_code) == ([COMPUTED, COMPUTED, SHOWN, SHOWN, SHOWN], 0)
    found = Reproduced("int8_static scale", read(files(TABLES["int8_static/scale"])[0]), good, "", "", "", "")
    assert "the shape agrees (2 computed from the published numbers, 3 shown)" in as_text(found)
    assert "agrees: " not in as_text(found) + as_markdown(found)
    assert as_json(found)["rows"][0]["state"] == "computed from the published numbers"
    assert Shape(good.rows[:2], ()).exit_code == 3  # nothing was measured
    assert (good.orders, good.rows[4].ratio) == ((Order("gen_useful_tokens", 2, 0, ()),), 1.3)
    assert (sweep(90, 20).exit_code, sweep(20, 20).exit_code) == (1, 4)


@pytest.mark.parametrize(("share", "code"), [(0.0, 0), (0.1, 1)])
def test_runs_that_were_published_as_equal_must_be_equal(share, code):
    made = Made().cell({}, "mmlu 0-shot", mcq_aa_disagreement=share)
    assert shape_of("int8_static/accuracy", made).exit_code == code


def test_an_unknown_table_and_a_line_without_counterpart():
    shape = shape_of("int8_static/service", Made())
    assert (set(states(shape)), shape.exit_code) == ({LEFT_OUT}, 3)
    unknown = compare(of("int8_static/service"), (), {}, Made().ours)
    assert unknown.rows[0].sentence == "kvbench has no counterpart of this line."
    done = kvbench("reproduce", "fp8", "speed")
    assert done.exit_code == 2
    assert "known are int8_sym page-bytes" in done.stderr
    assert named("fp8", "itl").matrix == "fp8_itl.yaml"
    listed = json.loads(kvbench("reproduce", "--list", "--json").stdout)
    assert list(listed) == [name.replace("/", " ") for name in TABLES]


def test_directions_and_orders_of_intervals():
    assert [direction(i) for i in ((0.1, 0.2), (-0.2, -0.1), (0.0, 0.0), (-0.1, 0.1))] == [1, -1, 0, None]
    assert [direction(i, 0.5) for i in ((0.1, 0.2), (0.6, 0.7), (-0.9, -0.6), (0.4, 0.6))] == [0, 1, -1, None]
    # c and d are not told apart as published
    entries = [("a", (1, 1), (1, 1)), ("b", (2, 2), (3, 3)), ("c", (3, 3), (2, 2)), ("d", (3, 4), (0.5, 3.5))]
    assert order_of("x", entries) == Order("x", 2, 2, ("b against c",))


@pytest.mark.parametrize("name", list(TABLES))
def test_a_claim_says_what_its_two_numbers_say(name):
    for line in of(name):
        both = {"baseline", "candidate"} <= line.numbers.keys()
        points = line.metric == "mcq_accuracy"
        change = stated_change(line, points)
        assert change or not both
        if both:
            b, c = line.numbers["baseline"].middle, line.numbers["candidate"].middle
            due = c - b if points else math.log(c / b)
            assert (change[0] + change[1]) / 2 == pytest.approx(due, abs=0.03)


def test_every_table_of_the_sources_has_an_entry_and_every_line_a_rule():
    from kvbench.matrix.load import load

    folder = files(TABLES["fp8/itl"])[0].parent
    assert {found.reference for found in TABLES.values()} == {path.name for path in folder.glob("*.csv")}
    for name, found in TABLES.items():
        reference, matrix = files(found)
        lines = read(reference).lines
        assert all(any(rule.takes(line) for rule in found.rules) for line in lines), name
        assert {rule.ours for rule in found.rules if rule.ours} <= set(METRICS)
        if matrix is not None:  # each line that is not left out has its cells in the matrix
            cells = load(matrix).cells
            ours = Ours(cells, [Row(c.id, m, "", 1.0, METRICS[m].unit) for c in cells for m in METRICS])
            variants = tuple(Rule(**{**rule.__dict__, "variant": ""}) for rule in found.rules)
            assert NOT_RUN not in states(compare(lines, variants, found.stand_ins, ours)), name


def test_a_run_that_every_gate_fails_agrees_with_nothing(tmp_path):
    """512 bytes moved from the payload to the scales: the published sum of impossible parts."""
    out = tmp_path / "run"
    command = ["reproduce", "int8_sym", "page-bytes", "--json"]
    done = kvbench(*command, "--out", out)
    assert (done.exit_code, json.loads(done.stdout)["faults"]) == (0, [])
    for path in (out / "records").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["spec"]["kv_format"] == "int8_sym":
            record["samples"]["layers"][0]["payload"] -= 512
            record["samples"]["layers"][0]["scales"] += 512
            path.write_text(json.dumps(record), encoding="utf-8")
    broken = kvbench(*command, "--from", out)
    shown = json.loads(broken.stdout)
    assert (broken.exit_code, shown["verdict"]) == (1, "the run is invalid")
    assert shown["rows"][0]["state"] == AGREES
    assert any(fault.startswith("plausible: ") for fault in shown["faults"])


def test_a_stored_run_is_of_its_own_models_and_takes_no_other_settings(tmp_path):
    matrix = tmp_path / "m.yaml"
    matrix.write_text(
        "name: m\nmodel: tiny-llama\naxes: {kv_format: [native, int8_sym], context: [16]}\n"
        "engine: {device: cpu}\nrunners: {storage: {}}\n"
    )
    kvbench("run", matrix, "--out", tmp_path / "run")
    command = ["reproduce", "int8_sym", "page-bytes", "--from", str(tmp_path / "run")]
    shown = kvbench(*command).stdout
    assert "not the published model: tiny-llama, as the run has it" in shown
    for more in (["--model", "tiny-llama"], ["--set", "engine.page_size=32"]):
        done = kvbench(*command, *more)
        assert done.exit_code == 2
        assert "--model and --set" in done.stderr


def test_hostile_words_are_shown_safely_and_json_has_everything(tmp_path):
    row = Compared("a|b\n<script>`x`", AGREES, {"candidate": "1"}, {"candidate": "2"}, 2.0, "=cmd|'x'!A0")
    table = read(files(TABLES["fp8/itl"])[0])
    found = Reproduced("fp8 itl", table, Shape((row,), ()), "a|GPU", "m", "", "kvbench", ())
    text = as_markdown(found)
    assert "<script>" not in text
    (line,) = [line for line in text.splitlines() if "&lt;script>" in line]
    assert (line.replace("\\|", "").count("|"), as_json(found)["rows"][0]["ratio"]) == (6, 2.0)
    assert "Exit code 0" in as_text(found)
    broken = Reproduced("fp8 itl", table, Shape((row,), ()), "", "", "", "", ("int8_sym was lost",))
    assert broken.exit_code == 1
    assert "fault: int8_sym was lost" in as_text(broken)
