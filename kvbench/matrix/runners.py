"""The runners, declared without importing them (or torch): scope, protocol version, options, variants.

A runner is one entry here, its metrics in `kvbench/metrics/<name>.py`, and `kvbench/runners/<name>.py` with
a function

    def run(ctx: kvbench.runners.context.Context) -> kvbench.runners.context.Measurement

Raise `protocol`, which is part of every task's key, when old and new numbers are no longer comparable.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.matrix.rules import Option


@dataclass(frozen=True)
class RunnerDecl:
    """What is known of a runner without running it.

    stage: index into `STAGES`; `--until-decided` runs the low ones first. ignores: the cell keys that do not
    change the result. quality: refused on random weights. reads: it must read tokens from the pages. beside:
    a native engine runs next to the measured one. timed: nothing else may run on its device. variant: names
    the runner's tasks in rows and gates, a template over its options; "" where there is only one task."""

    name: str
    protocol: int
    stage: int
    help: str
    options: Mapping[str, Option]
    ignores: frozenset[str] = frozenset()
    quality: bool = False
    reads: bool = True
    variant: str = ""
    beside: bool = False
    timed: bool = False


# By cost: at most one forward; random tensors, a short text; many forwards for all shapes; every shape.
STAGES = ("exact bytes", "tensors", "text", "times")
EXACT, TENSORS, TEXT, TIMES = range(len(STAGES))

_SHAPE = frozenset({"batch", "context"})
_CORPORA = "wikitext2, pydoc, or a text file"
_CHAT = Option("bool", False, "wrap each prompt in the tokenizer's chat template")
_SETS = ("cloze", "mmlu", "ceval", "arc_easy", "arc_challenge")


def _count(default: Any, help: str, least: int = 1, **more: Any) -> Option:
    return Option("int", default, help, minimum=least, **more)


def _corpus(default: Any, help: str, **more: Any) -> Option:
    return Option("str", default, help, names_data=True, **more)


# fmt: off
_DECLARED = (
    RunnerDecl(
        "storage", 1, EXACT,
        "live bytes of the KV store at the cell's batch and context, per layer, against the formula", {},
        reads=False),
    RunnerDecl(
        "transfer", 1, EXACT,
        "bytes and bandwidth of swapping the pages of the cell's batch and context to the host and back", {
            "repeats": _count(3, "measured swaps, each out and in again"),
            "warmup": _count(1, "unmeasured swaps before them; reported separately", 0),
        }, reads=False, timed=True),
    RunnerDecl(
        "parity", 1, TENSORS,
        "decode through the store against an FP32 oracle on dequantized tensors, and many decode steps "
        "without a model", {
            "lengths": _count([1, 15, 16, 17, 257], "context lengths of the tensor-level decode", many=True),
            "steps": _count(2048, "decode steps of the run without a model"),
            "seed": _count(0, "seed of the random tensors", 0),
        }, ignores=_SHAPE, reads=False),
    RunnerDecl(
        "health", 1, TENSORS,
        "what the format does to K and V of a text, layer by layer: amax, clipping, flushing to zero, codes "
        "in use, scales, error", {
            "tokens": _count(512, "tokens of the text, from the head of `data`"),
            "data": _corpus("pydoc", f"corpus of the text: {_CORPORA}"),
        }, ignores=_SHAPE, quality=True),
    RunnerDecl(
        "sensitivity", 1, TEXT,
        "what each layer, K, V and the first tokens cost in KLD, and which layers to keep native under a "
        "byte budget", {
            "documents": _count(4, "texts: documents of `data`, evenly spread over it"),
            "tokens": _count(128, "tokens of a document that are used, at most", 2),
            "first_tokens": _count(
                4, "tokens at the head of a text that alone are kept native, or quantized"),
            "budget_pct": Option(
                "float", 20.0, "bytes that native layers may add, in % of the quantized cache's bytes",
                minimum=0.0),
            "data": _corpus("pydoc", f"corpus of the texts: {_CORPORA}"),
        }, ignores=_SHAPE, quality=True),
    RunnerDecl(
        "gemm", 3, TENSORS,
        "products of the linear layers by path and number of rows, against float64 on the dequantized "
        "weight; times on a GPU", {
            "rows": _count([1, 2, 4, 8, 9, 16, 31, 32, 33, 63, 64, 65, 128, 257, 513],
                           "rows of x, in addition to both sides of every boundary of the route", many=True),
            "max_rows": _count(8192, "largest number of rows at which a boundary of the route is looked for"),
            "seed": _count(0, "seed of x", 0),
        }, ignores=_SHAPE, reads=False, timed=True),
    RunnerDecl(
        "latency", 1, TIMES, "TTFT and ITL, interleaved with the baseline", {
            "new_tokens": _count(16, "tokens generated for a request"),
            "repeats": _count(
                3, "measured requests of each configuration; the baseline is interleaved with its candidates "
                "(A B B A)", looks=(3, 10)),
            "warmup": _count(1, "unmeasured requests of the same shape; reported separately", 0),
        }, beside=True, timed=True),
    RunnerDecl(
        "agreement", 1, TEXT,
        "token agreement with the baseline: teacher-forced share, first free-running divergence, margins", {
            "steps": _count(2048, "greedy steps"),
            "prompt_tokens": _count(64, "tokens of the prompt, from the head of `data`"),
            "data": _corpus("pydoc", f"corpus of the prompt: {_CORPORA}"),
            "draft": _count(
                0, "0: one decode step for each token; n: greedy, n drafted tokens verified in a forward", 0),
            "continuation": _count(32, "tokens generated freely past the first divergence, for reading", 0),
        }, ignores=_SHAPE, quality=True),
    RunnerDecl(
        "generate", 1, TEXT,
        "free-running greedy text: where it loops, repeats itself, ends, and leaves the baseline's text", {
            "new_tokens": _count(256, "tokens that the cell generates after each prompt"),
            "prompts": _count(4, "prompts: documents of `data`, evenly spread over it, decoded as one batch"),
            "prompt_tokens": _count(64, "tokens of a document that are used, at most"),
            "data": _corpus("instructions", f"corpus of the prompts: instructions, {_CORPORA}"),
            "chat_template": _CHAT,
        }, ignores=_SHAPE, quality=True),
    RunnerDecl(
        "perplexity", 1, TEXT, "perplexity, and KLD, top-1 agreement and delta-p against the baseline", {
            "data": _corpus(["pydoc"], f"corpora: {_CORPORA}", many=True, fans_out=True),
            "protocol": Option(
                "str", "stream512", "how text becomes scored tokens", ("stream512", "rows512", "llamacpp")),
            "split": Option("str", "test", "split of wikitext2", ("test", "validation")),
            "limit_chunks": _count(
                None, "score only n chunks, evenly spread over the text (the result is partial)",
                optional=True, looks=(4, 32)),
            "kld": Option(
                "bool", True,
                "compare full next-token distributions with a native pass over the same chunks"),
        }, ignores=_SHAPE, quality=True, variant="{data} {protocol}", beside=True),
    RunnerDecl(
        "mcq", 1, TEXT, "multiple choice by logprob, paired with the baseline question by question", {
            "tasks": Option(
                "str", ["cloze"], "question sets", _SETS, many=True, fans_out=True, names_data=True),
            "shots": Option("int", 0, "worked examples before each question", choices=(0, 5)),
            "limit": _count(None, "score only n questions, spread over subjects (the result is partial)",
                            optional=True, looks=(24, 200)),
            "chat_template": _CHAT,
            "max_truncated": Option(
                "float", 0.0, "share of questions that may be truncated before the cell fails", minimum=0.0),
            "aa_limit": _count(
                100, "questions, spread over subjects, that the baseline scores twice more for its noise "
                "floor; 0: none", 0),
        }, ignores=_SHAPE, quality=True, variant="{tasks} {shots}-shot"),
)
# fmt: on
RUNNERS: dict[str, RunnerDecl] = {runner.name: runner for runner in _DECLARED}
