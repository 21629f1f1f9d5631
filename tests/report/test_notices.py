"""What is read before the numbers: notices, and the word of a run without a gate."""

from dataclasses import replace

import pytest

from kvbench.gate.evaluate import evaluate
from kvbench.records.run import MergedFrom
from kvbench.records.shards import Shard, Share
from kvbench.report.json import result_json
from kvbench.report.model import JudgedRun
from kvbench.report.view import build
from tests.factories.runs.made import BASE
from tests.factories.runs.timed import timed
from tests.report.test_sentences import runs


def titles(made):
    return [notice.title for notice in build(made.judged).notices]


def test_every_warning_has_a_remedy():
    found = [notice for _, made in runs() for notice in build(made.judged).notices if notice.tone == "warn"]
    assert len({notice.title for notice in found}) >= 8
    assert all(notice.remedy and notice.sentence.endswith(notice.remedy) for notice in found)


def test_a_run_without_a_gate_is_no_pass(passing):
    unjudged = passing.with_outcomes(change=lambda o: None if o.metric else o).judged
    view = build(unjudged)
    assert (view.word, view.tone, view.exit_code) == ("NOT JUDGED", "incomplete", 0)
    assert [notice.title for notice in view.notices] == ["No gate was applied"]
    assert [result_json(run)["verdict"] for run in (unjudged, passing.judged)] == ["not_judged", "pass"]
    failed = passing.with_outcomes(change=lambda o: None if o.metric else replace(o, status="fail"))
    assert (build(failed.judged).word, build(failed.judged).tone) == ("FAIL", "fail")


@pytest.mark.parametrize(("of", "found"), [("abc", True), ("other", False)])
def test_scales_calibrated_on_the_text_they_are_measured_on(passing, of, found):
    scale = {"k": [0.1], "v": [0.1], "calibrated": {"file": "s.json", "data_sha256": of}}

    def on(record):
        if record.runner != "perplexity":
            return record
        facts = {**record.facts, "data_sha": "abc"}
        return replace(record, spec={**record.spec, "scale": scale}, options={"data": "pydoc"}, facts=facts)

    made = build(passing.with_records(on).judged).notices
    assert [n.found.startswith("s.json by perplexity pydoc:") for n in made] == [True] * found


def test_a_busy_machine(passing):
    for after, found in ((3.0, []), (3.1, ["The machine was busy"])):
        load = {"latency": {"host_load": {"before": 0.5, "after": after, "cpus": 2}}}
        busy = passing.with_records(lambda r, load=load: replace(r, facts=r.facts | load.get(r.runner, {})))
        assert titles(busy) == found


def test_a_partial_run_is_marked_where_it_is_partial(passing):
    why = "limited: first 6 chunks"
    made = passing.with_records(lambda r: replace(r, partial=why) if r.runner == "perplexity" else r)
    made = made.with_rows(lambda r: replace(r, partial=why) if r.metric.startswith("ppl") else r)
    view = build(made.judged)
    partial = {table.key: {line.partial for line in table.lines} for table in view.tables}
    assert (partial["quality"], partial["latency"], titles(made)) == ({why}, {""}, ["Partial run"])


def view_of(run, **manifest):
    whole = run.run_with(**manifest)
    return build(JudgedRun(whole, run.rows(), evaluate(None, whole, run.rows())))


def test_a_shard_is_no_pass_and_merged_shards_that_differ_and_times_of_several_hosts_are_notices():
    run = timed([1.0] * 2, [1.0] * 2)
    records = run.records
    run.records = [r for r in records if r.key.endswith(BASE)]
    view = view_of(run, shard=Share(Shard(1, 2), frozenset(r.key for r in run.records)))
    assert (view.word, view.tone, view.exit_code) == ("NOT EVALUATED", "incomplete", 0)
    found = {n.title: n.tone for n in view.notices}
    assert (found["Shard 1 of 2"], "Unfinished run" in found) == ("info", False)

    def notices(*hosts, **manifest):
        run.records = [replace(r, environment={"host": hosts[r.key.endswith(BASE)]}) for r in records]
        return {notice.title: notice for notice in view_of(run, **manifest).notices}

    differ = notices("a", "a", merged=MergedFrom((), tuple(f"task {i} differs." for i in range(6))))
    assert differ["Shards differ"].tone == "warn"
    assert [f"task {i} " in differ["Shards differ"].found for i in range(6)] == [True] * 4 + [False] * 2
    assert "Times of several hosts" not in differ
    assert "b: native; <i>a</i>: int8_sym." in notices("<i>a</i>", "b")["Times of several hosts"].found
