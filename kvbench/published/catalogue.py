"""The published tables that `kvbench reproduce` runs: SOURCE/TABLE -> reference file, matrix, and rules for
its lines.

int8_sym: the opt-in INT8 cache with FP16 scales a token and head; int8_static: the INT8 cache that a dropped
flag kept from running; fp8: the FP8 weights and FP8 cache. Adding a table: its CSV in reports/reference/, its
matrix in matrices/reproduce/, an entry here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import kvbench
from kvbench.errors import UsageError
from kvbench.published.reproduce import CHANGE, EXACT, SAME, VALUE, Rule


@dataclass(frozen=True)
class Reproduction:
    """reference, matrix: file names. ours: what stands for the published model, in words; stand_ins: by name,
    where there are several.

    needs: what the machine must have, and how long it takes. matrix "": nothing can be run.
    """

    reference: str
    matrix: str
    rules: tuple[Rule, ...]
    ours: str = ""
    needs: str = ""
    stand_ins: Mapping[str, str] = field(default_factory=dict)


_NATIVE, _FP8 = (
    {"weights": "native", "kv_format": "native"},
    {"weights": "fp8_block128", "kv_format": "native"},
)
_FP8_BOTH = {"weights": "fp8_block128", "kv_format": "fp8_e4m3"}
_CACHE = (
    "random weights over a KV cache of the published dimensions: bytes of live tensors, which no weight "
    "changes"
)
_SHAPE = "random weights of the published dimensions: times alone, no quality"
_SMALL = "the default model: sign and order alone say something"
_OTHER_ENGINE = "a number of another engine, or of another kernel of the published one: kvbench has neither."


def _bytes(
    metric: str, ours: str, candidate: dict[str, object], reads: tuple[str, ...], per_token: bool = False
) -> Rule:
    return Rule(metric, EXACT, ours, candidate, {"kv_format": "native"}, reads=reads, per_token=per_token)


def _decode(of: str, against: str, baseline: dict[str, object]) -> Rule:
    """Rates by batch; the change is that of ITL, upside down."""
    fused = {"weights": "fp8_block128", "gemm": "auto"}
    return Rule(
        "decode_tok_s", CHANGE, "decode_tok_s", fused, baseline, {"of": of, "against": against}, ("batch",),
        "itl_ratio",
        inverse=True,
    )  # fmt: skip


def _itl(of: str, splits: int | None) -> Rule:
    return Rule(
        "itl_ms", CHANGE, "itl_ms", {**_FP8_BOTH, "kv_splits": splits}, {**_FP8, "kv_splits": None},
        {"of": of},
        ("batch", "context"), "itl_ratio",
    )  # fmt: skip


def _quality(of: str, candidate: dict[str, str], baseline: dict[str, str]) -> tuple[Rule, ...]:
    """Within the published targets: perplexity 1%, accuracy half a point."""
    text = Rule(
        "ppl", CHANGE, "ppl", candidate, baseline, {"of": of}, (), "ppl_delta_pct", band=math.log(1.01),
        variant="wikitext2"
    )  # fmt: skip
    questions = tuple(
        Rule("mcq_accuracy", CHANGE, "mcq_accuracy", candidate, baseline, {"of": of, "data": data}, (),
             "mcq_delta_pt",
             factor=100, points=True, band=0.5, variant=data.split()[0])
        for data in ("ceval val", "mmlu test")
    )  # fmt: skip
    return (text, *questions)


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
        tuple(Rule(metric, CHANGE, metric, {"kv_format": "int8_static"}, {"kv_format": "native"}, {},
                   ("model",), paired, inverse)
              for metric, paired, inverse in (("request_ms", "", False), ("prefill_tok_s", "ttft_ratio",
                                                                          True),
                                              ("decode_tok_s", "itl_ratio", True))),
        ours=f"tinyllama-1.1b-shape, qwen2.5-0.5b-shape: {_SHAPE}", needs="a GPU; 2 minutes on an H200",
        stand_ins={"TinyLlama-1.1B-Chat": "tinyllama-1.1b-shape",
                   "Qwen2.5-0.5B-Instruct": "qwen2.5-0.5b-shape"},
    ),
    "int8_static/scale": Reproduction(
        "int8_scale.csv", "static_scale.yaml",
        (
            Rule("calibrated_scale", EXACT, formula=lambda line: line.numbers["amax"].middle / 127),
            Rule("static_scale", VALUE, "gen_useful_tokens", {"kv_format": "int8_static"},
                 texts={"of": "as shipped"},
                 reads=("scale",), states=(0.0, 1.0)),  # it collapses at once
            Rule("static_scale", VALUE, "gen_useful_tokens", {"kv_format": "int8_static"},
                 texts={"of": "for validation"},
                 reads=("scale",), states=(50.0, 150.0)),  # coherent up to some 100 tokens
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
        tuple(Rule(metric,
                   left_out="a service under requests; kvbench has no server, its batches are static.")
              for metric in ("requests_s", "output_tok_s")),
    ),
    "fp8/kv-bytes": Reproduction(
        "fp8_kv_bytes.csv", "fp8_kv_bytes.yaml",
        (
            _bytes("kv_bytes_per_token", "kv_bytes_total", {"kv_format": "fp8_e4m3"}, (), True),
            _bytes("kv_payload_per_token", "kv_bytes_payload", {"kv_format": "fp8_e4m3"}, (), True),
            _bytes("kv_scales_per_token", "kv_bytes_scales", {"kv_format": "fp8_e4m3"}, (), True),
        ),
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
        raise UsageError(
            f"There is no table {source} {table}; known are "
            f"{', '.join(key.replace('/', ' ') for key in TABLES)}."
        )
    return TABLES[name]


def files(found: Reproduction) -> tuple[Path, Path | None]:
    """(reference, matrix) of a checkout. Raises UsageError where kvbench was installed without one."""
    for root in (Path(kvbench.__file__).parents[1], Path.cwd()):
        reference = root / "reports" / "reference" / found.reference
        if reference.is_file():
            return reference, root / "matrices" / "reproduce" / found.matrix if found.matrix else None
    raise UsageError(
        f"reports/reference/{found.reference} is not here: tables and matrices come with a checkout of "
        "kvbench; run it in one."
    )
