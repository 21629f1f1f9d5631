"""Gate policies that load; tests/matrix/mistakes.txt has what is refused."""

import math
from pathlib import Path

import pytest

from kvbench.gate.policy import load
from kvbench.metrics.collect import METRICS


def gate_of(tmp_path, text):
    path = tmp_path / "g.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def one(tmp_path, check):
    return gate_of(tmp_path, f"checks:\n  - {check}\n")


def test_a_whole_policy(tmp_path):
    gate = gate_of(
        tmp_path,
        """
name: int8 release
allow_partial: true
checks:
  - metric: kv_ratio_16bit
    where: {kv_format: int8_sym}
    equals: 0.515625
    why: (64 + 2) / 128
  - {metric: ppl_delta_pct, where: {variant: wikitext2 stream512}, within: [-1, 1], required: false}
""",
    )
    assert (gate.name, gate.allow_partial, gate.allow_fallback) == ("int8 release", True, False)
    first, second = gate.checks
    assert (first.metric, first.low, first.high, first.why, first.required) == (
        "kv_ratio_16bit", 0.515625, 0.515625, "(64 + 2) / 128", True,
    )  # fmt: skip
    assert (first.name, first.line) == ("kv_ratio_16bit exactly 0.515625 where kv_format=int8_sym", 5)
    assert (second.low, second.high, second.limit, second.required) == (-1, 1, "within [-1, 1]", False)


def test_defaults(tmp_path):
    gate = gate_of(tmp_path, "checks: []")
    assert (gate.name, gate.evidence) == ("g", "E5")
    assert gate_of(tmp_path, "evidence: E3\nchecks: []").evidence == "E3"


def test_a_check_names_what_it_picks_as_a_matrix_writes_it(tmp_path):
    where = "{kv_splits: null, plumbing: true, scale: 0.05, batch: 8}"
    (check,) = one(tmp_path, f"{{metric: itl_ratio, where: {where}, at_most: 1}}").checks
    assert check.name == "itl_ratio at most 1 where kv_splits=null, plumbing=true, scale=0.05, batch=8"


@pytest.mark.parametrize(
    ("predicate", "low", "high", "limit"),
    [
        ("at_most: 1e-5", -math.inf, 1e-5, "at most 1e-05"),
        ("at_most: 1e5", -math.inf, 1e5, "at most 100000"),
        ("at_least: 0.5", 0.5, math.inf, "at least 0.5"),
        ("equals: 0", 0, 0, "exactly 0"),
        ("equals: {value: 2, tolerance: 0.5}", 1.5, 2.5, "2 +- 0.5"),
        ("within: [0, 3]", 0, 3, "within [0, 3]"),
    ],
)
def test_predicates(tmp_path, predicate, low, high, limit):
    (check,) = one(tmp_path, f"{{metric: kld_mean, {predicate}}}").checks
    assert (check.low, check.high, check.limit) == (low, high, limit)


def test_the_policies_of_the_project_load():
    folder = Path(__file__).parents[2] / "gates"
    gates = [load(path) for path in sorted(folder.glob("*.yaml"))]
    assert {"int8", "smoke"} <= {gate.path.stem for gate in gates if gate.path}
    for gate in gates:
        assert gate.checks
        assert all(check.why and check.metric in METRICS for check in gate.checks)


@pytest.mark.parametrize("kind", ["calibrated", "file"])
def test_a_check_picks_the_cells_whose_scales_a_file_gave_by_its_name(tmp_path, kind):
    (check,) = one(tmp_path, "{metric: kld_mean, where: {scale: scales/mine.json}, at_most: 1}").checks
    held = {"k": [0.1], "v": [0.1], kind: {"file": "mine.json", "sha": "a"}}
    assert check.picks({"scale": held})
    assert not check.picks({"scale": {**held, kind: {"file": "other.json", "sha": "a"}}})
    assert not check.picks({"scale": {"k": [0.1], "v": [0.1]}})
    assert not check.picks({"scale": 0.05})
    (check,) = one(tmp_path, "{metric: kld_mean, where: {scale: checkpoint}, at_most: 1}").checks
    assert check.picks({"scale": "checkpoint"})
    assert not check.picks({"scale": held})
