"""Merging shards: what is kept, what is refused by name, what differs, what is missing."""

from dataclasses import replace

import pytest

from kvbench.errors import UsageError
from kvbench.gate.evaluate import evaluate
from kvbench.metrics.collect import derive
from kvbench.records.record import ERROR, LEVELS, NOT_EVALUATED, Level
from kvbench.records.run import CANARY, MatrixFile, RunDir, Stopped
from kvbench.records.shards import Shard, Share
from kvbench.run.merge import Part, differing, merge_runs, merged_of
from tests.factories.runs.made import MadeRun, decision, evidence, layers, storage_facts, written

IDENTITY = {"torch": "2.13.0", "device": "cpu: X"}


def made():
    own, native = ({"chunks": [{"nll": nll}]} for nll in (2.0, 1.0))
    run = MadeRun("int8_sym").measure("perplexity", (own, {}), (native, {}), variant="pydoc stream512")
    return run.measure("latency", ({"arms": [{"itl_ms": [1.0]}]}, {}), ({"arms": []}, {}))


KEYS = [f"{task}-{cell}" for task in ("perplexity-pydoc stream512", "latency-") for cell in ("base", "cand")]


def part(number, keys, run=None, **manifest):
    environment = {"host": f"h{number}", "identity": IDENTITY}
    fields = {"command": ("kvbench", "run", f"--shard {number}"), "environment": environment}
    fields["matrix"] = MatrixFile("m.yaml", "s", {"axes": {"batch": [1]}})
    fields["shard"] = Share(Shard(number, 2), frozenset(keys))
    whole = (run or made()).run_with(**fields | manifest)
    own = [replace(r, environment=environment) for r in whole.records if r.key in keys]
    return Part(f"shard {number} of 2", replace(whole, records=tuple(own)))


def with_record(own, key, **fields):
    records = [replace(r, **fields) if r.key == key else r for r in own.run.records]
    return replace(own, run=replace(own.run, records=tuple(records)))


ONE, TWO = part(1, KEYS[:2] + KEYS[2:3]), part(2, [KEYS[0], KEYS[3]])


def test_each_task_once_from_the_lowest_shard_and_nothing_else_is_overwritten(tmp_path):
    for parts in ([ONE, TWO], [TWO, ONE]):
        merged = merged_of(parts)
        assert [r.key for r in merged.run.records] == KEYS
        assert [r.environment["host"] for r in merged.run.records] == ["h1", "h1", "h1", "h2"]
        assert (merged.differences, merged.missing, merged.run.manifest.shard) == ((), (), None)
        of = [(one["shard"], one["host"]) for one in vars(merged.run.manifest.merged)["of"]]
        assert of == [({"number": n, "of": 2}, f"h{n}") for n in (1, 2)]
    assert merged_of([ONE, part(2, KEYS[:1])]).missing == ("latency on kv_format=int8_sym",)
    runs = [stored(tmp_path / "1", ONE), stored(tmp_path / "2", TWO)]
    out = tmp_path / "out"
    merge_runs(runs, out)
    assert [r.key for r in RunDir(out).load().records] == KEYS
    merge_runs([runs[0], stored(tmp_path / "3", part(2, KEYS[:1]))], out)  # again, of fewer
    assert [r.key for r in RunDir(out).load().records] == KEYS[:3]
    for taken in (runs[0], tmp_path):
        with pytest.raises(UsageError, match="not a merged run"):
            merge_runs(runs, taken)
    with pytest.raises(UsageError, match="is not a run directory"):
        merge_runs([tmp_path / "nothing", runs[0]], tmp_path / "o")


def chunk(nll):
    return {"samples": {"chunks": [{"nll": nll}]}}


def test_quality_samples_that_differ_are_named_and_times_are_not_compared():
    merged = merged_of([ONE, with_record(TWO, KEYS[0], **chunk(1.0000000000000002))])
    (said,) = merged.differences
    assert "perplexity pydoc stream512 on kv_format=native: the samples differ (chunks)" in said
    assert vars(merged.run.manifest.merged)["differences"] == (said,)
    assert merged.run.records[0].samples == chunk(1.0)["samples"]
    timed = with_record(part(2, KEYS[2:4]), KEYS[2], samples={"arms": [{"itl_ms": [9.0]}]})
    assert merged_of([ONE, timed]).differences == ()
    nans = [with_record(part(n, KEYS[:1]), KEYS[0], **chunk(float("nan"))) for n in (1, 2)]
    assert merged_of(nans).differences == ()
    # A failure of the lowest shard is kept and named.
    merged = merged_of([with_record(ONE, KEYS[0], status=NOT_EVALUATED, error={"message": "no data"}), TWO])
    assert merged.run.records[0].status == NOT_EVALUATED
    assert "one ended as not_evaluated, the other as ok" in merged.differences[0]


def changed(**manifest):
    return part(2, [KEYS[0], KEYS[3]], **manifest)


def test_what_does_not_fit_is_refused_by_name():
    for other, said in (
        (changed(matrix=MatrixFile("m.yaml", "t")), r"their matrices differ \(sha256 s and t\)"),
        (changed(matrix=MatrixFile("m.yaml", "s", {"axes": {"batch": [2]}})), r"--set .*axes.batch"),
        (changed(environment={"identity": {**IDENTITY, "torch": "2.12"}}), "torch is 2.13.0 and 2.12"),
        (changed(cells=tuple(made().cells[:1])), "their cells differ"),
        (changed(tasks=tuple(replace(t, key=t.key + "x") for t in made().tasks)), "keys of their tasks"),
        (changed(shard=Share(Shard(2, 3), frozenset(KEYS[:1]))), "of 2 shards.* of 3"),
        (changed(until_decided={}), "was run with --until-decided"),
        (changed(stopped=Stopped(CANARY, "precision", "the canary")), "--canary stopped shard 2 of 2"),
    ):
        with pytest.raises(UsageError, match=f"shard 2 of .* cannot be merged with shard 1 of 2: .*{said}"):
            merged_of([ONE, other])
    with pytest.raises(UsageError, match="two runs or more"):
        merged_of([ONE])


def stored(path, own):
    return written(own.run, path).path


def sized(number, payload, **facts):
    keys = ["storage--base", "storage--cand"]
    own, native = (layers(2, 512, 64), storage_facts(16, 2048) | facts), layers(2, payload, 0)
    return part(number, keys, MadeRun("int8_sym").measure("storage", own, (native, storage_facts(16, 2048))))


def judged(parts):
    merged = merged_of(parts)
    found = evaluate(None, merged.run, derive(merged.run))
    return found.exit_code, [o.status for o in found.outcomes if o.check == "merge"]


def shown(**fields):
    return {"evidence": {**evidence("int8_sym"), **fields}}


def levels(bad, state):
    found = (Level(name, state if name == bad else "verified", "s") for name in LEVELS)
    return {"evidence": evidence("int8_sym", *found)}


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("worse", "said"),
    [
        (levels("E2", "mismatch"), "the evidence differs (E2)"),
        (levels("E1", "unverified"), "the evidence differs (E1)"),
        (shown(effective="native"), "the evidence differs (effective)"),
        (shown(effective_weights="fp8_block128"), "the evidence differs (effective_weights)"),
        ({"decision": decision("int8_sym", "native", "fell back")}, "the decisions differ (kv_format)"),
        ({"status": ERROR, "error": {"message": "x"}}, "one ended as error, the other as ok"),
    ],
)
def test_the_copy_that_stands_worse_is_kept_whichever_shard_has_it(worse, said, number):
    parts = [sized(1, 2048), sized(2, 2048)]
    parts[number - 1] = with_record(parts[number - 1], "storage--cand", **worse)
    merged = merged_of(parts)
    assert merged.run.records[1] == parts[number - 1].run.records[1]
    (named,) = merged.differences
    assert f": {said} (shard {number} of 2, which is kept, and shard {3 - number} of 2)." in named
    code, outcomes = judged(parts)
    assert code in (1, 3)
    assert outcomes == ["inconclusive"]


def test_bytes_that_differ_are_named_and_no_gate_passes_them_though_they_are_merged_again():
    assert judged([sized(1, 2048), sized(2, 2048, load_seconds=9.0, device_peak_bytes=7)]) == (0, [])
    for a, b in ((2048, 4096), (4096, 2048)):
        parts = [sized(1, a), sized(2, b)]
        once = merged_of(parts)
        assert ": the bytes differ (layers) (" in once.differences[0]
        assert once.run.records[0].samples["layers"][0]["payload"] == 4096
        assert judged(parts) == (4, ["inconclusive"])
    both = Part("both", once.run)
    for again in ([both, parts[0]], [parts[0], both]):
        merged = merged_of(again)
        assert merged.differences == once.differences == vars(merged.run.manifest.merged)["differences"]
        assert judged(again) == (4, ["inconclusive"])


def swaps(seconds, layer_bytes):
    return {"swaps": [{"seconds": seconds, "layer_bytes": [layer_bytes]}]}


def products(us, error):
    return {"products": [{"rows": [{"us": us, "error": error}]}]}


def test_times_alone_may_differ():
    for runner, one, other, said in (
        ("transfer", swaps(1.0, 8), swaps(1.0, 9), "the bytes differ (swaps)"),
        ("transfer", swaps(1.0, 8), swaps(2.0, 8), ""),
        ("parity", {"cases": [{"max_abs": 0.0}]}, {"cases": [{"max_abs": 1}]}, "the samples differ (cases)"),
        ("gemm", products(1.0, 0.0), products(2.0, 0.0), ""),
        ("gemm", products(1.0, 0.0), products(1.0, 0.5), "the samples differ (products)"),
        ("latency", {"arms": [{"itl_ms": [1.0]}]}, {"arms": [{"itl_ms": [2.0]}]}, ""),
    ):
        measured = (one, {"a_bytes": 1, "held_bytes": 2}), ({}, {})
        record = MadeRun("int8_sym").measure(runner, *measured).records[1]
        changed = replace(record, samples=other, facts={"a_bytes": 1, "held_bytes": 3})
        assert differing(record, changed) == said
        if runner == "transfer":
            assert differing(record, replace(record, facts={"a_bytes": 2})) == "the bytes differ (a_bytes)"
