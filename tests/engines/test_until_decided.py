"""`kvbench run --until-decided` on a tiny model: where it stops, what it leaves out, and that it makes no pass."""

import csv
import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli.main import app

MATRIX = """\
name: tiny
model: {source: tiny-llama, plumbing: true}
axes:
  kv_format: [native, int8_sym]
engine: {context: 20}
runners:
  latency: {new_tokens: 3, repeats: 1, warmup: 0}
  perplexity: {data: pydoc, limit_chunks: 9, kld: false}
  storage: {}
gate: gate.yaml
"""
BYTES = "- {metric: kv_ratio_16bit, where: {kv_format: int8_sym}, at_most: 0.7}"
TEXT = "- {metric: ppl_delta_pct, where: {kv_format: int8_sym}, within: [-20, 20]}"

Job = Callable[..., Any]


@pytest.fixture
def job(tmp_path):
    """job(*checks): the matrix above until that gate's verdict is decided, in this process."""
    (tmp_path / "m.yaml").write_text(MATRIX)

    def go(*checks, partial="true", flag="--until-decided", command="run"):
        text = "\n".join([f"allow_partial: {partial}", "checks:", *(f"  {check}" for check in checks)])
        (tmp_path / "gate.yaml").write_text(text)
        words = [command, str(tmp_path / "m.yaml"), "--out", str(tmp_path / "out"), flag]
        return CliRunner().invoke(app, words, env={"COLUMNS": "200"})

    return go


def judged_again(tmp_path):
    return CliRunner().invoke(app, ["gate", str(tmp_path / "out")], env={"COLUMNS": "200"})


def results(tmp_path):
    return json.loads((tmp_path / "out" / "results.json").read_text())


def records(tmp_path):
    return {p.name: json.loads(p.read_text()) for p in (tmp_path / "out" / "records").glob("*.json")}


def measured(tmp_path):
    """(runner, chunks asked for) of every record, once for the two cells."""
    return sorted(
        {(r["runner"], r["options"].get("limit_chunks")) for r in records(tmp_path).values()}, key=repr
    )


def test_bytes_that_fail_stop_it_before_any_text_is_read(job, tmp_path):
    result = job(BYTES.replace("0.7", "0.1"), TEXT)
    assert result.exit_code == 1, result.output
    assert measured(tmp_path) == [("storage", None)]
    said = (
        "not run: the verdict was decided by kv_ratio_16bit at most 0.1 where kv_format=int8_sym "
        "after stage 0 (exact bytes)"
    )
    page = (tmp_path / "out" / "report.html").read_text()
    for text in (result.output, page):
        assert f"4 of 6 tasks were {said}" in text
        assert f"Tasks {said}" in text
        assert "Unfinished run" not in text
        assert "Run the same command again" not in text
    found = results(tmp_path)
    left = found["run"]["until_decided"]["not_run"]
    assert [(t["runner"], len(t["cells"])) for t in left] == [("latency", 1), ("perplexity", 1)] * 2
    assert all(
        said in r["note"] and r["value"] is None
        for r in found["rows"]
        if r["metric"].startswith(("ppl", "itl"))
    )
    (text_check,) = [o for o in found["outcomes"] if o["metric"] == "ppl_delta_pct"]
    assert text_check["status"] == "not_evaluated"
    assert judged_again(tmp_path).exit_code == 1


def test_a_pass_takes_every_task_and_fewer_chunks(job, tmp_path):
    result = job(BYTES, TEXT)
    assert result.exit_code == 0, result.output
    assert measured(tmp_path) == [("latency", None), ("perplexity", 4), ("storage", None)]
    found = results(tmp_path)
    looks = found["run"]["until_decided"]["looks"]["perplexity"]
    assert looks == {"option": "limit_chunks", "sizes": [4, 9], "look": 1, "of": 2, "level": 0.975}
    assert found["run"]["until_decided"]["not_run"] == []
    rows = csv.DictReader((tmp_path / "out" / "results_long.csv").read_text().splitlines())
    levels = {(row["metric"], row["look"], row["level"]) for row in rows if row["status"]}
    assert levels == {("ppl_delta_pct", "look 1 of 2", "0.975"), ("kv_ratio_16bit", "", "")}
    assert "perplexity was judged at look 1 of 2, at 97.5%" in result.output
    (outcome,) = [o for o in found["outcomes"] if o["metric"] == "ppl_delta_pct"]
    assert "(look 1 of 2, judged at 97.5%: " in outcome["sentence"]
    before = records(tmp_path)
    again = judged_again(tmp_path)
    assert again.exit_code == 0, again.output
    assert results(tmp_path)["outcomes"] == found["outcomes"]
    assert job(BYTES, TEXT).exit_code == 0
    assert records(tmp_path) == before, "a finished run measured something again"


@pytest.mark.slow
def test_what_nothing_decides_goes_to_the_whole_size_and_ends_open(job, tmp_path):
    result = job(BYTES, TEXT.replace("[-20, 20]", "[-0.1, 0.1]"))
    assert result.exit_code == 4, result.output
    assert measured(tmp_path) == [("latency", None), ("perplexity", 4), ("perplexity", 9), ("storage", None)]
    assert judged_again(tmp_path).exit_code == 4
    (outcome,) = [o for o in results(tmp_path)["outcomes"] if o["metric"] == "ppl_delta_pct"]
    assert (outcome["look"], outcome["status"]) == ("look 2 of 2", "inconclusive")
    before = records(tmp_path)
    assert job(BYTES, TEXT.replace("[-20, 20]", "[-0.1, 0.1]")).exit_code == 4
    assert records(tmp_path) == before
    # Without the flag the whole size is there already, and is judged as ever, at 95%.
    job(BYTES, TEXT.replace("[-20, 20]", "[-0.1, 0.1]"), flag="--rerun=missing")
    assert records(tmp_path) == before
    (plain,) = [o for o in results(tmp_path)["outcomes"] if o["metric"] == "ppl_delta_pct"]
    assert (plain["look"], plain["level"]) == ("", None)


def test_a_late_failure_is_never_skipped_because_all_before_it_passed(job, tmp_path):
    """Of a check that is not required, which fails a verdict as any other."""
    assert job(BYTES, TEXT, "- {metric: itl_ms, at_most: 0.0001, required: false}").exit_code == 1
    assert ("latency", None) in measured(tmp_path)
    assert judged_again(tmp_path).exit_code == 1


@pytest.mark.slow
def test_a_check_that_is_not_required_stops_nothing(job, tmp_path):
    result = job(BYTES.replace("0.7}", "0.1, required: false}"), TEXT)
    assert result.exit_code == 1
    assert measured(tmp_path) == [("latency", None), ("perplexity", 4), ("storage", None)]


@pytest.mark.slow
def test_a_runner_that_no_check_asks_for_runs_all_the_same_and_its_guards_count(job, tmp_path, monkeypatch):
    from dataclasses import replace

    from kvbench.run.task import measure as session

    honest = session.execute

    def execute(task, *args):
        record = honest(task, *args)
        if task.runner != "latency":
            return record
        arms = [{**arm, "itl_ms": [float("nan")] * len(arm["itl_ms"])} for arm in record.samples["arms"]]
        return replace(record, samples={**record.samples, "arms": arms})

    monkeypatch.setattr(session, "execute", execute)
    result = job(BYTES, TEXT)
    assert result.exit_code == 1, "impossible times got past, for no check asks for times"
    assert "impossible" in result.output


def test_a_gate_without_allow_partial_takes_no_small_look(job, tmp_path):
    assert job(BYTES, TEXT, partial="false").exit_code == 3
    assert measured(tmp_path) == [("latency", None), ("perplexity", 9), ("storage", None)]


def test_an_error_does_not_stop_it_and_grows_nothing(job, tmp_path, monkeypatch):
    from kvbench.runners import perplexity

    def run(ctx):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(perplexity, "run", run)
    assert job(BYTES, TEXT).exit_code == 3
    assert measured(tmp_path) == [("latency", None), ("perplexity", 4), ("storage", None)]


def test_an_interrupted_run_goes_on_to_the_same_end(job, tmp_path, monkeypatch):
    """Interrupted with one cell of two measured at the first look."""
    from kvbench.run.task import measure as session

    honest, count, done = session.execute, [0], 3

    def execute(*args):
        count[0] += 1
        if count[0] > done:
            raise KeyboardInterrupt
        return honest(*args)

    with monkeypatch.context() as patch:
        patch.setattr(session, "execute", execute)
        assert job(BYTES, TEXT).exit_code == 130
    kept = records(tmp_path)
    assert len(kept) == done
    assert judged_again(tmp_path).exit_code == 3, "an interrupted run is no verdict"
    assert job(BYTES, TEXT).exit_code == 0
    after = records(tmp_path)
    assert {name: after[name] for name in kept} == kept
    assert measured(tmp_path) == [("latency", None), ("perplexity", 4), ("storage", None)]


def test_without_a_gate_there_is_nothing_to_decide(job, tmp_path):
    (tmp_path / "m.yaml").write_text(MATRIX.replace("gate: gate.yaml\n", ""))
    for command in ("run", "plan"):
        result = job(BYTES, command=command)
        assert result.exit_code == 2
        assert "give one: --gate FILE" in result.output
    assert not (tmp_path / "out").exists()


def test_the_plan_shows_stages_and_looks_and_runs_nothing(job, tmp_path):
    result = job(BYTES, TEXT, command="plan")
    assert result.exit_code == 0
    assert "stage 2 (text): perplexity (limit_chunks 4, 9, judged at 97.5%)" in result.output
    assert "stage" not in job(BYTES, TEXT, command="plan", flag="--rerun=missing").output
    assert not (tmp_path / "out").exists()


def test_what_is_measured_anew_decides_nothing_before_it_is(job, tmp_path):
    """A spoiled record of a later stage: --rerun all measures it, and ends as a fresh run does."""
    assert job(BYTES, TEXT).exit_code == 0
    for path in (tmp_path / "out" / "records").glob("*.json"):
        record = json.loads(path.read_text())
        if record["runner"] == "perplexity" and record["spec"]["kv_format"] == "int8_sym":
            for chunk in record["samples"]["chunks"]:
                chunk["nll"] *= 2
            path.write_text(json.dumps(record))
    assert judged_again(tmp_path).exit_code == 1
    assert job(BYTES, TEXT, flag="--until-decided").exit_code == 1
    words = [
        "run",
        str(tmp_path / "m.yaml"),
        "--out",
        str(tmp_path / "out"),
        "--until-decided",
        "--rerun",
        "all",
    ]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output


def test_a_damaged_record_ends_in_a_sentence_that_says_where(job, tmp_path):
    assert job(BYTES, TEXT).exit_code == 0
    for path in (tmp_path / "out" / "records").glob("*.json"):
        record = json.loads(path.read_text())
        if record["runner"] == "perplexity":
            del record["samples"]["chunks"][0]["nll"]
            path.write_text(json.dumps(record))
    result = judged_again(tmp_path)
    assert result.exit_code == 2
    assert "cannot be judged (KeyError at " in result.stderr
    assert "kvbench run MATRIX --rerun all." in result.stderr
    assert "Traceback" not in result.output
