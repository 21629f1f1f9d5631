"""The keys of a cell: what each accepts, means, and is when the matrix does not name it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.formats.kv import KV_FORMATS, LARGEST, SMALLEST, WEIGHT_FORMATS
from kvbench.formats.scales import WORDS
from kvbench.matrix.rules import Either, Items, Keys, Option
from kvbench_kernels.support import GEMMS, MAX_SPLITS


def _choice(default: str, help: str, choices: Iterable[str]) -> Option:
    """choices: the accepted words; a mapping says what each means."""
    meanings = choices if isinstance(choices, Mapping) else {}
    return Option("str", default, help, tuple(choices), meanings=meanings)


def _count(default: int, help: str) -> Option:
    return Option("int", default, help, minimum=1)


_NUMBER = Option(
    "float", None, "", minimum=SMALLEST, maximum=LARGEST, expects="a number above 0 that float32 holds"
)


def _one_number_a_layer(scale: Mapping[str, Any]) -> str:
    layers = {len(side) for side in scale.values() if isinstance(side, list)}
    if len(layers) < 2:
        return ""
    return (
        f"scale: k and v need one number for each layer, got lists of "
        f"{' and '.join(map(str, sorted(layers)))}."
    )


_SIDE = Either((_NUMBER, Items(_NUMBER, least=1)))
SCALE = Either(
    (
        _NUMBER,
        Option("str", None, "", tuple(WORDS)),
        Option("str", None, "", pattern=r"\.json$", expects="the name of a .json file of scales"),
        Keys(
            "scale",
            {"k": _SIDE, "v": _SIDE},
            required=("k", "v"),
            example="{k: 0.05, v: 0.1}",
            ordered=True,
            also=_one_number_a_layer,
        ),
    ),
    "scale of a static format: one number; {k: x, v: y}, each a number or a list of one a layer; a file that "
    "kvbench calibrate wrote or that engines publish, relative to the matrix; or a word. "
    + ". ".join(f"{word}: {meaning}" for word, meaning in WORDS.items()),
    optional=True,
    kind="scale",
)

# The order is the order of columns.
CELL_OPTIONS: dict[str, Option | Either] = {
    "model": Option("str", None, "alias, hub id, folder or .gguf file"),
    "model_weights": _choice(
        "checkpoint", "random: drawn from the config, for timing only", ("checkpoint", "random")
    ),
    "model_revision": Option("str", None, "revision of a hub model", optional=True),
    "native_model": Option(
        "str",
        None,
        "the unquantized model for cells with native weights, where model is an FP8 checkpoint",
        optional=True,
    ),
    "trust_remote_code": Option("bool", False, "let transformers run the checkpoint's own code"),
    "plumbing": Option("bool", False, "quality runners accept random weights, and mark every result partial"),
    "weights": _choice(
        "native", "storage format of the weights", {f.name: f.summary for f in WEIGHT_FORMATS.values()}
    ),
    "gemm": _choice(
        "auto",
        "path of the products of FP8 weights; auto: the fastest measured for (M, N, K), reference on backend "
        "torch; what a path cannot compute runs as reference, and the record shows it",
        GEMMS,
    ),
    "kv_format": _choice(
        "native", "storage format of keys and values", {f.name: f.summary for f in KV_FORMATS.values()}
    ),
    "scale": SCALE,
    "backend": _choice(
        "torch",
        "the code that executes attention; auto: triton where a GPU is found, else torch",
        ("torch", "triton", "auto"),
    ),
    "kv_splits": Option(
        "int",
        None,
        "programs along a sequence in a Triton decode; 1: no split; null: chosen from the shape",
        minimum=1,
        maximum=MAX_SPLITS,
        optional=True,
    ),
    "decode": _choice(
        "auto",
        "graph: a decode step is one CUDA graph; auto: graph where backend triton runs on a GPU, else eager",
        ("auto", "graph", "eager"),
    ),
    "compile": _choice(
        "auto",
        "layer: decoder layers compiled one by one; auto: layer where backend triton runs on a GPU, else off",
        ("auto", "layer", "off"),
    ),
    "device": _choice("auto", "auto: cuda where a GPU is found, else cpu", ("auto", "cpu", "cuda")),
    "dtype": _choice(
        "auto", "auto: float32 on cpu, bfloat16 on cuda", ("auto", "float32", "bfloat16", "float16")
    ),
    "page_size": _count(16, "tokens of a page"),
    "prefill_chunk": _count(512, "prompt tokens a forward"),
    "prefill_reads": _choice(
        "stored",
        "what a prompt's own chunk attends to: its stored (quantized) or its fresh keys and values",
        ("stored", "fresh"),
    ),
    "fallback": _choice(
        "refuse",
        "allow: what cannot run as requested runs as something else, and the report shows it",
        ("refuse", "allow"),
    ),
    "batch": _count(1, "sequences at once"),
    "context": _count(512, "tokens of the prompt"),
}

# Every key of a cell, with the value it has when the matrix does not name it (a model must be named).
CELL_KEYS: dict[str, Any] = {key: option.default for key, option in CELL_OPTIONS.items()}

# The keys of a `model` mapping, and the cell keys that they stand for.
MODEL_KEYS: dict[str, str] = {
    "source": "model",
    "weights": "model_weights",
    "revision": "model_revision",
    "native": "native_model",
    "trust_remote_code": "trust_remote_code",
    "plumbing": "plumbing",
}
