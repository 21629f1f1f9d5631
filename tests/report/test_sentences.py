"""All sentences of the report, and whole outputs of a few runs, in two reviewed files.

Other tests assert reasons and numbers. After a change `python -m tests.report.test_sentences`; read it.
"""

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from kvbench.records.run import MergedFrom, Stopped
from kvbench.records.shards import Shard, Share
from kvbench.report.console import show, show_tables
from kvbench.report.figures.page import drilldowns, figures
from kvbench.report.html import STEPS, shorter
from kvbench.report.markdown import report
from kvbench.report.view import build
from tests.factories.runs.reported import fail, make
from tests.report.test_figures import full

FOLDER = Path(__file__).parent


def quality(made, **fields):
    """The run with another outcome of its quality check."""
    return made.with_outcomes(change=lambda o: replace(o, **fields) if o.metric == "ppl_delta_pct" else o)


def runs():
    made = make()
    yield "pass", made
    yield "fail", fail(made)
    yield "inconclusive, samples known", quality(made, status="inconclusive", mde=0.4, n_needed=500_000)
    yield "inconclusive, samples unknown", quality(made, status="inconclusive", mde=0.4)
    yield "inconclusive, nothing detectable", quality(made, status="inconclusive", mde=math.inf)
    missing = {"status": "not_evaluated", "value": None}
    missing["sentence"] = "ppl_delta_pct was not measured: no data."
    yield "not evaluated", quality(made, **missing)
    yield "no gate", made.with_outcomes(change=lambda o: None if o.metric else o)
    yield "no evidence", made.with_records(lambda r: replace(r, evidence=None))
    yield "fallback", made.with_records(fallen)
    yield "no records", replace(made, records=[], rows=[])
    partial = {"mcq": "5 of 9 chunks"}
    yield "partial", made.with_records(lambda r: replace(r, partial=partial.get(r.runner)))
    fixed = {"model_weights": "random", "plumbing": True, "trust_remote_code": True, "prefill_reads": "fresh"}
    yield "unusual models", make(fixed=fixed)
    every = frozenset(task.key for task in made.manifest.tasks)
    yield "shard", made.with_manifest(shard=Share(Shard(1, 2), every))
    differ = tuple(f"task {i} differs." for i in range(6))
    yield "shards differ", made.with_manifest(merged=MergedFrom((), differ))
    stopped = replace(made, records=made.records[:-2])
    yield "stopped", stopped.with_manifest(stopped=Stopped("canary", "precision", "perplexity"))
    yield "decided early", stopped.with_manifest(stopped=Stopped("until_decided", "ppl at most 9", "mcq"))
    hosts = [replace(r, environment={"host": "ab"[i % 2]}) for i, r in enumerate(made.records)]
    yield "hosts", replace(made, records=hosts)
    load = {"before": 0.5, "after": 3.1, "cpus": 2}
    yield "busy", made.with_records(lambda r: replace(r, facts={**r.facts, "host_load": load}))


def fallen(record):
    choice = {"requested": "int8_sym", "resolved": "native", "reason": "head_dim 72", "rejected": []}
    if record.spec["kv_format"] != "int8_sym":
        return record
    evidence = {**record.evidence, "effective": "native"}
    return replace(record, decision={**record.decision, "kv_format": choice}, evidence=evidence)


def sentences(view):
    yield f"{view.word}: {view.headline}"
    yield f"release: {view.release.word}. {view.release.sentence} {'; '.join(view.release.blockers)}"
    for card in view.release.cards:
        for question, answer in card.answered:
            yield f"{question} {answer.reason}: {answer.word}. {answer.sentence}"
            yield from (f"    {point}" for point in answer.points)
            yield from (f"    {x.name} {x.shown.brief}; {x.note}" for x in answer.figures)
    yield from (f"{notice.tone}: {notice.title}. {notice.sentence}" for notice in view.notices)
    for finding in (*view.failures, *view.gaps):
        yield f"{finding.kind}: {finding.title}. {finding.why}"
        yield from (f"    {item.sentence}" for item in finding.items)


def text():
    views = [(name, build(made.judged)) for name, made in runs()]
    short = views[0][1]
    for step in STEPS:
        short = shorter(short, step)
    views.append(("shortened", short))
    parts, common = [], set()
    for name, view in views:
        lines = [line.rstrip() for line in sentences(view)]
        parts.append("\n".join((f"## {name}", *(line for line in lines if line not in common))))
        common |= set(lines)  # only what no run before has
    return "\n\n".join(parts) + "\n"


def outputs():
    """A failing run on the console and as Markdown; all tables of numbers, and what figures say."""
    failing, console = fail(make()).judged, io.StringIO()
    show(build(failing), console, [Path("runs/int8/report.html")])
    parts = [console.getvalue(), report(build(failing), failing)]
    chosen = {"requested": "auto", "resolved": "torch", "reason": "no_gpu"}
    chosen["rejected"] = [["triton", "no_gpu"]]
    made, part = make(("native", "int8_sym"), (1,), (128,), {"backend": "auto"}), {"partial": "5 of 9"}
    made = made.with_records(lambda r: replace(r, decision={**r.decision, "backend": chosen}, **part))
    shown = io.StringIO()
    show_tables(build(made.with_rows(lambda r: replace(r, **part)).judged), shown)
    parts.append(shown.getvalue())
    view = build(full(make).judged)
    for figure in figures(view):
        marks = [f"{mark} {colour} {name}" for mark, colour, name in figure.legend]
        parts.append("\n".join([f"## {figure.section}", figure.caption, *marks, *figure.sentences]))
        parts += map(grid_text, figure.grids)
    parts += [grid_text(grid) for grids in drilldowns(view).values() for grid in grids]
    lines = "\n\n".join(parts).splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def grid_text(grid):
    rows = [[c if isinstance(c, str) else f"{c.brief} {c.n}".strip() for c in row] for row in grid.rows]
    rows = map(" | ".join, rows)
    return "\n".join([grid.summary, grid.note, " | ".join(grid.columns), *rows])


REVIEWED = {"sentences.txt": text, "outputs.txt": outputs}


@pytest.mark.parametrize("name", REVIEWED)
def test_every_sentence_and_output_is_the_reviewed_one(name):
    assert REVIEWED[name]() == (FOLDER / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name, of in REVIEWED.items():
        (FOLDER / name).write_text(of(), encoding="utf-8")
