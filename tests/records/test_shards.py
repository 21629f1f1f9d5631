"""Shares of a matrix: what each measures, that together they are the whole, and how one is judged alone."""

import math
from dataclasses import replace

import pytest

from kvbench.errors import UsageError
from kvbench.files import write_json
from kvbench.gate import evaluate as gates
from kvbench.gate.policy import Check
from kvbench.matrix.load import load
from kvbench.metrics.collect import derive
from kvbench.records import shards
from kvbench.records.run import RunDir
from kvbench.records.shards import Shard, Share
from kvbench.run.execute import manifest_of
from tests.factories.runs.made import CAND, MadeRun, layers, storage_facts

SHARE = {"number": 1, "of": 2}
AXES = "kv_format: [native, int8_sym], batch: [1, 2], context: [20, 40, 60]"


@pytest.fixture
def matrix(tmp_path):
    def make(axes=AXES, runners="latency: {}, storage: {}, perplexity: {}"):
        text = f"model: {{source: tiny-llama, plumbing: true}}\naxes: {{{axes}}}\nrunners: {{{runners}}}\n"
        (tmp_path / "m.yaml").write_text(f"name: m\n{text}")
        return load(tmp_path / "m.yaml")

    return make


@pytest.fixture
def three(matrix):
    return matrix("kv_format: [native, int8_sym, fp8_e4m3], batch: 1, context: 32", "perplexity: {}")


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", "", "١/٢"])
def test_what_is_no_share(text):
    with pytest.raises(UsageError, match="use N/M"):
        shards.parse(text)
    assert shards.parse("2/3") == Shard(2, 3)


@pytest.mark.parametrize("of", [1, 2, 3, 4])
@pytest.mark.parametrize(("runners", "line"), [("latency: {}", 3), ("storage: {}, parity: {}", 1)])
def test_together_they_are_the_whole_and_cells_belong_to_one(matrix, runners, line, of):
    m = matrix(AXES.replace("batch: [1, 2]", "batch: [1, 2, 3, 4]"), f"{runners}, perplexity: {{}}")
    every = [shards.cells_of(m.cells, m.tasks, Shard(i, of)) for i in range(1, of + 1)]
    assert sorted(c.id for own in every for c in own) == sorted(c.id for c in m.cells)
    shares = [shards.share_of(m.cells, m.tasks, Shard(i, of)).tasks for i in range(1, of + 1)]
    assert frozenset().union(*shares) == {task.key for task in m.tasks}
    baselines = {task.key for task in m.tasks if task.baseline is None}
    assert {task.key for task in m.tasks if sum(task.key in share for share in shares) > 1} <= baselines
    assert max(map(len, every)) - min(map(len, every)) <= 2 * line


def test_shares_have_the_baselines_of_their_tasks_and_whole_lines(three, matrix):
    native, int8, fp8 = three.tasks
    found = [shards.share_of(three.cells, three.tasks, Shard(i, 2)) for i in (1, 2)]
    assert [share.tasks for share in found] == [{native.key, int8.key}, {native.key, fp8.key}]
    lines = shards.outline(found[1], three.cells, three.tasks)
    assert lines[0] == "  shard 2 of 2: 1 of 3 cells, 2 of 3 tasks"
    assert [line.endswith("(a baseline of its tasks)") for line in lines[2:]] == [True, False]
    assert all(task.key in "".join(lines) for task in (native, fp8))
    m = matrix()
    for i in (1, 2):
        own = shards.cells_of(m.cells, m.tasks, Shard(i, 2))
        assert [(c.spec["kv_format"], c.spec["batch"], c.spec["context"]) for c in own] == [
            (kv, i, context) for kv in ("native", "int8_sym") for context in (20, 40, 60)
        ]
    assert [len(unit) for unit in shards.units(m.cells, m.tasks)] == [3] * 4
    for other in (matrix(runners="storage: {}"), matrix(AXES.replace("20, 40, 60", "20, 40"))):
        assert {len(unit) for unit in shards.units(other.cells, other.tasks)} == {1}  # no line there
    with pytest.raises(UsageError, match=r"shard 3 of 3 has no cell.* at most 2 shards"):
        shards.share_of(m.cells, m.tasks, Shard(3, 3))


def made():
    run, facts, nothing = MadeRun("int8_sym"), storage_facts(16, 131072), ({"chunks": []}, {})
    run.measure("storage", (layers(2, 32768, 512), facts), (layers(2, 65536, 0), facts))
    return run.measure("perplexity", nothing, nothing, variant="pydoc stream512")


def share_of(run, keys, records):
    """The run of a share that measures these tasks, with the records that it has of them."""
    whole = run.run_with(shard=Share(Shard(1, 2), frozenset(keys)))
    return replace(whole, records=tuple(records))


GATE = """\
name: g
allow_partial: true
checks:
- {metric: kv_ratio_16bit, where: {kv_format: int8_sym}, at_most: LIMIT, why: bytes}
- {metric: ppl_delta_pct, where: {kv_format: int8_sym}, within: [-1, 1], why: text}
"""


def verdict_of(tmp_path, run, limit="0.9"):
    (tmp_path / "gate.yaml").write_text(GATE.replace("LIMIT", limit))
    return gates.evaluate(gates.load(tmp_path / "gate.yaml"), run, derive(run))


def test_a_share_is_no_pass_for_what_others_measure_and_a_failure_is_its_own(tmp_path):
    run = made()
    storage = [r for r in run.records if r.runner == "storage"]
    verdict = verdict_of(tmp_path, share_of(run, {r.key for r in storage}, storage))
    assert (verdict.exit_code, verdict.word, verdict.whole) == (0, "not_evaluated", False)
    assert verdict.outcomes[0].sentence == (
        "shard 1 of 2: 2 of 4 tasks are measured here; the run is judged after `kvbench merge` of all shards."
    )
    others = [o for o in verdict.outcomes if o.metric == "ppl_delta_pct" or o.check == "not run"]
    assert {(o.status, o.required) for o in others} == {("not_evaluated", False)}
    assert all("not run in shard 1 of 2" in o.sentence for o in others)
    whole = verdict_of(tmp_path, replace(run.run, records=tuple(storage)))
    assert (whole.exit_code, whole.word) == (3, "not_evaluated")  # as a whole run they lack something
    run = made()
    storage = [r for r in run.records if r.runner == "storage"]
    keys = {r.key for r in storage}
    verdict = verdict_of(tmp_path, share_of(run, keys, storage), limit="0.1")
    assert (verdict.exit_code, verdict.word) == (1, "fail")
    error = {"type": "X", "message": "x", "tail": []}
    broken = [replace(r, status="error", error=error) if r.key.endswith(CAND) else r for r in storage]
    assert verdict_of(tmp_path, share_of(run, keys, broken)).exit_code == 3
    assert verdict_of(tmp_path, share_of(run, keys, storage[:1])).exit_code == 3  # interrupted
    # The candidate's cell is another's altogether: its precision is not shown here, and none of the gate's
    # checks is evaluated. What is still to be measured counts in Holm's correction: a failure that holds here
    # must hold in the whole.
    run = made()
    run = share_of(run, {"storage--base"}, run.records[:1])
    verdict = verdict_of(tmp_path, run)
    found = [o for o in verdict.outcomes if o.check in ("precision", "gate") and o.status != "pass"]
    assert (verdict.exit_code, [o.required for o in found]) == (0, [False, False])
    check = Check("kv_ratio_16bit", {}, -math.inf, 0.9, "bytes")
    cases = [case for case in gates._check(check, run, derive(run)) if isinstance(case, gates._Case)]
    assert [(case.cells, case.waiting) for case in cases] == [(("base",), False), (("cand",), True)]


@pytest.mark.parametrize("shard", [SHARE | {"tasks": ["x"]}, {"number": 1}, "1/2", SHARE | {"tasks": []}])
def test_a_damaged_share_is_told(tmp_path, shard, matrix):
    m, run_dir = matrix(), RunDir(tmp_path / "run")
    good = replace(manifest_of(m, {}, []), shard=shards.share_of(m.cells, m.tasks, Shard(1, 2)))
    run_dir.write_manifest(good)
    assert run_dir.manifest() == good
    assert good.not_run == "not run in shard 1 of 2"
    write_json(run_dir.manifest_path, {**good.to_dict(), "shard": shard})
    with pytest.raises(UsageError, match="is damaged: shard does not fit its tasks"):
        run_dir.manifest()
