"""The rules on published tables: a table that breaks each, one that keeps it, and real tables."""

import json
from collections import Counter
from pathlib import Path

import pytest

from kvbench.published.rules import RULES, check
from kvbench.published.table import read
from tests.factories.jobs import kvbench

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "reports" / "reference"

KV = "# layers: 22\n# kv_heads: 4\n# head_dim: 64\n# tokens: 160\n# kv_format: int8_sym\n"
SIZES = KV + "metric,unit,baseline,candidate\n"
ITL = "# batch: 1\n# kv_format: fp8_e4m3\n# head_dim: 128\n{head}metric,context,baseline,candidate\n"
DECODE = "decode_tok_s,203.4,203.4"
PUBLISHED = "itl_ms,1024,7.85,7.27\nitl_ms,4096,10.29,7.96\nitl_ms,16384,20.58,11.93\n"


def found(tmp_path, text):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return check(read(path))


def claim(metric, base, own, name, said):
    return f"metric,baseline,candidate,{name}\n{metric},{base},{own},{said}\n"


def speed(*rows, context=32, head=""):
    head = f"# batch: 1\n# context: {context}\n# new_tokens: 128\n{head}metric,baseline,candidate\n"
    return head + "\n".join(rows) + "\n"


def questions(n, base, own, limit="0.5"):
    return f"# questions: {n}\n# limit_pt: {limit}\nmetric,baseline,candidate\nmcq_accuracy,{base},{own}\n"


# rule: (a table that breaks it, one that keeps it)
CASES = {
    "unit_label": (SIZES + "kv_bytes_total,MB,3.44,\n", SIZES + "kv_bytes_total,MiB,3.44,\nkv_bytes_total,MB,3.60,\n"),
    "bytes_of_shape": (SIZES + "kv_bytes_total,B,,1802240\n", SIZES + "kv_bytes_total,B,3604480,1858560\n"),
    "byte_parts": (
        "metric,candidate\nkv_bytes_per_token,75777\nkv_payload_per_token,73728\nkv_scales_per_token,2304\n",
        "metric,candidate\nkv_bytes_per_token,76032\nkv_payload_per_token,73728\nkv_scales_per_token,2304\n",
    ),
    "ratio_of_columns": (claim("itl_ms", "7.85", "7.27", "ratio", "0.83"), claim("itl_ms", "7.85", "7.27", "ratio", "0.93")),
    "stated_twice": (
        "metric,of,against,baseline,candidate\ndecode_tok_s,a,b,379.7,1794.6\ndecode_tok_s,a,b,382,\n",
        "metric,of,against,baseline,candidate\ndecode_tok_s,a,b,379.7,1794.6\ndecode_tok_s,a,b,380,1794.6\n",
    ),
    "scale_of_amax": ("metric,amax,candidate\ncalibrated_scale,5,0.05\n", "metric,amax,candidate\ncalibrated_scale,5,0.04\n"),
    "rate_of_gap": (speed("itl_ms,7.00,", "decode_tok_s,142.00,"), speed("itl_ms,7.00,", "decode_tok_s,142.96,")),
    "total_of_parts": (
        speed("request_ms,903.3,", "prefill_tok_s,116.8,", "decode_tok_s,203.4,"),  # 128 steps, one too many
        speed("request_ms,898.4,", "prefill_tok_s,116.8,", "decode_tok_s,203.4,"),
    ),
    "cold_prefill": (
        speed("prefill_tok_s,116.8,150.0", "decode_tok_s,203.4,203.4"),
        speed("prefill_tok_s,3200,4000", "decode_tok_s,203.4,203.4"),  # 10 ms, two steps
    ),
    "speedup_beyond_bytes": (
        speed("itl_ms,10.0,4.5", context=4096, head="# kv_format: int8_static\n# head_dim: 64\n"),
        speed("itl_ms,10.0,5.0", context=4096, head="# kv_format: int8_static\n# head_dim: 64\n"),
    ),
    "slope_beyond_bytes": (
        ITL.format(head="# candidate.splits: auto\n# baseline.splits: 1\n") + PUBLISHED,
        # native 6 + 0.8 us a token, FP8 8 + 0.42 us: the bytes of 0.5156 explain it
        ITL.format(head="") + "itl_ms,1000,6.80,8.42\nitl_ms,5000,10.00,10.10\nitl_ms,20000,22.00,16.40\n",
    ),
    "bandwidth": (
        speed("itl_ms,,3.80", head="# peak_gb_s: 1792\n# candidate_read_bytes: 8.9e9\n"),
        speed("itl_ms,,7.00", head="# peak_gb_s: 1792\n# candidate_read_bytes: 8.9e9\n"),
    ),
    "too_few_questions": (questions(1346, "74.37", "74.74"), questions(134600, "74.37", "74.74")),
    "whole_questions": (questions(1346, "74.37", "74.40", "9"), questions(1346, "74.37", "74.44", "9")),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
def test_a_table_that_breaks_a_rule_is_found_by_it_alone(rule, tmp_path, monkeypatch):
    """And not at all without it; the table that keeps the rule is not found."""
    (finding,) = found(tmp_path, CASES[rule][0])
    assert (finding.rule, bool(finding.sentence and finding.right)) == (rule, True)
    assert finding.stated != finding.due
    assert found(tmp_path, CASES[rule][1]) == []
    monkeypatch.delitem(RULES, rule)
    assert found(tmp_path, CASES[rule][0]) == []


@pytest.mark.parametrize(
    ("unit", "base", "factor", "right"),
    [
        ("MB", "3.44", "1.048576", "3.44 MiB, or 3.604 MB"),
        ("KB", "3520", "1.024", "3520 KiB, or 3604 KB"),
        ("MiB", "3.60", "1.048576", "3.60 MB, or 3.438 MiB"),
        ("GB", "0.003357", "1.07374182", "0.003357 GiB, or 0.003604 GB"),
    ],
)
def test_a24_t1_a_size_under_the_wrong_unit_is_named(unit, base, factor, right, tmp_path):
    (finding,) = found(tmp_path, SIZES + f"kv_bytes_total,{unit},{base},\n")
    assert (finding.rule, finding.stated, finding.due) == ("unit_label", f"{base} {unit}", "3,604,480 B")
    assert f"by a factor of {factor}" in finding.sentence
    assert finding.right == right


def test_a24_t3_a_saving_of_half_without_the_scales_is_found(tmp_path):
    (finding,) = found(tmp_path, KV + "metric,candidate\nkv_bytes_total,1802240\n")
    assert (finding.rule, finding.stated, finding.due) == ("bytes_of_shape", "1802240 B", "1,858,560 B")
    # a scale of a tensor belongs to no token
    rows = KV.replace("int8_sym", "int8_static") + "metric,candidate\nkv_bytes_per_token,{}\n"
    assert found(tmp_path, rows.format(22 * 2 * 4 * 64)) == []
    assert [f.rule for f in found(tmp_path, rows.format(22 * 2 * 4 * 64 + 176))] == ["bytes_of_shape"]


@pytest.mark.parametrize(
    ("metric", "name", "right", "wrong"),
    [
        ("decode_tok_s", "speedup", "1.25", "0.80"),  # 80 -> 100 of a rate is faster
        ("itl_ms", "speedup", "0.80", "1.25"),
        ("itl_ms", "ratio", "1.25", "0.80"),
        ("itl_ms", "compression", "0.80", "1.25"),
        ("itl_ms", "change_pct", "25", "20"),
        ("itl_ms", "saving_pct", "-25", "25"),
        ("mcq_accuracy", "delta_pt", "20.0", "25.0"),
    ],
)
def test_each_claim_follows_its_own_formula(metric, name, right, wrong, tmp_path):
    assert found(tmp_path, claim(metric, "80.0", "100.0", name, right)) == []
    (finding,) = found(tmp_path, claim(metric, "80.0", "100.0", name, wrong))
    assert (finding.rule, finding.stated) == ("ratio_of_columns", f"{name} {wrong}")


def test_what_rounding_explains_is_consistent(tmp_path):
    """18.8724 against 18.8772 is -0.0254%; -0.026 can still be true of what rounds to them, -0.027 cannot."""
    assert found(tmp_path, claim("ppl", "18.8772", "18.8724", "change_pct", "-0.026")) == []
    (finding,) = found(tmp_path, claim("ppl", "18.8772", "18.8724", "change_pct", "-0.027"))
    assert finding.due == "-0.02596 to -0.0249"


def test_a20_t1_t5_rates_of_batches_and_totals(tmp_path):
    rows = "# batch: 8\nmetric,candidate\nitl_ms,19.57\ndecode_tok_s,{}\n"
    assert found(tmp_path, rows.format("408.7")) == []
    (finding,) = found(tmp_path, rows.format("51.1"))  # of one sequence
    shown = (finding.rule, finding.stated, finding.due)
    assert shown == ("rate_of_gap", "51.1 tok/s", "408.7 to 408.9 tok/s")
    rows = "# batch: 4\n# context: 512\nmetric,candidate\nttft_ms,100.0\nprefill_tok_s,{}\n"
    assert found(tmp_path, rows.format("20480")) == []
    assert [f.rule for f in found(tmp_path, rows.format("5120"))] == ["rate_of_gap"]
    rows = "# new_tokens: 9\nmetric,candidate\nttft_ms,200.0\nrequest_ms,1000.0\nitl_ms,{}\n"
    assert found(tmp_path, rows.format("100.0")) == []
    (finding,) = found(tmp_path, rows.format("111.1"))
    assert (finding.rule, finding.stated, finding.due) == ("total_of_parts", "1000.0 ms", "1088 to 1089 ms")


def test_a21_t1_a_cold_prefill_sold_as_a_speed_up_is_named(tmp_path):
    (finding,) = found(tmp_path, CASES["cold_prefill"][0])
    assert all(x in finding.sentence for x in ("32 tokens", "273.9 to 274.1 ms", "56 of its decode steps"))
    assert "at least 512 tokens" in finding.right
    # without a decode step too, as the warm-up is not stated
    assert [f.rule for f in found(tmp_path, speed("ttft_ms,274,126"))] == ["cold_prefill"]


@pytest.mark.parametrize(
    "text",
    [
        speed("prefill_tok_s,116.8,150.0", DECODE, context=512),  # long enough to say something
        speed("prefill_tok_s,116.8,117.0", DECODE),  # no speed-up is claimed
        speed("prefill_tok_s,116.8,", "decode_tok_s,203.4,"),
        speed("prefill_tok_s,116.8,150.0", DECODE, head="# device: CPU\n"),  # there 32 rows cost 32 times one
        speed("prefill_tok_s,116.8,150.0", head="# warmup: yes\n"),
    ],
)
def test_other_prefills_are_no_cold_ones(text, tmp_path):
    assert found(tmp_path, text) == []


def test_the_slope_names_the_settings_that_differ(tmp_path):
    (finding,) = found(tmp_path, CASES["slope_beyond_bytes"][0])
    assert (finding.line, finding.stated, finding.due) == (9, "0.372", "0.5156")
    assert "ITL grows by 0.309 us a token against 0.8312 us" in finding.sentence
    assert finding.sentence.endswith("confounded, what differs besides the format is splits auto against 1")

    two = ITL.format(head="") + PUBLISHED.rsplit("itl_ms", 1)[0]
    assert found(tmp_path, two) == []
    assert found(tmp_path, (ITL.format(head="") + PUBLISHED).replace("# head_dim: 128\n", "")) == []
    (finding,) = found(tmp_path, ITL.format(head="") + PUBLISHED)
    assert "the table names no other setting that differs" in finding.sentence


def test_a_stated_byte_ratio_counts_before_the_formats(tmp_path):
    rows = "# byte_ratio: 0.556\n# batch: 1\nmetric,baseline,candidate\ndecode_tok_s,92.34,{}\n"
    assert found(tmp_path, rows.format("142.96")) == []
    (finding,) = found(tmp_path, rows.format("180.00"))
    assert (finding.rule, finding.due) == ("speedup_beyond_bytes", "at most 1.8x")


@pytest.mark.parametrize(
    ("n", "base", "own", "is_found"),
    [
        (1346, "74.37", "74.74", True),  # 5 questions at least: [-0.013, +0.755] pt
        (1346, "74.67", "74.29", True),
        (14042, "69.68", "69.47", False),  # 29 at least: [-0.29, -0.13] pt
        (14042, "69.68", "69.10", True),
        (5, "20", "20", True),
    ],
)
def test_a_change_that_so_many_questions_cannot_certify(n, base, own, is_found, tmp_path):
    assert [f.rule for f in found(tmp_path, questions(n, base, own))] == ["too_few_questions"] * is_found


def test_the_sentence_on_questions_has_interval_and_what_can_be_shown(tmp_path):
    (finding,) = found(tmp_path, questions(1346, "74.37", "74.74"))
    assert (finding.stated, finding.due) == ("+0.37 pt", "[-0.0133, +0.755] pt")
    assert "no more than 5 of them changing sides" in finding.sentence
    assert "less than 0.549 pt cannot be shown" in finding.sentence


KNOWN = {
    "fp8_decode.csv": {"stated_twice": 1},  # 379.7 and 382 tok/s of the same kernel at batch 16
    "fp8_itl.csv": {"slope_beyond_bytes": 1},  # split-KV came with the FP8 cache
    "fp8_kv_bytes.csv": {},
    "fp8_quality.csv": {"too_few_questions": 2},  # C-Eval, of the weights and of the cache
    "int8_accuracy.csv": {"too_few_questions": 1},  # 5 questions
    "int8_memory.csv": {"unit_label": 7, "stated_twice": 1},  # MiB as MB; 960 KB is not 0.94 MB
    "int8_scale.csv": {},
    "int8_service.csv": {},
    "int8_throughput.csv": {"cold_prefill": 2, "speedup_beyond_bytes": 2},  # 32 tokens
    "kv_page_bytes.csv": {},
}


@pytest.mark.parametrize("name", KNOWN)
def test_reference_tables_have_the_known_inconsistencies_and_no_other(name):
    assert Counter(f.rule for f in check(read(REFERENCE / name))) == KNOWN[name]


def test_the_known_inconsistencies_stand_in_the_lines_that_have_them():
    memory = check(read(REFERENCE / "int8_memory.csv"))
    assert {(f.of.split(",")[0], f.stated) for f in memory if f.rule == "unit_label"} == {
        ("TinyLlama-1.1B-Chat", "3.44 MB"), ("TinyLlama-1.1B-Chat", "1.72 MB"),
        ("Qwen2.5-0.5B-Instruct", "1.88 MB"), ("Qwen2.5-0.5B-Instruct", "0.94 MB"), ("Qwen2.5-0.5B-Instruct", "960 KB"),
        ("SmolLM-135M", "90.0 MB"), ("SmolLM-135M", "45.0 MB"),
    }  # fmt: skip
    quality = [f.of for f in check(read(REFERENCE / "fp8_quality.csv"))]
    assert all("ceval val" in of for of in quality)


def test_findings_are_a_line_each_or_one_json_object_and_exit_code_1():
    path = REFERENCE / "fp8_itl.csv"
    done = kvbench("check-table", path)
    assert done.exit_code == 1
    line, last = done.stdout.splitlines()
    where = "Qwen3-8B, fp8 KV against bfloat16 KV, batch 1, context 16384"
    assert line.startswith(f"{path}:13: slope_beyond_bytes: {where}: over 3 ")
    assert line.endswith("Right: a ratio of at least 0.5156, or both sides measured with the same settings.")
    assert last == f"Rows: 10; tables: 1; rules: {len(RULES)}; findings: 1."
    assert {path.name for path in REFERENCE.iterdir()} == set(KNOWN)
    done = kvbench("check-table", *(REFERENCE / n for n in KNOWN if not KNOWN[n]))
    assert (done.exit_code, done.stdout) == (0, f"Rows: 11; tables: 4; rules: {len(RULES)}; findings: 0.\n")
    done = kvbench("check-table", "--json", REFERENCE / "int8_accuracy.csv")
    result = json.loads(done.stdout)
    assert (done.exit_code, result["exit_code"], set(result["rules"])) == (1, 1, set(RULES))
    assert all(text.endswith(".") and "\n" not in text for text in result["rules"].values())
    (file,) = result["files"]
    assert (file["rows"], [f["rule"] for f in file["findings"]]) == (1, ["too_few_questions"])
    assert set(file["findings"][0]) == {"line", "rule", "of", "stated", "due", "sentence", "right"}


@pytest.mark.parametrize("json_", [[], ["--json"]])
def test_no_table_is_exit_code_2_with_its_line(json_):
    done = kvbench("check-table", ROOT / "matrices" / "smoke.yaml", *json_)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "smoke.yaml, line" in done.stderr
    assert "accepted" in done.stderr or "key: value" in done.stderr
