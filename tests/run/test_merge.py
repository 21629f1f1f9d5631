"""Merging shards: what is kept, what is refused by name, what differs, what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import UsageError
from kvbench.files import write_json
from kvbench.gate.evaluate import evaluate
from kvbench.metrics.collect import derive
from kvbench.records.record import ERROR, LEVELS, NOT_EVALUATED, Level, Record, RunDir
from kvbench.run.merge import Part, differing, merge_runs, merged_of
from tests.factories.made_run import MadeRun, decision, evidence, layers, storage_facts

IDENTITY = {"torch": "2.13.0", "device": "cpu: X"}


def made() -> MadeRun:
    return (
        MadeRun("int8_sym")
        .measure(
            "perplexity",
            ({"chunks": [{"nll": 2.0}]}, {}),
            ({"chunks": [{"nll": 1.0}]}, {}),
            variant="pydoc stream512",
        )
        .measure("latency", ({"arms": [{"itl_ms": [1.0]}]}, {}), ({"arms": []}, {}))
    )


KEYS = [
    f"{runner}-{cell}" for runner in ("perplexity-pydoc stream512", "latency-") for cell in ("base", "cand")
]


def part(number: int, keys: list[str], of: int = 2, **manifest: Any) -> Part:
    run = made()
    own: dict[str, Record] = {
        r.key: replace(r, environment={"host": f"h{number}", "identity": IDENTITY})
        for r in run.records
        if r.key in keys
    }
    said = {
        **run.manifest,
        "name": "m",
        "matrix": {"path": "m.yaml", "sha": "s", "source": {"axes": {"batch": [1]}}},
        "command": ["kvbench", "run", f"--shard {number}"],
        "created_at": "2026-01-01T00:00:00+00:00",
        "environment": {"host": f"h{number}", "identity": IDENTITY},
        "shard": {"number": number, "of": of, "tasks": keys},
        **manifest,
    }
    return Part(f"shard {number} of {of}", said, own)


ONE, TWO = part(1, KEYS[:2] + KEYS[2:3]), part(2, [KEYS[0], KEYS[3]])


def test_each_task_once_from_the_lowest_shard_whatever_the_order_given() -> None:
    for parts in ([ONE, TWO], [TWO, ONE]):
        merged = merged_of(parts)
        assert [r.key for r in merged.records] == KEYS
        assert [r.environment["host"] for r in merged.records] == ["h1", "h1", "h1", "h2"]
        assert (merged.differences, merged.missing) == ((), ())
        assert "shard" not in merged.manifest
        assert [of["shard"] for of in merged.manifest["merged"]["of"]] == [
            {"number": 1, "of": 2},
            {"number": 2, "of": 2},
        ]
        assert [of["host"] for of in merged.manifest["merged"]["of"]] == ["h1", "h2"]


def test_what_nobody_measured_is_named() -> None:
    assert merged_of([ONE, part(2, KEYS[:1])]).missing == ("latency on kv_format=int8_sym",)


def test_quality_samples_that_differ_are_named_and_times_are_not_compared() -> None:
    other = dict(TWO.records)
    other[KEYS[0]] = replace(other[KEYS[0]], samples={"chunks": [{"nll": 1.0000000000000002}]})
    merged = merged_of([ONE, Part(TWO.name, TWO.manifest, other)])
    (said,) = merged.differences
    assert said == (
        "perplexity pydoc stream512 on kv_format=native: the samples differ (chunks) (shard 1 of 2, which is kept, and shard 2 of 2)."
    )
    assert merged.manifest["merged"]["differences"] == [said]
    assert merged.records[0].samples == {"chunks": [{"nll": 1.0}]}
    timed = part(2, [KEYS[2], KEYS[3]])
    timed.records[KEYS[2]].samples["arms"].append({"itl_ms": [9.0]})  # type: ignore[attr-defined]
    assert merged_of([ONE, timed]).differences == ()


def test_a_failure_of_the_lowest_shard_is_kept_and_named() -> None:
    """A second measurement that worked would hide it."""
    own = dict(ONE.records)
    own[KEYS[0]] = replace(own[KEYS[0]], status=NOT_EVALUATED, error={"message": "no data"})
    merged = merged_of([Part(ONE.name, ONE.manifest, own), TWO])
    assert merged.records[0].status == NOT_EVALUATED
    assert "one ended as not_evaluated, the other as ok" in merged.differences[0]


def nan_part(number: int) -> Part:
    own = part(number, KEYS[:1])
    own.records[KEYS[0]].samples["chunks"][0]["nll"] = float("nan")
    return own


def test_equal_nans_do_not_differ() -> None:
    assert merged_of([nan_part(1), nan_part(2)]).differences == ()


def changed(**manifest: Any) -> Part:
    return part(2, [KEYS[0], KEYS[3]], **manifest)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            changed(matrix={"path": "m.yaml", "sha": "t", "source": {}}),
            r"their matrices differ \(sha256 s and t\)",
        ),
        (
            changed(matrix={"path": "m.yaml", "sha": "s", "source": {"axes": {"batch": [2]}}}),
            r"other --set words \(axes.batch\)",
        ),
        (
            changed(environment={"host": "h2", "identity": {**IDENTITY, "torch": "2.12.0"}}),
            "torch is 2.13.0 and 2.12.0; run all shards with the same versions",
        ),
        (changed(cells=made().cells[:1]), "their cells differ"),
        (
            changed(tasks=[{**t, "key": t["key"] + "x"} for t in made().tasks]),
            "the keys of their tasks differ, so model or data do",
        ),
        (changed(shard={"number": 2, "of": 3, "tasks": [KEYS[0]]}), "one is of 2 shards and the other of 3"),
        (changed(until_decided={"looks": {}, "decided": None}), "was run with --until-decided"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(other: Part, said: str) -> None:
    with pytest.raises(UsageError, match=f"shard 2 of .* cannot be merged with shard 1 of 2: .*{said}"):
        merged_of([ONE, other])


def test_one_run_is_nothing_to_merge() -> None:
    with pytest.raises(UsageError, match="nothing to merge in one run"):
        merged_of([ONE])


def stored(path: Path, own: Part) -> Path:
    write_json(path / "run.json", own.manifest)
    for record in own.records.values():
        RunDir(path).write(record)
    return path


def test_the_folder_holds_the_merged_run_and_nothing_else_is_overwritten(tmp_path: Path) -> None:
    runs = [stored(tmp_path / "1", ONE), stored(tmp_path / "2", TWO)]
    out = tmp_path / "out"
    merge_runs(runs, out)
    assert [r.key for r in RunDir(out).records()] == KEYS
    merge_runs(
        [stored(tmp_path / "1", ONE), stored(tmp_path / "3", part(2, KEYS[:1]))], out
    )  # again, of fewer
    assert [r.key for r in RunDir(out).records()] == KEYS[:3]
    for taken in (runs[0], tmp_path):
        with pytest.raises(UsageError, match="holds something that is no merged run"):
            merge_runs(runs, taken)
    with pytest.raises(UsageError, match="is not a run directory"):
        merge_runs([tmp_path / "nothing", runs[0]], tmp_path / "o")


def sized(number: int, payload: int, **facts: Any) -> Part:
    keys = ["storage--base", "storage--cand"]
    run = MadeRun("int8_sym").measure(
        "storage", (layers(2, 512, 64), storage_facts(16, 2048) | facts), (layers(2, payload, 0), storage_facts(16, 2048))
    )  # fmt: skip
    own = part(number, keys, cells=run.cells, tasks=run.tasks)
    return Part(own.name, own.manifest, {r.key: r for r in run.records})


def judged(parts: list[Part]) -> tuple[int, list[str]]:
    merged = merged_of(parts)
    rows = derive(merged.manifest, merged.records)
    found = evaluate(None, merged.manifest, merged.records, rows)
    return found.exit_code, [o.status for o in found.outcomes if o.check == "merge"]


def shown(**fields: Any) -> dict[str, Any]:
    return {**evidence("int8_sym"), **fields}


LOST = evidence(
    "int8_sym", *(Level(name, "mismatch" if name == "E2" else "verified", "s") for name in LEVELS)
)
UNSEEN = evidence(
    "int8_sym", *(Level(name, "unverified" if name == "E1" else "verified", "s") for name in LEVELS)
)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize(
    ("worse", "said"),
    [
        ({"evidence": LOST}, "the evidence differs (E2)"),
        ({"evidence": UNSEEN}, "the evidence differs (E1)"),
        ({"evidence": shown(effective="native")}, "the evidence differs (effective)"),
        ({"evidence": shown(effective_weights="fp8_block128")}, "the evidence differs (effective_weights)"),
        ({"decision": decision("int8_sym", "native", "fell back")}, "the decisions differ (kv_format)"),
        ({"status": ERROR, "error": {"type": "OSError", "message": "x", "tail": []}}, "one ended as error, the other as ok"),
    ],
)  # fmt: skip
def test_the_copy_that_stands_worse_is_kept_whichever_shard_has_it(
    worse: dict[str, Any], said: str, number: int
) -> None:
    parts = [sized(1, 2048), sized(2, 2048)]
    good = parts[number - 1]
    bad = replace(good.records["storage--cand"], **worse)
    parts[number - 1] = replace(good, records={**good.records, bad.key: bad})
    merged = merged_of(parts)
    assert merged.records[1] == bad
    (named,) = merged.differences
    assert f": {said} (shard {number} of 2, which is kept, and shard {3 - number} of 2)." in named
    code, outcomes = judged(parts)
    assert code in (1, 3)
    assert outcomes == ["inconclusive"]


def test_bytes_that_differ_are_named_and_no_gate_passes_them() -> None:
    assert judged([sized(1, 2048), sized(2, 2048, load_seconds=9.0, device_peak_bytes=7)]) == (0, [])
    for parts in ([sized(1, 2048), sized(2, 4096)], [sized(1, 4096), sized(2, 2048)]):
        merged = merged_of(parts)
        assert ": the bytes differ (layers) (" in merged.differences[0]
        assert merged.records[0].samples["layers"][0]["payload"] == 4096
        assert judged(parts) == (4, ["inconclusive"])


def test_what_differed_is_not_forgotten_by_merging_again() -> None:
    a, b = sized(1, 4096), sized(2, 2048)
    once = merged_of([a, b])
    both = Part("both", once.manifest, {r.key: r for r in once.records})
    for parts in ([both, a], [a, both]):
        again = merged_of(parts)
        assert again.differences == once.differences
        assert again.manifest["merged"]["differences"] == list(once.differences)
        assert judged(parts) == (4, ["inconclusive"])


@pytest.mark.parametrize(
    ("runner", "one", "other", "said"),
    [
        ("transfer", {"swaps": [{"seconds": 1.0, "layer_bytes": [8]}]}, {"swaps": [{"seconds": 1.0, "layer_bytes": [9]}]}, "the bytes differ (swaps)"),
        ("transfer", {"swaps": [{"seconds": 1.0, "layer_bytes": [8]}]}, {"swaps": [{"seconds": 2.0, "layer_bytes": [8]}]}, ""),
        ("parity", {"cases": [{"max_abs": 0.0}]}, {"cases": [{"max_abs": 0.5}]}, "the samples differ (cases)"),
        ("gemm", {"products": [{"rows": [{"us": 1.0, "error": 0.0}]}]}, {"products": [{"rows": [{"us": 2.0, "error": 0.0}]}]}, ""),
        ("gemm", {"products": [{"rows": [{"us": 1.0, "error": 0.0}]}]}, {"products": [{"rows": [{"us": 1.0, "error": 0.5}]}]}, "the samples differ (products)"),
        ("latency", {"arms": [{"itl_ms": [1.0]}]}, {"arms": [{"itl_ms": [2.0]}]}, ""),
    ],
)  # fmt: skip
def test_times_alone_may_differ(runner: str, one: dict[str, Any], other: dict[str, Any], said: str) -> None:
    record = MadeRun("int8_sym").measure(runner, (one, {"a_bytes": 1, "held_bytes": 2}), ({}, {})).records[1]
    assert differing(record, replace(record, samples=other, facts={"a_bytes": 1, "held_bytes": 3})) == said
    if runner == "transfer":
        assert differing(record, replace(record, facts={"a_bytes": 2})) == "the bytes differ (a_bytes)"
