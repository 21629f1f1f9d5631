"""docs/metrics.md, from the table of metrics: `python -m kvbench.cli.metrics_page > docs/metrics.md` writes it again.

A test compares the page with the table, so neither can change alone.
"""

from __future__ import annotations

from itertools import groupby

from kvbench.matrix.runners import RUNNERS
from kvbench.metrics.table import METRICS, UNIT_DOMAIN, Metric

UNITS = {
    "B": "bytes",
    "B/token": "bytes a token",
    "ratio": "candidate over what the definition names; 1 is no change",
    "ms": "milliseconds",
    "tok/s": "tokens a second",
    "GB/s": "10^9 bytes a second",
    "share": "from 0 to 1",
    "p-value": "from 0 to 1",
    "cosine": "from -1 to 1",
    "error": "absolute, or of a norm where the definition says so",
    "logit": "difference of two logits",
    "step": "index of a generated token, from 0",
    "questions": "a count",
    "requests": "a count",
    "tokens": "a count, or a position",
    "us/token": "microseconds a token of context",
    "paths": "a count",
    "codes": "a count",
    "magnitude": "of K or V, in the model's own numbers",
    "s": "seconds",
    "ppl": "perplexity",
    "nat": "natural logarithm",
    "%": "change against the baseline in percent, unless the definition says of what",
    "pt": "percentage points",
}

# Where the definition of a runner's metrics comes from, or what they are held to.
SOURCES = {
    "storage": "Counted: numel x itemsize of the live tensors, against the formulas of [formats.md](formats.md).",
    "transfer": "Counted: bytes of the host's buffers, against the same formulas; GB/s by a clock around synchronised copies.",
    "parity": "Against attention in FP32 over the dequantized tensors, worked out beside the engine.",
    "health": "Against the K and V that the format was given, layer by layer.",
    "sensitivity": "Kullback-Leibler divergence as under perplexity, with one part of the cache quantized at a time.",
    "gemm": "Against float64 products on the dequantized weight.",
    "latency": "TTFT and ITL as serving benchmarks define them: ITL is the gap between tokens of one sequence and holds no TTFT. "
    "Ratios are of interleaved pairs (A B B A).",
    "agreement": "Greedy argmax along the native history (teacher-forced), and along the cell's own (free-running).",
    "generate": "Repetition of n-grams in the cell's own greedy text.",
    "perplexity": "Perplexity is exp of the mean NLL. `stream512`: the text tokenized once, chunks of 512, the first token of a chunk "
    "unscored. `rows512`: the same within each row. `llamacpp`: the second half of each chunk, as llama.cpp scores. KLD is from the "
    "native distribution to the candidate's, over the full vocabulary.",
    "mcq": "Prompts and scoring of lm-evaluation-harness, which a test compares item by item; intervals of Wilson and of Bonett and "
    "Price, the exact McNemar test.",
}


def page() -> str:
    """The whole of docs/metrics.md."""
    parts = [
        _HEAD,
        *(_section(runner, list(group)) for runner, group in groupby(METRICS.values(), lambda m: m.runner)),
    ]
    return "\n\n".join(parts) + "\n"


def _section(runner: str, metrics: list[Metric]) -> str:
    lines = [
        f"## {runner}",
        "",
        f"{RUNNERS[runner].help[0].upper()}{RUNNERS[runner].help[1:]}. {SOURCES[runner]} Values: `kvbench/derive/{runner}.py`.",
        "",
        "| metric | unit | better | interval | definition |",
        "|---|---|---|---|---|",
        *(_row(metric) for metric in metrics),
    ]
    return "\n".join(lines)


def _row(metric: Metric) -> str:
    interval = "required" if metric.sampled else ""
    definition = metric.definition.replace("|", r"\|")  # a bar would end the cell
    return f"| `{metric.name}` | {metric.unit} | {metric.better} | {interval} | {definition} |"


_HEAD = "\n".join(
    (
        "# Metrics",
        "",
        "<!-- Written by `python -m kvbench.cli.metrics_page > docs/metrics.md` from kvbench/metrics/table.py; never by hand. -->",
        "",
        "Every metric by the runner that measures it. A name means the same in gates, reports, CSV and `results.json`; what is",
        "unmeasured is null, never 0.",
        "",
        "- `better` is empty where neither direction is.",
        "- `interval`: whatever has a 95% interval is judged by all of it ([statistics.md](statistics.md)). Where one is `required`, the",
        "  metric is estimated from a sample, and a value without an interval is inconclusive. Other values are judged as they are.",
        "",
        "| unit | meaning |",
        "|---|---|",
        *(f"| {unit} | {UNITS[unit]} |" for unit in UNIT_DOMAIN),
    )
)

if __name__ == "__main__":
    print(page(), end="")
