"""`kvbench run --until-decided` on a tiny model: where it stops, what it leaves out, and that it makes no pass."""

import csv
import json
from dataclasses import replace

import pytest

from kvbench.run.task import measure
from kvbench.runners import perplexity
from tests.factories.jobs import Job

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
OPEN = TEXT.replace("[-20, 20]", "[-0.1, 0.1]")
FIRST_LOOK = [("latency", None), ("perplexity", 4), ("storage", None)]


class Until(Job):
    def __call__(self, *checks, partial="true", words=("--until-decided",), command="run"):
        """The matrix until the verdict of a gate with these checks is decided."""
        self.gate.write_text(
            "\n".join([f"allow_partial: {partial}", "checks:", *(f"  {check}" for check in checks)])
        )
        return super().__call__(*words, command=command)

    def measured(self):
        """(runner, chunks asked for) of every record, once for the two cells."""
        return sorted({(r["runner"], r["options"].get("limit_chunks")) for r in self.of()}, key=repr)

    def outcome(self, metric="ppl_delta_pct"):
        (found,) = [o for o in self.json("results.json")["outcomes"] if o["metric"] == metric]
        return found

    def spoil(self, change, **spec):
        """Change the samples of perplexity in the records."""
        for key, record in self.records(**spec).items():
            if record["runner"] == "perplexity":
                change(record["samples"]["chunks"])
                (self.out / "records" / f"{key}.json").write_text(json.dumps(record))


@pytest.fixture
def job(tmp_path):
    return Until(tmp_path, MATRIX)


def test_bytes_that_fail_stop_it_before_any_text_is_read(job):
    result = job(BYTES.replace("0.7", "0.1"), TEXT)
    assert result.exit_code == 1, result.output
    assert job.measured() == [("storage", None)]
    said = (
        "not run: the verdict was decided by kv_ratio_16bit at most 0.1 where kv_format=int8_sym "
        "after stage 0 (exact bytes)"
    )
    for text in (result.output, job.page):
        assert f"4 of 6 tasks were {said}" in text
        assert f"Tasks {said}" in text
        assert "Unfinished run" not in text
        assert "Run the same command again" not in text
    found = job.json("results.json")
    left = found["run"]["until_decided"]["not_run"]
    assert [(t["runner"], len(t["cells"])) for t in left] == [("latency", 1), ("perplexity", 1)] * 2
    late = [r for r in found["rows"] if r["metric"].startswith(("ppl", "itl"))]
    assert all(said in r["note"] and r["value"] is None for r in late)
    assert job.outcome()["status"] == "not_evaluated"
    assert job.judge().exit_code == 1


def test_a_pass_takes_every_task_and_fewer_chunks(job):
    """And what is spoiled afterwards is found: by `gate` at once, and --rerun all measures it anew."""
    result = job(BYTES, TEXT)
    assert result.exit_code == 0, result.output
    assert job.measured() == FIRST_LOOK
    found = job.json("results.json")
    looks = found["run"]["until_decided"]["looks"]["perplexity"]
    assert looks == {"option": "limit_chunks", "sizes": [4, 9], "look": 1, "of": 2, "level": 0.975}
    assert found["run"]["until_decided"]["not_run"] == []
    rows = csv.DictReader((job.out / "results_long.csv").read_text().splitlines())
    levels = {(row["metric"], row["look"], row["level"]) for row in rows if row["status"]}
    assert levels == {("ppl_delta_pct", "look 1 of 2", "0.975"), ("kv_ratio_16bit", "", "")}
    assert "perplexity was judged at look 1 of 2, at 97.5%" in result.output
    assert "(look 1 of 2, judged at 97.5%: " in job.outcome()["sentence"]
    before = job.records()
    again = job.judge()
    assert again.exit_code == 0, again.output
    assert job.json("results.json")["outcomes"] == found["outcomes"]
    assert job(BYTES, TEXT).exit_code == 0
    assert job.records() == before, "a finished run measured something again"

    job.spoil(lambda chunks: [chunk.update(nll=2 * chunk["nll"]) for chunk in chunks], kv_format="int8_sym")
    assert job.judge().exit_code == job(BYTES, TEXT).exit_code == 1
    result = job(BYTES, TEXT, words=("--until-decided", "--rerun", "all"))
    assert result.exit_code == 0, result.output
    job.spoil(lambda chunks: chunks[0].pop("nll"))
    result = job.judge()
    assert result.exit_code == 2
    assert "cannot be judged (KeyError at " in result.stderr
    assert "kvbench run MATRIX --rerun all." in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.slow
def test_what_nothing_decides_goes_to_the_whole_size_and_ends_open(job):
    result = job(BYTES, OPEN)
    assert result.exit_code == 4, result.output
    assert job.measured() == [("latency", None), ("perplexity", 4), ("perplexity", 9), ("storage", None)]
    assert job.judge().exit_code == 4
    assert (job.outcome()["look"], job.outcome()["status"]) == ("look 2 of 2", "inconclusive")
    before = job.records()
    assert job(BYTES, OPEN).exit_code == 4
    # Without the flag the whole size is there already, and is judged as ever, at 95%.
    job(BYTES, OPEN, words=("--rerun=missing",))
    assert job.records() == before
    assert (job.outcome()["look"], job.outcome()["level"]) == ("", None)


def test_a_late_failure_is_never_skipped_because_all_before_it_passed(job):
    """Of a check that is not required, which fails a verdict as any other."""
    assert job(BYTES, TEXT, "- {metric: itl_ms, at_most: 0.0001, required: false}").exit_code == 1
    assert ("latency", None) in job.measured()
    assert job.judge().exit_code == 1


@pytest.mark.slow
def test_a_check_that_is_not_required_stops_nothing(job):
    assert job(BYTES.replace("0.7}", "0.1, required: false}"), TEXT).exit_code == 1
    assert job.measured() == FIRST_LOOK


@pytest.mark.slow
def test_a_runner_that_no_check_asks_for_runs_all_the_same_and_its_guards_count(job, monkeypatch):
    honest = measure.execute

    def execute(task, *args):
        record = honest(task, *args)
        if task.runner != "latency":
            return record
        arms = [{**arm, "itl_ms": [float("nan")] * len(arm["itl_ms"])} for arm in record.samples["arms"]]
        return replace(record, samples={**record.samples, "arms": arms})

    monkeypatch.setattr(measure, "execute", execute)
    result = job(BYTES, TEXT)
    assert result.exit_code == 1, "impossible times got past, for no check asks for times"
    assert "impossible" in result.output


def test_a_gate_without_allow_partial_takes_no_small_look(job):
    assert job(BYTES, TEXT, partial="false").exit_code == 3
    assert job.measured() == [("latency", None), ("perplexity", 9), ("storage", None)]


def test_an_error_does_not_stop_it_and_grows_nothing(job, monkeypatch):
    monkeypatch.setattr(perplexity, "run", lambda ctx: 1 / 0)
    assert job(BYTES, TEXT).exit_code == 3
    assert job.measured() == FIRST_LOOK


def test_an_interrupted_run_goes_on_to_the_same_end(job, monkeypatch):
    """Interrupted with one cell of two measured at the first look."""
    honest, count, done = measure.execute, [0], 3

    def execute(*args):
        count[0] += 1
        if count[0] > done:
            raise KeyboardInterrupt
        return honest(*args)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "execute", execute)
        assert job(BYTES, TEXT).exit_code == 130
    kept = job.records()
    assert len(kept) == done
    assert job.judge().exit_code == 3, "an interrupted run is no verdict"
    assert job(BYTES, TEXT).exit_code == 0
    assert job.records().items() >= kept.items()
    assert job.measured() == FIRST_LOOK


def test_without_a_gate_there_is_nothing_to_decide(job):
    job.matrix.write_text(MATRIX.replace("gate: gate.yaml\n", ""))
    for command in ("run", "plan"):
        result = job(BYTES, command=command)
        assert result.exit_code == 2
        assert "give one: --gate FILE" in result.output
    assert not job.out.exists()


def test_the_plan_shows_stages_and_looks_and_runs_nothing(job):
    result = job(BYTES, TEXT, command="plan")
    assert result.exit_code == 0
    assert "stage 2 (text): perplexity (limit_chunks 4, 9, judged at 97.5%)" in result.output
    assert "stage" not in job(BYTES, TEXT, command="plan", words=("--rerun=missing",)).output
    assert not job.out.exists()
