"""`kvbench history`: lines over runs, where they break, what is marked as a change."""

from dataclasses import replace

from kvbench.compare.history import history
from kvbench.compare.result import WORSE
from kvbench.compare.two_runs import compare
from tests.factories.runs.compared import DIGESTS, latency, perplexity, stored


def runs_of(*runs, envs=()):
    given = enumerate(zip(runs, envs or ({},) * len(runs), strict=True), start=1)
    return [stored(run, f"run {i}", env) for i, (run, env) in given]


def line(result, metric, place="int8_sym"):
    (found,) = [x for x in result.lines if x.metric == metric and x.place == place]
    return found


def test_the_run_that_is_slower_than_the_one_before_is_marked():
    ratios = (1.05, 1.05, 1.12, 1.12, 1.12)
    result = history(runs_of(*(latency(x, repeats=30, seed=i) for i, x in enumerate(ratios))))
    points = line(result, "itl_ratio").points
    assert [(x.metric, point.run) for x, point in result.changes] == [("itl_ratio", 2)]
    assert [point.run for point in points if point.changed] == [2]
    assert (points[2].change.outcome, points[2].change.runs) == (WORSE, ("run 2", "run 3"))
    assert [point.change.family for point in points[1:]] == [8] * 4  # all neighbours, and four of native
    # The time by itself has no mark of its own: its change is beside native.
    assert all(point.change is None for point in line(result, "itl_ms").points)
    assert all(point.row.low is not None for point in points)


def test_a_change_is_what_compare_calls_it():
    runs = runs_of(perplexity([210.0, 211, 212, 213]), perplexity([214.0, 215, 216, 217.2]))
    change = line(history(runs), "ppl").points[1].change
    assert [change] == [f for f in compare(runs).findings if f.metric == "ppl" and f.cell == "cand"]


def test_unlike_neighbours_break_the_line():
    first, second, third = runs_of(*(perplexity([210.0] * 4) for _ in range(3)))
    other = {**DIGESTS, "model": "sha256:other"}
    tasks = tuple(replace(task, digests=other) for task in third.run.tasks)
    third = replace(third, run=replace(third.run, manifest=replace(third.run.manifest, tasks=tasks)))
    found = line(history([first, second, third]), "ppl")
    assert [len(segment) for segment in found.segments] == [2, 1]
    assert found.points[2].change is None
    assert found.points[2].broken == ("the model is sha256:m in run 2 and sha256:other in run 3",)
    for cell in second.run.manifest.cells:
        cell.spec["page_size"] = 32
    found = line(history([first, second]), "ppl")
    assert [len(segment) for segment in found.segments] == [1, 1]
    assert "page_size is 16 in run 1 and 32 in run 2" in found.points[1].broken[0]


def test_another_machine_breaks_times_and_leaves_quality_joined():
    def run():
        both = latency()
        text = perplexity([210.0] * 4)
        both.tasks += [replace(task, spec=both.tasks[i].spec) for i, task in enumerate(text.tasks)]
        both.records += [replace(r, spec=both.records[i].spec) for i, r in enumerate(text.records)]
        return both

    result = history(runs_of(run(), run(), envs=({}, {"cpu": "Other"})))
    assert len(line(result, "itl_ratio").segments) == 2
    assert "times of two machines" in line(result, "itl_ratio").points[1].broken[0]
    assert len(line(result, "ppl").segments) == 1
    assert line(result, "ppl").points[1].change is not None


def test_a_run_without_the_work_is_passed_over():
    runs = runs_of(perplexity([210.0] * 4), latency(), perplexity([210.0] * 4))
    for run in runs:
        for cell in run.run.manifest.cells:
            cell.spec.update({"batch": 1, "context": 128})
    found = line(history(runs), "ppl")
    assert [point.run for point in found.points] == [0, 2]
    assert found.points[1].change.runs == ("run 1", "run 3")


def test_only_and_chosen_cells():
    runs = runs_of(latency(), latency(seed=1))
    result = history(runs, [{"cand"}, {"cand"}], ["ttft_ratio"])
    assert [(x.metric, x.place) for x in result.lines] == [("ttft_ratio", "int8_sym")]
    assert line(result, "ttft_ratio").points[1].change is not None
