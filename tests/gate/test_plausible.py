"""Identities, bandwidth and lines over the context of made-up runs: sound ones pass, planted errors are named with both numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvbench.gate.builtin_checks import IDENTITIES
from kvbench.gate.evaluate import evaluate
from kvbench.gate.verdict import FAIL, INCONCLUSIVE, PASS, Outcome
from kvbench.matrix.cells import Cell, Task
from kvbench.metrics.collect import METRICS, Row, derive
from kvbench.records.record import Record
from kvbench.records.run import Manifest, Run
from kvbench.report.model import JudgedRun
from tests.factories.runs.made import BASE, CAND, MadeRun, layers, storage_facts

SETTINGS = {"backend": "gpu", "decode": "graph", "splits": [4], "kernels": ["paged_decode_split"]}
# Qwen3-8B: bytes of a token in 16 bits and in FP8 with F32 scales.
NATIVE_KV, FP8_KV = 147_456.0, 76_032.0


def arm(name: str, order: int, itl: float, batch: int, context: int, own: str = "fp8_e4m3") -> dict[str, Any]:
    """own: the KV format of the cell that the record is of; its baseline is native."""
    gaps, ttft = [itl, itl, itl], 50.0
    return {
        "arm": name, "order": order, "ttft_ms": ttft, "itl_ms": gaps, "total_ms": ttft + sum(gaps),
        "prefill_tokens": batch * context, "batch": batch, "new_tokens": 4,
        "ran": {
            "kv_format": "native" if name == "baseline" else own, "weights": "native",
            "computed_tokens": batch * (context + 15),  # the runner's default is 16 new tokens
        },
    }  # fmt: skip


def arm_facts(kv: float, **settings: Any) -> dict[str, Any]:
    return {"settings": SETTINGS | settings, "reads": {"weight_bytes": 10**9, "kv_bytes_per_token": kv}}


def timed(
    own: float = 10.0, native: float = 10.0, batch: int = 2, context: int = 128, **facts: Any
) -> MadeRun:
    """Latency and storage of a native and an FP8 cell; `facts` go into the candidate's latency record."""
    run = MadeRun("fp8_e4m3", batch=batch, context=context)
    arms = [
        arm("candidate" if i in (0, 3) else "baseline", i, own if i in (0, 3) else native, batch, context)
        for i in range(4)
    ]
    alone = [arm("candidate", i, native, batch, context, own="native") for i in range(2)]
    shared = {"copy_gb_s": 4000.0, "cache_bytes": 50_000_000, **facts}
    both = {"candidate": arm_facts(FP8_KV), "baseline": arm_facts(NATIVE_KV)}
    return run.measure(
        "latency",
        ({"arms": arms, "warmup": []}, {"arms": both, **shared}),
        ({"arms": alone, "warmup": []}, {"arms": {"candidate": arm_facts(NATIVE_KV)}, **shared}),
    ).measure(
        "storage",
        (layers(22, 2000, 100), storage_facts(256, 88_000)),
        (layers(22, 4000, 0), storage_facts(256, 88_000)),
    )


def judged(run: MadeRun, rows: Sequence[Row] | None = None) -> list[Outcome]:
    outcomes = evaluate(None, run.run, run.rows() if rows is None else rows).outcomes
    return [o for o in outcomes if o.status in (FAIL, INCONCLUSIVE)]


def test_a_sound_run_breaks_nothing() -> None:
    run = timed()
    assert judged(run) == []
    (said,) = [o for o in evaluate(None, run.run, run.rows()).outcomes if o.check == "plausible"]
    assert said.status == PASS


# identities


@pytest.mark.parametrize(
    ("metric", "value", "words"),
    [
        (
            "decode_tok_s",
            100.0,
            "decode_tok_s on kv_format=fp8_e4m3 is 100 tok/s, which cannot be: batch / ITL is 200 tok/s.",
        ),
        ("prefill_tok_s", 2560.0, "is 2560 tok/s, which cannot be: batch x context / TTFT is 5120 tok/s."),
        ("kv_bytes_total", 44_000.0, "is 44,000 B, which cannot be: payload and scales make 46,200 B."),
    ],
)
def test_a20_t5_a_planted_error_is_named_with_both_numbers(metric: str, value: float, words: str) -> None:
    run = timed()
    rows = [replace(r, value=value) if (r.metric, r.cell) == (metric, CAND) else r for r in run.rows()]
    (fault,) = judged(run, rows)
    assert (fault.check, fault.metric, fault.cell, fault.status, fault.value) == (
        "plausible",
        metric,
        CAND,
        FAIL,
        value,
    )
    assert words in fault.sentence


def test_weight_bytes_are_their_parts() -> None:
    run = timed()
    run.records[3] = replace(
        run.records[3],
        facts={
            **run.records[3].facts,
            "weight_payload_bytes": 60,
            "weight_scale_bytes": 5,
            "weight_native_bytes": 40,
        },
    )
    (fault,) = judged(run)
    assert (
        "weight_bytes on kv_format=fp8_e4m3 is 100 B, which cannot be: codes, scales and native remainder make 105 B."
        in fault.sentence
    )


def test_rounding_breaks_no_identity() -> None:
    run = timed(own=7.123456789)
    rows = [
        replace(r, value=r.value * (1 + 1e-12)) if r.metric in IDENTITIES and r.value else r
        for r in run.rows()
    ]
    assert judged(run, rows) == []


def test_what_was_not_measured_breaks_no_identity() -> None:
    run = timed()
    assert (
        judged(run, [replace(r, value=None) if r.metric in ("itl_ms", "ttft_ms") else r for r in run.rows()])
        == []
    )


def planted(run: MadeRun, at: int, **changes: Any) -> MadeRun:
    """With one request of the candidate's latency record changed."""
    record = run.records[1]
    arms = [{**a, **changes} if i == at else a for i, a in enumerate(record.samples["arms"])]
    run.records[1] = replace(record, samples={**record.samples, "arms": arms})
    return run


def test_a20_t1_a_request_that_is_not_its_ttft_and_steps_is_named() -> None:
    run = timed()
    assert run.row("request_ms").value == 80.0
    assert run.row("request_difference_ms").value == 0
    (fault,) = judged(planted(run, 3, total_ms=90.0))
    assert (fault.metric, fault.value) == ("request_difference_ms", 10.0)
    assert "request 3 took 90 ms" in fault.sentence


def test_a_nan_among_the_totals_stays_one() -> None:
    (fault, *_) = judged(planted(timed(), 0, total_ms=float("nan")))
    assert fault.metric == "request_ms"


def test_a_prompt_of_other_tokens_than_the_cells_is_named() -> None:
    (fault,) = judged(planted(timed(), 0, prefill_tokens=128))
    assert (fault.metric, "batch x context / TTFT" in fault.sentence) == ("prefill_tok_s", True)


def test_a_record_without_totals_is_not_measured() -> None:
    run = timed()
    record = run.records[1]
    arms = [{k: v for k, v in a.items() if k != "total_ms"} for a in record.samples["arms"]]
    run.records[1] = replace(record, samples={**record.samples, "arms": arms})
    row = run.row("request_difference_ms")
    assert (row.value, row.note) == (None, "the record holds no time of a whole request")
    assert judged(run) == []


# bandwidth


def test_bytes_of_a_step_over_its_time() -> None:
    """10^9 B of weights and 2 sequences of 128 + 1 stored tokens in 10 ms."""
    run = timed()
    bytes_ = 10**9 + FP8_KV * 2 * 129
    assert run.row("decode_read_gb_s").value == pytest.approx(bytes_ / 0.010 / 1e9)
    assert run.row("decode_bandwidth_share").value == pytest.approx((bytes_ - 50e6) / 0.010 / 1e9 / 4000)


def test_a_step_faster_than_the_memory_is_implausible() -> None:
    """1.02 GB, of which 50 MB may be cached, in 0.2 ms are 4.85 TB/s: 1.21 of what a copy reaches; in 0.21 ms 1.15."""
    (fault,) = [o for o in judged(timed(own=0.2, native=0.25)) if o.cell == CAND]
    assert (fault.check, fault.metric) == ("plausible", "decode_bandwidth_share")
    assert fault.value == pytest.approx(1.212, abs=1e-3)
    for part in ("1,019,616,256 B", "50,000,000 B", "0.2 ms", "4000 GB/s"):
        assert part in fault.sentence
    assert judged(timed(own=0.21, native=0.25)) == []


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        (
            {"copy_gb_s": None, "copy_reason": "no copy is timed on a cpu"},
            "copy bandwidth is not known: no copy is timed on a cpu",
        ),
        ({"copy_gb_s": None}, "copy bandwidth is not known: it is not in the record"),
        ({"cache_bytes": 2 * 10**9}, "fit the cache of 2,000,000,000 B"),
    ],
)
def test_without_a_bandwidth_to_compare_with_the_row_says_so(facts: dict[str, Any], note: str) -> None:
    row = timed(own=1e-2, native=1e-2, **facts).row("decode_bandwidth_share")
    assert row.value is None
    assert note in row.note


def test_a_record_that_does_not_say_what_a_step_reads_has_no_bandwidth() -> None:
    run = timed(arms={})
    for metric in ("decode_read_gb_s", "decode_bandwidth_share"):
        assert (run.row(metric).value, run.row(metric).note) == (
            None,
            "the record does not say what a step reads",
        )


# lines over the context


class Contexts:
    """A run over several contexts: ITL of native and FP8 as lines (ms, us a token), exact unless `scatter` is given."""

    def __init__(
        self,
        own: tuple[float, float] = (6.0, 0.42),
        native: tuple[float, float] = (6.0, 0.8),
        contexts: Sequence[int] = (1024, 4096, 16384),
        scatter: float = 0.0,
        kv: tuple[float, float] = (FP8_KV, NATIVE_KV),
        **settings: Any,
    ) -> None:
        self.cells: list[Cell] = []
        self.tasks: list[Task] = []
        self.records: list[Record] = []
        for context in contexts:
            itl = [at + slope * context / 1e3 for at, slope in (own, native)]
            run = timed(*itl, batch=1, context=context)
            run.records[1] = replace(
                run.records[1],
                samples={
                    **run.records[1].samples,
                    "arms": [
                        arm(a["arm"], i, a["itl_ms"][0] + scatter * (-1) ** i, 1, context)
                        for i, a in enumerate(run.records[1].samples["arms"])
                    ],
                },
                facts={
                    **run.records[1].facts,
                    "arms": {"candidate": arm_facts(kv[0], **settings), "baseline": arm_facts(kv[1])},
                },
            )
            name = {BASE: f"{BASE}{context}", CAND: f"{CAND}{context}"}
            self.cells += [
                replace(c, id=name[c.id], baseline=name[BASE], name=f"{c.name},context={context}")
                for c in run.cells
            ]
            for task, record in zip(run.tasks, run.records, strict=True):
                key = f"{task.key}-{context}"
                baseline = task.baseline and f"{task.baseline}-{context}"
                cells = tuple(name[c] for c in task.cells)
                self.tasks.append(replace(task, key=key, cells=cells, baseline=baseline))
                self.records.append(replace(record, key=key))

    @property
    def run(self) -> Run:
        return Run(Manifest("made", tuple(self.cells), tuple(self.tasks)), tuple(self.records))

    def rows(self) -> list[Row]:
        return derive(self.run)

    def row(self, metric: str, cell: str = f"{CAND}1024") -> Row:
        (row,) = [r for r in self.rows() if (r.metric, r.cell) == (metric, cell)]
        return row

    def odd(self) -> list[Outcome]:
        outcomes = evaluate(None, self.run, self.rows()).outcomes
        return [o for o in outcomes if o.status in (FAIL, INCONCLUSIVE)]


def test_a_line_over_three_contexts() -> None:
    run = Contexts(own=(8.0, 0.42))
    assert run.row("itl_slope_us_per_token").value == pytest.approx(0.42)
    assert run.row("itl_slope_us_per_token", f"{BASE}4096").value == pytest.approx(0.8)
    assert run.row("itl_intercept_ms").value == pytest.approx(8.0)
    assert run.row("itl_slope_us_per_token").n == 6  # 2 requests a context
    assert run.row("itl_slope_ratio").value == pytest.approx(0.525)
    assert run.row("itl_break_even_tokens").value == pytest.approx(2000 / 0.38)
    assert run.row("itl_slope_to_bytes").value == pytest.approx(0.525 / (FP8_KV / NATIVE_KV))
    assert {r.value for r in run.rows() if r.metric == "itl_slope_ratio"} == {
        run.row("itl_slope_ratio").value
    }
    assert {r.cell for r in run.rows() if r.metric == "itl_slope_ratio"} == {
        f"{CAND}{x}" for x in (1024, 4096, 16384)
    }
    assert run.row("itl_slope_ratio").baseline == f"{BASE}1024"


def test_scatter_makes_an_interval() -> None:
    row = Contexts(scatter=0.5).row("itl_slope_us_per_token")
    assert row.low is not None
    assert row.high is not None
    assert row.low < row.value < row.high  # type: ignore[operator]


@pytest.mark.parametrize(
    ("own", "value", "note"),
    [
        ((8.0, 0.8), None, "parallel"),
        ((5.0, 0.42), 0.0, "from the first token"),
        ((8.0, 0.9), None, "at no context"),
        ((20.0, 0.42), 14.0 / 0.38e-3, "outside the contexts measured, 1,024 to 16,384"),
    ],
)
def test_where_a_format_pays(own: tuple[float, float], value: float | None, note: str) -> None:
    row = Contexts(own=own).row("itl_break_even_tokens")
    assert row.value == (value if value is None else pytest.approx(value))
    assert note in row.note


def test_two_contexts_make_no_line() -> None:
    run = Contexts(contexts=(1024, 4096))
    for metric in ("itl_slope_us_per_token", "itl_slope_ratio", "itl_break_even_tokens"):
        assert (run.row(metric).value, "3 contexts, 2" in run.row(metric).note) == (None, True)
    assert run.odd() == []


def test_contexts_of_two_machines_make_no_line() -> None:
    run = Contexts()
    run.records[-3] = replace(run.records[-3], environment={"cpu": "another"})
    assert run.records[-3].key == "latency--cand-16384"
    assert run.row("itl_slope_ratio").note == "its contexts were measured under different cpu"
    assert run.row("itl_slope_us_per_token", f"{BASE}1024").value is not None


def test_a_failed_context_is_left_out() -> None:
    run = Contexts(contexts=(512, 1024, 4096, 16384))
    at = next(i for i, r in enumerate(run.records) if r.key == "latency--cand-512")
    run.records[at] = replace(run.records[at], status="error", error={"type": "E", "message": "m"})
    assert run.row("itl_slope_ratio").n == 6
    assert run.row("itl_slope_ratio", f"{CAND}512").value is None


def test_a_gain_that_the_bytes_explain_is_not_confounded() -> None:
    assert Contexts(own=(6.0, 0.8 * FP8_KV / NATIVE_KV)).odd() == []
    assert Contexts(own=(6.0, 0.8 * FP8_KV / NATIVE_KV), backend="torch").odd() == []


def test_a_gain_beyond_the_bytes_is_confounded_and_names_the_settings_that_differ() -> None:
    run = Contexts(own=(6.84, 0.309), backend="torch", splits=[])
    (outcome,) = run.odd()
    assert (outcome.check, outcome.metric, outcome.status) == (
        "confounded",
        "itl_slope_to_bytes",
        INCONCLUSIVE,
    )
    assert outcome.cells == tuple(f"{CAND}{x}" for x in (1024, 4096, 16384))
    assert outcome.value == pytest.approx(0.309 / 0.8 / (FP8_KV / NATIVE_KV))
    assert outcome.sentence.startswith(
        "itl_slope_to_bytes on kv_format=fp8_e4m3,context=1024 (and 2 more cells) is 0.749"
    )
    assert outcome.sentence.endswith(
        "KV bytes in the ratio 0.515625; what differs besides the format: backend torch against gpu, splits none against 4."
    )
    assert evaluate(None, run.run, run.rows()).exit_code == 4


def test_a_gain_beyond_the_bytes_with_equal_settings_says_that_none_differs() -> None:
    (outcome,) = Contexts(own=(6.84, 0.309)).odd()
    assert outcome.sentence.endswith("no recorded setting differs besides the format.")


def test_an_interval_that_reaches_what_the_bytes_allow_is_not_confounded() -> None:
    run = Contexts(own=(6.84, 0.38), scatter=2.0)
    row = run.row("itl_slope_to_bytes")
    assert row.value is not None
    assert row.value < 0.95
    assert row.high is not None
    assert row.high > 1
    assert run.odd() == []


def test_without_bytes_no_gain_is_judged() -> None:
    run = Contexts(own=(6.84, 0.309))
    run.records = [
        replace(r, facts={**r.facts, "arms": {}}) if r.runner == "latency" else r for r in run.records
    ]
    assert (
        run.row("itl_slope_to_bytes").note
        == "the record does not say what a step reads; run the matrix again"
    )
    assert run.odd() == []


def test_a_line_that_falls_has_no_ratio() -> None:
    row = Contexts(own=(20.0, -0.1)).row("itl_slope_ratio")
    assert (row.value, row.note) == (None, "a line does not rise with the context")


def test_what_cannot_be_read_is_a_note_and_no_crash() -> None:
    run = Contexts()
    run.records = [replace(r, samples={}) if r.key == "latency--cand-4096" else r for r in run.records]
    assert "cannot be read" in run.row("itl_slope_ratio").note


def test_the_report_shows_one_line_a_format_and_none_without_a_line() -> None:
    from kvbench.report.view import build

    def table(run: Contexts) -> Any:
        verdict = evaluate(None, run.run, run.rows())
        tables = build(JudgedRun(run.run, run.rows(), verdict)).tables
        return next((t for t in tables if t.key == "contexts"), None)

    found = table(Contexts())
    assert [line.label.text for line in found.lines] == ["native", "fp8_e4m3"]
    assert [len(line.label.cells) for line in found.lines] == [3, 3]
    assert {c.metric for c in found.columns} == {
        m for m in METRICS if m.startswith(("itl_slope", "itl_break", "itl_inter"))
    }
    assert table(Contexts(contexts=(1024, 4096))) is None


def test_a_confounded_gain_is_no_gate() -> None:
    from kvbench.render.labels import Labels
    from kvbench.report.sections.notices import notices

    run = Contexts(own=(6.84, 0.309))
    verdict = evaluate(None, run.run, run.rows())
    shown = notices(JudgedRun(run.run, run.rows(), verdict), Labels(run.run))
    assert [n.title for n in shown] == ["No gate was judged"]
