"""The published tables that `kvbench reproduce` runs: SOURCE/TABLE -> reference file, matrix, rules.

Adding a table: its CSV in reports/reference/, its matrix in matrices/reproduce/, an entry here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import kvbench
from kvbench.errors import UsageError
from kvbench.published.reproduce import CHANGE, EXACT, SAME, VALUE, Rule


@dataclass(frozen=True)
class Reproduction:
    """reference, matrix: file names, matrix "" where nothing can be run. ours: what stands for the published
    model, in words; stand_ins: by name, where there are several. needs: machine and time."""

    reference: str
    matrix: str
    rules: tuple[Rule, ...]
    ours: str = ""
    needs: str = ""
    stand_ins: Mapping[str, str] = field(default_factory=dict)


_NATIVE = {"weights": "native", "kv_format": "native"}
_FP8 = {"weights": "fp8_block128", "kv_format": "native"}
_FP8_BOTH = {"weights": "fp8_block128", "kv_format": "fp8_e4m3"}
_CACHE = "random weights over a KV cache of the published dimensions: bytes of live tensors"
_SHAPE = "random weights of the published dimensions: times alone, no quality"
_SMALL = "the default model: sign and order alone say something"
_OTHER_ENGINE = "a number of another engine, or of another kernel of the published one: kvbench has neither."


def _bytes(
    metric: str, ours: str, candidate: dict[str, object], reads: tuple[str, ...], per_token: bool = False
) -> Rule:
    return Rule(metric, EXACT, ours, candidate, {"kv_format": "native"}, reads=reads, per_token=per_token)


def _decode(of: str, against: str, baseline: dict[str, object]) -> Rule:
    """Rates by batch; the change is that of ITL, upside down."""
    fused, texts = {"weights": "fp8_block128", "gemm": "auto"}, {"of": of, "against": against}
    name = "decode_tok_s"
    return Rule(name, CHANGE, name, fused, baseline, texts, ("batch",), "itl_ratio", inverse=True)


def _static(metric: str, paired: str = "") -> Rule:
    """The change of a time, or of a rate by the paired ratio of its time."""
    own, base = {"kv_format": "int8_static"}, {"kv_format": "native"}
    return Rule(metric, CHANGE, metric, own, base, {}, ("model",), paired, inverse=bool(paired))


def _itl(of: str, splits: int | None) -> Rule:
    own, base = {**_FP8_BOTH, "kv_splits": splits}, {**_FP8, "kv_splits": None}
    return Rule("itl_ms", CHANGE, "itl_ms", own, base, {"of": of}, ("batch", "context"), "itl_ratio")


def _quality(of: str, candidate: dict[str, str], baseline: dict[str, str]) -> tuple[Rule, ...]:
    """Within the published targets: perplexity 1%, accuracy half a point."""
    text = Rule("ppl", CHANGE, "ppl", candidate, baseline, {"of": of}, paired="ppl_delta_pct")
    right = Rule("mcq_accuracy", CHANGE, "mcq_accuracy", candidate, baseline, paired="mcq_delta_pt")
    points = replace(right, factor=100, points=True, band=0.5)
    return (
        replace(text, band=math.log(1.01), variant="wikitext2"),
        replace(points, texts={"of": of, "data": "ceval val"}, variant="ceval"),
        replace(points, texts={"of": of, "data": "mmlu test"}, variant="mmlu"),
    )


TABLES: dict[str, Reproduction] = {
    "int8_sym/page-bytes": Reproduction(
        "kv_page_bytes.csv", "page_bytes.yaml",
        (_bytes("kv_bytes_total", "kv_bytes_total", {"kv_format": "int8_sym"}, ("tokens",)),),
        ours=f"page-8x128: {_CACHE}", needs="seconds, any machine",
    ),
    "int8_static/memory": Reproduction(
        "int8_memory.csv", "static_memory.yaml",
        (_bytes("kv_bytes_total", "kv_bytes_total", {"kv_format": "int8_static"}, ("model", "tokens")),),
        ours=f"tinyllama-1.1b-cache, qwen2.5-0.5b-cache, smollm-135m-cache: {_CACHE}",
        needs="seconds, any machine",
        stand_ins={"TinyLlama-1.1B-Chat": "tinyllama-1.1b-cache",
                   "Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b-cache",
                   "SmolLM-135M": "smollm-135m-cache"},
    ),
    "int8_static/throughput": Reproduction(
        "int8_throughput.csv", "static_throughput.yaml",
        (_static("request_ms"), _static("prefill_tok_s", "ttft_ratio"), _static("decode_tok_s", "itl_ratio")),
        ours=f"tinyllama-1.1b-shape, qwen2.5-0.5b-shape: {_SHAPE}", needs="a GPU; 2 minutes on an H200",
        stand_ins={"TinyLlama-1.1B-Chat": "tinyllama-1.1b-shape",
                   "Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b-shape"},
    ),
    "int8_static/scale": Reproduction(
        "int8_scale.csv", "static_scale.yaml",
        (
            Rule("calibrated_scale", EXACT, formula=lambda line: line.numbers["amax"].middle / 127),
            *(Rule("static_scale", VALUE, "gen_useful_tokens", {"kv_format": "int8_static"}, None, {"of": of},
                   ("scale",), states=tokens)  # it collapses at once; coherent up to some 100 tokens
              for of, tokens in (("as shipped", (0.0, 1.0)), ("for validation", (50.0, 150.0)))),
            Rule("coherent_tokens", VALUE, "gen_useful_tokens", {"kv_format": "int8_static", "scale": 0.05}),
        ),
        ours=f"smollm2-135m-instruct, {_SMALL}", needs="minutes on a CPU",
    ),
    "int8_static/accuracy": Reproduction(
        "int8_accuracy.csv", "static_accuracy.yaml",
        (Rule("mcq_accuracy", SAME, "mcq_aa_disagreement", {"kv_format": "native"}),),
        ours=f"smollm2-135m-instruct on questions of all subjects of MMLU, {_SMALL}",
        needs="MMLU (--data-dir); a minute on a CPU",
    ),
    "int8_static/service": Reproduction(
        "int8_service.csv", "",
        tuple(Rule(metric, left_out="a service under requests; kvbench has no server.")
              for metric in ("requests_s", "output_tok_s")),
    ),
    "fp8/kv-bytes": Reproduction(
        "fp8_kv_bytes.csv", "fp8_kv_bytes.yaml",
        tuple(_bytes(f"kv_{part}_per_token", f"kv_bytes_{ours}", {"kv_format": "fp8_e4m3"}, (), True)
              for part, ours in (("bytes", "total"), ("payload", "payload"), ("scales", "scales"))),
        ours=f"qwen3-8b-cache: {_CACHE}", needs="seconds, any machine",
    ),
    "fp8/decode": Reproduction(
        "fp8_decode.csv", "fp8_decode.yaml",
        (
            _decode("fp8 fused", "bfloat16", {"weights": "native"}),
            _decode("fp8 fused", "fp8 dequantized", {"weights": "fp8_block128", "gemm": "reference"}),
            Rule("decode_tok_s", left_out=_OTHER_ENGINE),
            Rule("itl_ms", VALUE, "itl_ms", {"weights": "fp8_block128", "gemm": "auto"}, reads=("batch",)),
        ),
        ours=f"qwen3-8b-shape, {_SHAPE}", needs="a GPU of 40 GB; 9 minutes on an H200",
    ),
    "fp8/itl": Reproduction(
        "fp8_itl.csv", "fp8_itl.yaml", (_itl("fp8 KV", None), _itl("fp8 KV without splits", 1)),
        ours=f"qwen3-8b-shape, {_SHAPE}", needs="a GPU of 60 GB; more than 10 minutes on an H200",
    ),
    "fp8/quality": Reproduction(
        "fp8_quality.csv", "fp8_quality.yaml",
        (
            *_quality("fp8 weights", _FP8, _NATIVE),
            *_quality("fp8 weights, fp8 KV", _FP8_BOTH, _FP8),
            Rule("weight_bytes", CHANGE, "weight_bytes", _FP8, _NATIVE),
            Rule("model_load_s",
                 left_out="kvbench quantizes on load, which reads as many bytes of the checkpoint."),
        ),
        ours=f"smollm2-135m-instruct, limited samples, {_SMALL}",
        needs="WikiText-2, MMLU and C-Eval (--data-dir); minutes on a CPU",
    ),
}  # fmt: skip


def named(source: str, table: str) -> Reproduction:
    """Raises UsageError with the known tables."""
    name = f"{source}/{table}"
    if name not in TABLES:
        known = ", ".join(key.replace("/", " ") for key in TABLES)
        raise UsageError(f"There is no table {source} {table}; known are {known}.")
    return TABLES[name]


def files(found: Reproduction) -> tuple[Path, Path | None]:
    """(reference, matrix) of a checkout. Raises UsageError where kvbench was installed without one."""
    for root in (Path(kvbench.__file__).parents[1], Path.cwd()):
        reference = root / "reports" / "reference" / found.reference
        if reference.is_file():
            return reference, root / "matrices" / "reproduce" / found.matrix if found.matrix else None
    raise UsageError(f"reports/reference/{found.reference} is not here: run it in a checkout of kvbench.")
