"""What each cell key accepts, as `Option`s: the matrix is checked against this table and the schema printed from it."""

from __future__ import annotations

from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.runners import Option
from kvbench_kernels.support import GEMMS, MAX_SPLITS


def _key(
    name: str,
    kind: str,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    minimum: int | None = None,
    maximum: int | None = None,
) -> tuple[str, Option]:
    optional = CELL_KEYS[name] is None and name != "model"
    return name, Option(kind, CELL_KEYS[name], help, choices, minimum, optional, maximum=maximum)


CELL_OPTIONS: dict[str, Option] = dict(
    (
        _key("model", "str", "alias, hub id, folder or .gguf file"),
        _key("model_weights", "str", "random: drawn from the config, for timing only", choices=("checkpoint", "random")),
        _key("model_revision", "str", "revision of a hub model"),
        _key("native_model", "str", "the unquantized model that cells with native weights run on, where model is an FP8 checkpoint"),
        _key("trust_remote_code", "bool", "let transformers run the checkpoint's own code"),
        _key("plumbing", "bool", "quality runners accept random weights, and mark every result partial"),
        _key("weights", "str", "storage format of the weights", choices=tuple(WEIGHT_FORMATS)),
        _key("gemm", "str", "path of the products of FP8 weights; auto: the fastest measured for (M, N, K), reference on backend "
             "torch; what a path does not take runs as reference, and the record says so", choices=GEMMS),
        _key("kv_format", "str", "storage format of keys and values", choices=tuple(KV_FORMATS)),
        _key("scale", "scale", "scale of a static format: a number, {k: x, v: y} of numbers or lists (one a layer), a file of "
             "kvbench calibrate or in the form that engines publish, relative to the matrix, or a word: default, checkpoint, "
             "checkpoint_or_default"),
        _key("backend", "str", "the code that executes attention; auto: triton where a GPU is found, else torch",
             choices=("torch", "triton", "auto")),
        _key("kv_splits", "int", "programs along a sequence in a Triton decode; 1: split-KV off; null: chosen from the shape",
             minimum=1, maximum=MAX_SPLITS),
        _key("decode", "str", "graph: a decode step is one CUDA graph", choices=("auto", "graph", "eager")),
        _key("compile", "str", "layer: decoder layers compiled one by one", choices=("auto", "layer", "off")),
        _key("device", "str", "auto: cuda where there is one, else cpu", choices=("auto", "cpu", "cuda")),
        _key("dtype", "str", "auto: float32 on cpu, bfloat16 on cuda", choices=("auto", "float32", "bfloat16", "float16")),
        _key("page_size", "int", "tokens of a page", minimum=1),
        _key("prefill_chunk", "int", "prompt tokens a forward", minimum=1),
        _key("prefill_reads", "str", "what a prompt's own chunk attends to: its stored or its fresh keys and values",
             choices=("stored", "fresh")),
        _key("fallback", "str", "whether what cannot run as asked may run as something else, visibly", choices=("refuse", "allow")),
        _key("batch", "int", "sequences at once", minimum=1),
        _key("context", "int", "tokens of the prompt", minimum=1),
    )
)  # fmt: skip

# The keys of a `model` mapping, and the cell keys that they stand for.
MODEL_KEYS: dict[str, str] = {
    "source": "model",
    "weights": "model_weights",
    "revision": "model_revision",
    "native": "native_model",
    "trust_remote_code": "trust_remote_code",
    "plumbing": "plumbing",
}
