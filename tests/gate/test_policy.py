"""Reading gate policies: what is accepted, and a sentence with its place for everything else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvbench.errors import UsageError
from kvbench.gate.policy import Gate, load
from kvbench.metrics.collect import METRICS


def gate_of(tmp_path: Path, text: str) -> Gate:
    path = tmp_path / "g.yaml"
    path.write_text(text, encoding="utf-8")
    return load(path)


def one(tmp_path: Path, check: str) -> Gate:
    return gate_of(tmp_path, f"checks:\n  - {check}\n")


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        gate_of(tmp_path, text)
    return str(caught.value)


def test_a_whole_policy(tmp_path: Path) -> None:
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
    assert first.name == "kv_ratio_16bit exactly 0.515625 where kv_format=int8_sym"
    assert first.line == 5
    assert (second.low, second.high, second.limit, second.required) == (-1, 1, "within [-1, 1]", False)


def test_the_rung_of_the_evidence_is_one_of_the_ladder(tmp_path: Path) -> None:
    assert gate_of(tmp_path, "checks: []").evidence == "E5"
    assert gate_of(tmp_path, "evidence: E3\nchecks: []").evidence == "E3"
    for wrong in ("E6", "E3-layers", "3", "true", "[E1]", "strict"):
        with pytest.raises(
            UsageError, match="the highest rung that must be verified, one of E1, E2, E3, E4, E5, not"
        ):
            gate_of(tmp_path, f"evidence: {wrong}\nchecks: []")


def test_a_check_names_what_it_picks_as_a_matrix_writes_it(tmp_path: Path) -> None:
    where = "{kv_splits: null, plumbing: true, scale: 0.05, batch: 8}"
    (check,) = one(tmp_path, f"{{metric: itl_ratio, where: {where}, at_most: 1}}").checks
    assert check.name == "itl_ratio at most 1 where kv_splits=null, plumbing=true, scale=0.05, batch=8"


def test_the_name_defaults_to_the_files(tmp_path: Path) -> None:
    assert gate_of(tmp_path, "checks: []").name == "g"


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
def test_predicates(tmp_path: Path, predicate: str, low: float, high: float, limit: str) -> None:
    (check,) = one(tmp_path, f"{{metric: kld_mean, {predicate}}}").checks
    assert (check.low, check.high, check.limit) == (low, high, limit)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (".nan", "a limit is a finite number, not .nan"),
        (".inf", "a limit is a finite number, not .inf"),
        ("-.inf", "a limit is a finite number, not -.inf"),
        ("-1", "kld_mean (nat) is 0 or more; a limit of -1 decides nothing"),
        ("nan", 'a limit is a number, not "nan"'),
        ('"0.01"', 'a limit is a number, not "0.01"'),
        ("true", "a limit is a number, not true"),
        ("null", "a limit is a number, not null"),
        ("[1]", "a limit is a number, not [1]"),
    ],
)
@pytest.mark.parametrize("predicate", ["at_most: {}", "at_least: {}", "equals: {}", "within: [{}, 1]"])
def test_a23_t4_a_threshold_that_is_no_threshold_is_a_config_error(
    tmp_path: Path, predicate: str, value: str, words: str
) -> None:
    message = complaint(tmp_path, f"checks:\n  - {{metric: kld_mean, {predicate.format(value)}}}\n")
    assert words in message
    assert "g.yaml:2:" in message


def test_a_share_in_percent_is_a_config_error(tmp_path: Path) -> None:
    message = complaint(tmp_path, "checks:\n  - {metric: top1_agreement, at_least: 99}\n")
    assert "top1_agreement (share) is from 0 to 1; a limit of 99 decides nothing." in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "checks:\n  - {metric: ppl_delta, at_most: 1}",
            f"ppl_delta is not a metric. Did you mean ppl_delta_pct? kvbench schema gate has all {len(METRICS)} with",
        ),
        ("checks:\n  - {metric: zzz, at_most: 1}", "zzz is not a metric. kvbench schema gate has all"),
        ("checks:\n  - {at_most: 1}", "a check needs a metric"),
        ("checks:\n  - {metric: 3, at_most: 1}", "this one has 3"),
        ("checks:\n  - {metric: ppl}", "exactly one of at_most, at_least, equals, within; this one has none"),
        ("checks:\n  - {metric: ppl, at_most: 9, at_least: 2}", "this one has at_most and at_least"),
        ("checks:\n  - {metric: ppl, treshold: 9}", "treshold is not a key of a check"),
        ("checks:\n  - {metric: ppl, at_mst: 9}", "Did you mean at_most?"),
        ("checks:\n  - {metric: ppl, within: [9, 2]}", "swap them"),
        ("checks:\n  - {metric: ppl, within: 9}", "within takes two numbers"),
        ("checks:\n  - {metric: ppl, equals: {value: 9, tolerance: -1}}", "a tolerance is 0 or more, not -1"),
        ("checks:\n  - {metric: ppl, equals: {value: 9}}", "a limit is a number, not null"),
        ("checks:\n  - {metric: ppl, equals: {value: 9, tol: 1}}", "tol is not a key of equals"),
        ("checks:\n  - {metric: ppl, at_most: 9, required: 1}", "required is true or false, not 1"),
        ("checks:\n  - {metric: ppl, at_most: 9, required: no}", 'required is true or false, not "no"'),
        ("checks:\n  - {metric: ppl, at_most: 9, why: 3}", "why is a text, not 3"),
        ("checks:\n  - {metric: ppl, at_most: 9, where: int8_sym}", "where is a mapping of cell keys"),
        ("checks:\n  - {metric: ppl, at_most: 9, where: {format: int8_sym}}", "format is not a key of where"),
        ("checks:\n  - {metric: ppl, at_most: 9, where: {kv_format: int8_sim}}", "Did you mean int8_sym?"),
        (
            "checks:\n  - {metric: ppl, at_most: 9, where: {kv_format: [int8_sym, fp8_e4m3]}}",
            'kv_format takes one value, not ["int8_sym", "fp8_e4m3"]; write one check for each',
        ),
        (
            "checks:\n  - {metric: ppl, at_most: 9, where: {batch: '8'}}",
            'batch is a whole number in every cell, never "8"',
        ),
        (
            "checks:\n  - {metric: ppl, at_most: 9, where: {batch: true}}",
            "batch is a whole number in every cell, never true",
        ),
        (
            "checks:\n  - ppl",
            'a check is a mapping of metric, where, at_most, at_least, equals, within, required, why, not "ppl"',
        ),
        ("checks: {metric: ppl}", "checks must be a list"),
        ("name: x", "checks must be a list"),
        ("name: 3\nchecks: []", "name is a text, not 3"),
        ("allow_partal: true\nchecks: []", "Did you mean allow_partial?"),
        ("allow_partial: maybe\nchecks: []", 'allow_partial is true or false, not "maybe"'),
        ("[]", "a gate is a mapping"),
        ("", "empty"),
        ("checks: []\nchecks: []", "twice"),
    ],
)
def test_mistakes_are_config_errors(tmp_path: Path, text: str, words: str) -> None:
    assert words in complaint(tmp_path, text)


def test_every_mistake_is_reported_with_its_place(tmp_path: Path) -> None:
    text = "nam: x\nchecks:\n  - metric: pp\n    at_most: .nan\n  - metric: ppl\n    at_most: -3\n"
    lines = complaint(tmp_path, text).splitlines()
    assert [line.split("g.yaml:")[1].split(" ")[0] for line in lines] == ["1:1:", "3:13:", "4:14:", "6:14:"]


@pytest.mark.parametrize(
    "text",
    [
        "precision: false\nchecks: []",
        "checks:\n  - {metric: precision, at_most: 1, required: false}",
        "checks:\n  - {metric: ppl, at_most: 9, precision: off}",
        "checks:\n  - {metric: ppl, at_most: 9, where: {precision: unverified}}",
    ],
)
def test_no_key_of_a_policy_reaches_the_precision_check(tmp_path: Path, text: str) -> None:
    assert "the precision check always runs, comes first and takes no settings" in complaint(tmp_path, text)


def test_the_policies_of_the_project_load() -> None:
    folder = Path(__file__).parents[2] / "gates"
    gates = [load(path) for path in sorted(folder.glob("*.yaml"))]
    assert {"int8", "smoke"} <= {gate.path.stem for gate in gates if gate.path}
    for gate in gates:
        assert gate.checks
        assert all(check.why and check.metric in METRICS for check in gate.checks)


@pytest.mark.parametrize("kind", ["calibrated", "file"])
def test_a_check_picks_the_cells_whose_scales_a_file_gave_by_its_name(tmp_path: Path, kind: str) -> None:
    (check,) = one(tmp_path, "{metric: kld_mean, where: {scale: scales/mine.json}, at_most: 1}").checks
    held = {"k": [0.1], "v": [0.1], kind: {"file": "mine.json", "sha": "a"}}
    assert check.picks({"scale": held})
    assert not check.picks({"scale": {**held, kind: {"file": "other.json", "sha": "a"}}})
    assert not check.picks({"scale": {"k": [0.1], "v": [0.1]}})
    assert not check.picks({"scale": 0.05})
    (check,) = one(tmp_path, "{metric: kld_mean, where: {scale: checkpoint}, at_most: 1}").checks
    assert check.picks({"scale": "checkpoint"})
    assert not check.picks({"scale": held})
