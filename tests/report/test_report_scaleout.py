"""What the report says of a shard, of a merged run whose shards differ, and of times of several hosts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvbench.gate.evaluate import evaluate
from kvbench.metrics.collect import METRICS
from kvbench.records.run import MergedFrom
from kvbench.records.shards import Shard, Share
from kvbench.report.model import JudgedRun
from kvbench.report.view import View, build
from tests.factories.runs.made import BASE, MadeRun
from tests.factories.runs.timed import timed


def view_of(run: MadeRun, **manifest: Any) -> View:
    whole = run.run_with(**manifest)
    judged = JudgedRun(whole, run.rows(), evaluate(None, whole, run.rows()))
    return build(judged, {name: m.definition for name, m in METRICS.items()})


def notice(view: View, title: str) -> tuple[str, str]:
    ((tone, sentence),) = [(n.tone, n.sentence) for n in view.notices if n.title == title]
    return tone, sentence


def test_a_shard_says_that_it_is_one_and_is_no_pass() -> None:
    run = timed([1.0] * 2, [1.0] * 2)
    keys = [r.key for r in run.records if r.key.endswith(BASE)]
    run.records = [r for r in run.records if r.key in keys]
    view = view_of(run, shard=Share(Shard(1, 2), frozenset(keys)))
    tone, sentence = notice(view, "Shard 1 of 2")
    assert tone == "info"
    assert sentence.startswith("1 of 2 tasks are measured here;")
    assert "kvbench merge RUN RUN... --out DIR" in sentence
    assert (view.word, view.tone, view.exit_code) == ("NOT EVALUATED", "incomplete", 0)
    assert "Unfinished run" not in {n.title for n in view.notices}


def test_shards_that_differ_are_named() -> None:
    said = [f"task {i}: the samples differ (chunks)." for i in range(6)]
    tone, sentence = notice(
        view_of(timed([1.0] * 2, [1.0] * 2), merged=MergedFrom((), tuple(said))), "Shards differ"
    )
    assert tone == "warn"
    assert sentence.startswith(" ".join(said[:4]) + " And 2 more. ")


def test_times_of_several_hosts_are_told_apart() -> None:
    run = timed([1.0] * 2, [1.0] * 2)
    one = [replace(r, environment={"host": "a"}) for r in run.records]
    titles = {n.title for n in view_of(replace_records(run, one)).notices}
    assert "Times of several hosts" not in titles
    two = [replace(r, environment={"host": "b" if r.key.endswith(BASE) else "<i>a</i>"}) for r in run.records]
    tone, sentence = notice(view_of(replace_records(run, two)), "Times of several hosts")
    assert tone == "warn"
    assert "b: native; <i>a</i>: int8_sym." in sentence  # the page escapes it


def replace_records(run: MadeRun, records: Any) -> MadeRun:
    run.records = records
    return run
