"""`kvbench formats` and `kvbench backends`: what there is, and what can run here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import Refused, UsageError
from kvbench.formats import kv
from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS, error_bound
from kvbench.machine.host import Host
from kvbench.matrix.cells import CELL_KEYS
from kvbench.matrix.resolve_backend import BACKENDS, Request
from kvbench.models.attention_facts import LayerFacts, ModelFacts
from kvbench.models.source import config_facts
from kvbench_kernels.support import DTYPES, HEAD_DIMS, PAGE_SIZES, Accepted, interpreting


@dataclass(frozen=True)
class Shape:
    """The attention of a model whose layers are all alike."""

    layers: int
    kv_heads: int
    head_dim: int
    q_heads: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value} is too small; give 1 or more.")

    @property
    def facts(self) -> ModelFacts:
        layer = LayerFacts("full", self.q_heads, kv.KVShape(self.kv_heads, self.head_dim, self.head_dim))
        return ModelFacts("shape", (layer,) * self.layers, None)


def format_rows(facts: ModelFacts, device: str, dtype: str) -> list[dict[str, Any]]:
    """One mapping per KV format: its storage, its bytes per token, and each backend's answer."""
    rows, shapes = [], [layer.shape for layer in facts.layers]
    of16 = sum(kv.page_bytes(KV_FORMATS["native"], shape, 1, "bfloat16") for shape in shapes)
    for fmt in KV_FORMATS.values():
        token = sum(kv.page_bytes(fmt, shape, 1, dtype) for shape in shapes)
        row = {
            "name": fmt.name,
            "summary": fmt.summary,
            "payload": fmt.payload_dtype or dtype,
            "scale": fmt.scale_kind,
            "scale_dtype": fmt.scale_dtype,
            "granularity": fmt.scale_granularity,
            "bytes_per_token": token,
            "ratio_16bit": token / of16,
            "fixed_bytes": 2 * fmt.scale_bytes * len(shapes) if fmt.scale_granularity == "tensor" else 0,
            "error_bound": error_bound(fmt.payload_dtype),
            "backends": {name: verdict(name, fmt.name, facts, device, dtype) for name in BACKENDS},
        }
        rows.append(row)
    return rows


def verdict(backend: str, kv_format: str, facts: ModelFacts, device: str, dtype: str) -> str:
    """ "" where the backend takes the format for this model, or its reason in a sentence."""
    how = interpreting()
    request = Request(kv_format, "native", backend, "refuse", device, dtype, 16, interpreter=how)
    answer = BACKENDS[backend].supports(request, facts)
    return "" if isinstance(answer, Accepted) else f"{answer.reason}: {answer.sentence}"


def weight_rows() -> list[dict[str, Any]]:
    """One mapping per weight format; the ratio is of a 4096x4096 layer to 2 bytes per number."""
    n = k = 4096
    return [
        {
            "name": fmt.name,
            "summary": fmt.summary,
            "payload": fmt.payload_dtype or "bfloat16",
            "scale_dtype": fmt.scale_dtype,
            "granularity": "none" if fmt.block is None else "x".join(map(str, fmt.block)),
            "ratio_16bit": kv.weight_bytes(fmt, n, k, "bfloat16").total / (2 * n * k),
            "error_bound": error_bound(fmt.payload_dtype),
        }
        for fmt in WEIGHT_FORMATS.values()
    ]


def backend_rows(facts: ModelFacts, host: Host, triton_version: str | None) -> list[dict[str, Any]]:
    """One mapping per backend. usable: it takes a format here; why_not: the other formats by reason."""
    rows, dtype = [], "bfloat16" if host.device == "cuda" else "float32"
    for name, backend in BACKENDS.items():
        answers = {fmt: verdict(name, fmt, facts, host.device, dtype) for fmt in KV_FORMATS}
        if backend.triton and triton_version is None:
            no_triton = "not_installed: triton is not installed; on Linux: pip install triton."
            answers = dict.fromkeys(KV_FORMATS, no_triton)
        why: dict[str, list[str]] = {}
        for fmt, no in answers.items():
            why.setdefault(no, []).append(fmt)
        taken = why.pop("", [])
        row = {
            "name": name,
            "usable": bool(taken),
            "interpreted": backend.triton and host.device != "cuda" and bool(taken),
            "formats": taken,
            "why_not": [{"formats": formats, "reason": no} for no, formats in why.items()],
        }
        rows.append(row | _SCOPE[name])
    return rows


_SCOPE: dict[str, dict[str, Any]] = {
    "torch": {
        "devices": ["cpu", "cuda"],
        "what": "the reference: dequantizes, then attends; every head_dim and page size",
        "dtypes": ["float32", "bfloat16", "float16"],
        "head_dims": "any",
        "page_sizes": "any",
        "attention": "full, sliding window, soft-cap, sinks; MLA natively",
    },
    "triton": {
        "devices": ["cuda"],
        "what": "paged attention over quantized pages, CUDA graphs, compiled layers, fused FP8 products",
        "dtypes": list(DTYPES),
        "head_dims": f"multiples of {HEAD_DIMS.step} from {HEAD_DIMS.start} to {HEAD_DIMS[-1]}",
        "page_sizes": ", ".join(map(str, PAGE_SIZES)),
        "attention": "full, sliding window, soft-cap, sinks",
    },
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest word, two spaces between."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return "\n".join(
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    )


def facts_of(model: str) -> ModelFacts:
    """A model's config. NotAvailable if it is not here, UsageError if unknown or refused by the engine."""
    try:
        return config_facts({**CELL_KEYS, "model": model})
    except Refused as e:
        raise UsageError(str(e)) from None
