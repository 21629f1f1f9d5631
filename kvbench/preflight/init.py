"""A first matrix and gate, for one model and one format: what `kvbench init` writes. It measures nothing.

The gate holds what is exact for this model's shape (bytes), what follows from a format's own rounding
(parity), and the published target of 1% on perplexity. Limits that somebody measured on another model are
left out: they would be numbers about that model.
"""

import json
import os
import re
from pathlib import Path

from kvbench.errors import NotAvailable, UsageError
from kvbench.formats.kv import KV_FORMATS, KVFormat, page_bytes
from kvbench.gate.policy import gate_schema
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.parse import matrix_schema
from kvbench.models.catalog import CONFIGS
from kvbench.models.source import config_facts, kind_of
from kvbench.text import suggestion

FORMATS = tuple(name for name, fmt in KV_FORMATS.items() if fmt.quantized)
_YAML = (".yaml", ".yml")


def files(target: Path, model: str, format_name: str) -> dict[Path, str]:
    """The files to write, by path, the matrix first. target: a folder, or the matrix file itself.

    Raises UsageError for a format or a model that is not known.
    """
    if format_name not in FORMATS:
        raise UsageError(
            f"{format_name} is no KV format that a matrix could compare with native; use one of "
            f"{', '.join(FORMATS)}.{suggestion(format_name, FORMATS)}"
        )
    if kind_of(model) in ("folder", "gguf"):
        model = str(Path(model).expanduser().absolute())
    if target.suffix in _YAML:
        matrix, gate = target, target.with_name(f"{target.stem}-gate{target.suffix}")
    else:
        matrix, gate = target / "matrix.yaml", target / "gate.yaml"
    schemas = matrix.with_name("matrix.schema.json"), matrix.with_name("gate.schema.json")
    fmt = KV_FORMATS[format_name]
    return {
        matrix: _matrix(matrix, gate, schemas[0], model, fmt),
        gate: _gate(matrix, schemas[1], fmt, ratio_of(model, fmt)),
        schemas[0]: json.dumps(matrix_schema(), indent=2, ensure_ascii=False) + "\n",
        schemas[1]: json.dumps(gate_schema(), indent=2, ensure_ascii=False) + "\n",
    }


def write(target: Path, model: str, format_name: str) -> list[Path]:
    """Write them. Raises UsageError, before anything is written, where one is there with other content."""
    due = files(target, model, format_name)
    for path, text in due.items():
        # A link to nothing is there too, and would be written through.
        same = path.exists() and path.suffix not in _YAML and path.read_text(encoding="utf-8") == text
        if os.path.lexists(path) and not same:
            other = target / "another.yaml"
            if target.suffix in _YAML:
                other = target.with_name(f"{target.stem}-2{target.suffix}")
            raise UsageError(
                f"{path} already exists and is not changed; give another name, as in kvbench init {other}, "
                "or move it away."
            )
    for path, text in due.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x" if not path.exists() else "r+", encoding="utf-8") as f:
            f.write(text)
    return list(due)


def ratio_of(model: str, fmt: KVFormat) -> float | None:
    """Bytes of the format's pages to those of 16-bit ones, over all layers of the model, without the two
    scales a layer of a static format; None where the model's config is not here yet."""
    try:
        shapes = [layer.shape for layer in config_facts({**CELL_KEYS, "model": model}).layers]
    except NotAvailable:
        return None
    formats = (fmt, KV_FORMATS["native"])
    own, native = (sum(page_bytes(f, shape, 16, "bfloat16") for shape in shapes) for f in formats)
    return own / native


def _name(matrix: Path) -> str:
    """The run's name: that of the file, or of its folder where the file is just called matrix."""
    stem = matrix.absolute().parent.name if matrix.stem == "matrix" else matrix.stem
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-") or "matrix"


def _matrix(matrix: Path, gate: Path, schema: Path, model: str, fmt: KVFormat) -> str:
    # As YAML text, in quotes where it needs them.
    plain = re.fullmatch(r"[A-Za-z][\w./-]*|/[\w./-]*", model)
    named = model if plain else json.dumps(model, ensure_ascii=False)
    model_lines = f"model: {named}"
    if model in CONFIGS:
        note = "# its weights are random: quality results only show that the code runs"
        model_lines = f"model:\n  source: {named}\n  plumbing: true              {note}"
    scale = ""
    if fmt.scale_kind == "static":
        scale = (
            "  # A static format needs a scale. `default` is 1.0; many models fail with it.\n"
            f"  # Better: kvbench calibrate {named} scales.json --format {fmt.name}, and then scale: "
            "scales.json\n"
            "  scale: default\n"
        )
    return f"""\
# yaml-language-server: $schema={schema.name}
# Compares {fmt.name} with a native KV cache.
# {fmt.name}: {fmt.summary}.
#
#   kvbench validate {matrix.name}             # checks keys, data and gate; loads no model
#   kvbench plan {matrix.name}                 # shows what would run, and its bytes
#   kvbench run {matrix.name} --canary         # measures, judges, reports; checks every precision first
#
# `kvbench schema` prints every key and what it accepts, for editors with a YAML language server.

name: {_name(matrix)}

# A name that kvbench models lists, a hub id (owner/name), a folder with config.json and *.safetensors, or a
# .gguf file.
{model_lines}

axes:                            # every list is varied; a native baseline is added where it is missing
  kv_format: [native, {fmt.name}]
{scale}  batch: [1, 4]                  # sequences at once
  context: [128, 512]            # tokens of the prompt

engine:                          # the same for every cell
  backend: auto                  # Triton kernels where a GPU is found, else torch (kvbench backends says why)
  fallback: refuse               # allow: what cannot run as requested runs as something else

runners:                         # what is measured; the first three on every cell, the others once a format
  storage: {{}}                    # live bytes, against the formula
  transfer: {{}}                   # pages to the host and back
  latency: {{new_tokens: 16, repeats: 3}}         # TTFT and ITL; a limit needs 10 repeats or more
  parity: {{}}                     # decode against an FP32 oracle
  agreement: {{steps: 512, draft: 32}}            # greedy tokens; published targets need 2048 steps
  # Limits make a run short and its results partial; a release needs the whole set (null).
  # wikitext2, mmlu and ceval need --data-dir (kvbench data); pydoc and cloze are built in.
  perplexity: {{data: [pydoc], limit_chunks: 16}}
  mcq: {{tasks: [cloze], limit: 100}}

gate: {gate.name}
"""


def _gate(matrix: Path, schema: Path, fmt: KVFormat, ratio: float | None) -> str:
    where = f"where: {{kv_format: {fmt.name}}}"
    if fmt.scale_granularity == "tensor":
        bound = "at_most: 0.51"
        why = "Half of 16 bits, and two scales a layer for the whole cache."
    elif ratio is None:
        bound = "at_most: 0.75"
        why = "Replace it by the exact value for head_dim D, (D + scale bytes) / 2D (kvbench formats)."
    else:
        bound = f"equals: {ratio!r}"
        why = f"Payload and scales of {fmt.name} to 2 bytes a number, exact for this model (kvbench formats)."
    return f"""\
# yaml-language-server: $schema={schema.name}
# The limits for {matrix.name}. The precision, error and plausibility checks always run first.
name: {_name(matrix)}

# Accepts limited sets. For a release, remove this line and the limits in {matrix.name}.
allow_partial: true

checks:
  - metric: kv_bytes_difference
    equals: 0
    why: The bytes of the live tensors match the formula in every layer.
  - metric: kv_ratio_16bit
    {where}
    {bound}
    why: {why}
  - metric: transfer_bytes_difference
    equals: 0
    why: A swap moves exactly the payload and scales of the pages.
  - metric: parity_bound_share
    at_most: 1
    why: The error of a decode stays within the rounding bound.
  - metric: ppl_delta_pct
    {where}
    within: [-1, 1]
    why: The published target, perplexity within 1% of native.

  # Starting values; replace them by your own limits. required: false: if the check cannot be evaluated, the
  # run no longer ends with exit code 3. A failed check still gives 1 and an inconclusive one still gives 4.
  - metric: top1_agreement
    {where}
    at_least: 0.95
    required: false
    why: Share of positions with the same most likely token as native.
  - metric: mcq_agreement
    {where}
    at_least: 0.9
    required: false
    why: Answers can change while accuracy does not.
  - metric: itl_ratio
    where: {{kv_format: {fmt.name}, device: cuda}}
    at_most: 1.05
    required: false
    why: At most 5% slower for each token on a GPU.
"""
