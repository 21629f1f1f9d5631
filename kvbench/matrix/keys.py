"""The keys of a cell: what each accepts, means, and is when the matrix does not name it."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.formats.kv import KV_FORMATS, LARGEST, SMALLEST, WEIGHT_FORMATS
from kvbench.formats.scales import WORDS
from kvbench.matrix.rules import Either, Items, Keys, Option
from kvbench_kernels.support import GEMMS, MAX_SPLITS


def _choice(choices: Iterable[str], help: str) -> Option:
    """choices: the accepted words, the default first; a mapping says what each means."""
    words = tuple(choices)
    return Option("str", words[0], help, words, meanings=choices if isinstance(choices, Mapping) else {})


def _count(default: int, help: str) -> Option:
    return Option("int", default, help, minimum=1)


def _one_number_a_layer(scale: Mapping[str, Any]) -> str:
    layers = {len(side) for side in scale.values() if isinstance(side, list)}
    if len(layers) < 2:
        return ""
    found = " and ".join(map(str, sorted(layers)))
    return f"scale: k and v need one number for each layer, got lists of {found}."


_RANGE = "a number above 0 that float32 holds"
_NUMBER = Option("float", None, "", minimum=SMALLEST, maximum=LARGEST, expects=_RANGE)
_SIDE = Either((_NUMBER, Items(_NUMBER, least=1)))
_SIDES = Keys(
    *("scale", {"k": _SIDE, "v": _SIDE}),
    required=("k", "v"),
    example="{k: 0.05, v: 0.1}",
    ordered=True,
    also=_one_number_a_layer,
)
SCALE = Either(
    (
        _NUMBER,
        Option("str", None, "", tuple(WORDS)),
        Option("str", None, "", pattern=r"\.json$", expects="the name of a .json file of scales"),
        _SIDES,
    ),
    "scale of a static format: one number; {k: x, v: y}, each a number or a list of one a layer; a file that "
    "kvbench calibrate wrote or that engines publish, relative to the matrix; or a word. "
    + ". ".join(f"{word}: {meaning}" for word, meaning in WORDS.items()),
    optional=True,
    kind="scale",
)

_NATIVE = "the unquantized model for cells with native weights, where model is an FP8 checkpoint"
_GEMM = (
    "path of the products of FP8 weights; auto: the fastest measured for (M, N, K), reference on backend "
    "torch; what a path cannot compute runs as reference, and the record shows it"
)
_SPLITS = "programs along a sequence in a Triton decode; 1: no split; null: chosen from the shape"
_WHERE_FAST = "where backend triton runs on a GPU, else"

# The order is the order of columns.
CELL_OPTIONS: dict[str, Option | Either] = {
    "model": Option("str", None, "alias, hub id, folder or .gguf file"),
    "model_weights": _choice(("checkpoint", "random"), "random: drawn from the config, for timing only"),
    "model_revision": Option("str", None, "revision of a hub model", optional=True),
    "native_model": Option("str", None, _NATIVE, optional=True),
    "trust_remote_code": Option("bool", False, "let transformers run the checkpoint's own code"),
    "plumbing": Option("bool", False, "quality runners accept random weights, and mark every result partial"),
    "weights": _choice({f.name: f.summary for f in WEIGHT_FORMATS.values()}, "storage format of the weights"),
    "gemm": _choice(GEMMS, _GEMM),
    "kv_format": _choice(
        {f.name: f.summary for f in KV_FORMATS.values()}, "storage format of keys and values"
    ),
    "scale": SCALE,
    "backend": _choice(
        ("torch", "triton", "auto"),
        "the code that executes attention; auto: triton where a GPU is found, else torch",
    ),
    "kv_splits": Option("int", None, _SPLITS, minimum=1, maximum=MAX_SPLITS, optional=True),
    "decode": _choice(
        ("auto", "graph", "eager"), f"graph: a decode step is one CUDA graph; auto: graph {_WHERE_FAST} eager"
    ),
    "compile": _choice(
        ("auto", "layer", "off"), f"layer: decoder layers compiled one by one; auto: layer {_WHERE_FAST} off"
    ),
    "device": _choice(("auto", "cpu", "cuda"), "auto: cuda where a GPU is found, else cpu"),
    "dtype": _choice(("auto", "float32", "bfloat16", "float16"), "auto: float32 on cpu, bfloat16 on cuda"),
    "page_size": _count(16, "tokens of a page"),
    "prefill_chunk": _count(512, "prompt tokens a forward"),
    "prefill_reads": _choice(
        ("stored", "fresh"),
        "what a prompt's own chunk attends to: its stored (quantized) or its fresh keys and values",
    ),
    "fallback": _choice(
        ("refuse", "allow"),
        "allow: what cannot run as requested runs as something else, and the report shows it",
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
