"""The runners, declared without importing them: scope, protocol version, options, variants.

A runner is one entry here (which `plan` and `schema` read without torch) and one file `kvbench/runners/<name>.py`
with a function

    def run(ctx: kvbench.runners.context.Context) -> kvbench.runners.context.Measurement

Bump `protocol` when a change of rules makes old and new numbers incomparable: it is part of every task's hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Option:
    """One option of a runner. kind: "int", "float", "bool", "str"; `many`: a list (a scalar becomes [scalar]).

    choices: accepted values, or () for any; minimum, maximum: smallest and largest accepted number; optional: null is
    accepted.
    fans_out: each value of the list becomes a task of its own, whose options hold that one value in the list's place.
    names_data: the value names evaluation data, whose digest belongs to the task's key.
    looks: how large a sample is when `--until-decided` judges it first, then next; the matrix's own value comes last. Where null
    is accepted it is the whole set, and every other value makes the result partial.
    """

    kind: str
    default: Any
    help: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    optional: bool = False
    many: bool = False
    fans_out: bool = False
    names_data: bool = False
    maximum: float | None = None
    looks: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunnerDecl:
    """ignores: the cell keys the result does not depend on. quality: refused on random weights.

    reads: the runner's number comes from attention over the pages, so a run that read none is a fault.
    beside: a native engine runs beside the measured one.
    timed: it takes times, so nothing else may run on its device meanwhile.
    stage: its place in `STAGES`, by which `--until-decided` runs the cheap ones first.
    variant: what tells the runner's tasks apart in rows and gates, a template over its options; "" when there is one.
    """

    name: str
    protocol: int
    ignores: frozenset[str]
    quality: bool
    options: Mapping[str, Option]
    help: str
    reads: bool = True
    variant: str = ""
    beside: bool = False
    timed: bool = False
    stage: int = field(kw_only=True)


# By cost: one forward or none; made-up tensors and one short text; many forwards, once for all shapes; every shape, many times.
STAGES = ("exact bytes", "tensors", "text", "times")

_SHAPE = frozenset({"batch", "context"})
_PPL_PROTOCOLS = ("stream512", "rows512", "llamacpp")

RUNNERS: dict[str, RunnerDecl] = {
    r.name: r
    for r in (
        RunnerDecl("storage", 1, frozenset(), False, {},
                   "live bytes of the KV store at the cell's batch and context, per layer, against the formula", reads=False, stage=0),
        RunnerDecl("transfer", 1, frozenset(), False, {
            "repeats": Option("int", 3, "measured swaps, each out and in again", minimum=1),
            "warmup": Option("int", 1, "unmeasured swaps before them; reported apart", minimum=0),
        }, "bytes and bandwidth of swapping the pages of the cell's batch and context to the host and back", reads=False, timed=True, stage=0),
        RunnerDecl("parity", 1, _SHAPE, False, {
            "lengths": Option("int", [1, 15, 16, 17, 257], "context lengths of the tensor-level decode", minimum=1, many=True),
            "steps": Option("int", 2048, "decode steps of the model-free run", minimum=1),
            "seed": Option("int", 0, "seed of the random tensors", minimum=0),
        }, "decode through the store against an FP32 oracle on dequantized tensors, and a model-free run of many steps", reads=False, stage=1),
        RunnerDecl("health", 1, _SHAPE, True, {
            "tokens": Option("int", 512, "tokens of the text, from the head of `data`", minimum=1),
            "data": Option("str", "pydoc", "corpus of the text: wikitext2, pydoc, or a text file", names_data=True),
        }, "what the format does to K and V of a text, layer by layer: amax, clipping, flushing to zero, codes in use, scales, error", stage=1),
        RunnerDecl("sensitivity", 1, _SHAPE, True, {
            "documents": Option("int", 4, "texts: documents of `data`, evenly over it", minimum=1),
            "tokens": Option("int", 128, "tokens of a document that are taken, at most", minimum=2),
            "first_tokens": Option("int", 4, "tokens at the head of a text that are kept native, or quantized, alone", minimum=1),
            "budget_pct": Option("float", 20.0, "bytes that layers kept native may add, in % of the quantized cache's", minimum=0.0),
            "data": Option("str", "pydoc", "corpus of the texts: wikitext2, pydoc, or a text file", names_data=True),
        }, "what each layer, K, V and the first tokens cost in KLD, and which layers to keep native under a byte budget", stage=2),
        RunnerDecl("gemm", 3, _SHAPE, False, {
            "rows": Option("int", [1, 2, 4, 8, 9, 16, 31, 32, 33, 63, 64, 65, 128, 257, 513],
                           "rows of x, beside both sides of every boundary of the route", minimum=1, many=True),
            "max_rows": Option("int", 8192, "boundaries of the route are looked for up to so many rows", minimum=1),
            "seed": Option("int", 0, "seed of x", minimum=0),
        }, "products of the linear layers by path and number of rows, against float64 on the dequantized weight; times on a GPU",
            reads=False, timed=True, stage=1),
        RunnerDecl("latency", 1, frozenset(), False, {
            "new_tokens": Option("int", 16, "tokens generated a request", minimum=1),
            "repeats": Option("int", 3, "measured requests an arm; the baseline is interleaved with its candidates (A B B A)", minimum=1,
                              looks=(3, 10)),
            "warmup": Option("int", 1, "unmeasured requests of the same shape; reported apart", minimum=0),
        }, "TTFT and ITL, interleaved with the baseline", beside=True, timed=True, stage=3),
        RunnerDecl("agreement", 1, _SHAPE, True, {
            "steps": Option("int", 2048, "greedy steps", minimum=1),
            "prompt_tokens": Option("int", 64, "tokens of the prompt, from the head of `data`", minimum=1),
            "data": Option("str", "pydoc", "corpus of the prompt: wikitext2, pydoc, or a text file", names_data=True),
            "draft": Option("int", 0, "0: one decode step a token; n: greedy with n drafted tokens verified a forward", minimum=0),
            "continuation": Option("int", 32, "tokens generated freely past the first divergence, for reading", minimum=0),
        }, "token agreement with the baseline: teacher-forced share, first free-running divergence, margins", stage=2),
        RunnerDecl("generate", 1, _SHAPE, True, {
            "new_tokens": Option("int", 256, "tokens that the cell writes on its own after each prompt", minimum=1),
            "prompts": Option("int", 4, "prompts: documents of `data`, evenly over it, decoded side by side", minimum=1),
            "prompt_tokens": Option("int", 64, "tokens of a document that are taken, at most", minimum=1),
            "data": Option("str", "instructions", "corpus of the prompts: instructions, wikitext2, pydoc, or a text file",
                           names_data=True),
            "chat_template": Option("bool", False, "wrap each prompt in the tokenizer's chat template"),
        }, "free-running greedy text: where it loops, repeats itself, ends, and leaves the baseline's text", stage=2),
        RunnerDecl("perplexity", 1, _SHAPE, True, {
            "data": Option("str", ["pydoc"], "corpora: wikitext2, pydoc, or text files", many=True, fans_out=True, names_data=True),
            "protocol": Option("str", "stream512", "how text becomes scored tokens", choices=_PPL_PROTOCOLS),
            "split": Option("str", "test", "split of wikitext2", choices=("test", "validation")),
            "limit_chunks": Option("int", None, "score only n chunks, evenly over the text (the result is partial)", minimum=1, optional=True,
                                   looks=(4, 32)),
            "kld": Option("bool", True, "compare full next-token distributions with a native pass over the same chunks"),
        }, "perplexity, and KLD, top-1 agreement and delta-p against the baseline",
            variant="{data} {protocol}", beside=True, stage=2),
        RunnerDecl("mcq", 1, _SHAPE, True, {
            "tasks": Option("str", ["cloze"], "question sets", choices=("cloze", "mmlu", "ceval", "arc_easy", "arc_challenge"),
                            many=True, fans_out=True, names_data=True),
            "shots": Option("int", 0, "worked examples before each question", choices=(0, 5)),
            "limit": Option("int", None, "questions (spread over subjects; the result is partial)", minimum=1, optional=True, looks=(24, 200)),
            "chat_template": Option("bool", False, "wrap each prompt in the tokenizer's chat template"),
            "max_truncated": Option("float", 0.0, "share of questions that may be truncated before the cell fails", minimum=0.0),
            "aa_limit": Option("int", 100, "questions (spread over subjects) that the baseline scores twice more for its noise floor; "
                               "0: none", minimum=0),
        }, "multiple choice by logprob, paired with the baseline question by question", variant="{tasks} {shots}-shot", stage=2),
    )
}  # fmt: skip
