"""The resolver: what was asked for, what will run, and why. Pure: no torch, no files, no globals.

Each aspect (kv_format, weights, gemm, backend, decode, compile) becomes a `Choice`: the requested and the
resolved value, a reason, and the rejected options with theirs. Requested != resolved is a declared fallback,
allowed only with `fallback: allow`. `auto` asks for the best that can run; its result is no fallback.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvbench.errors import Refused, UsageError
from kvbench.formats.kv import KV_FORMATS, WEIGHT_FORMATS
from kvbench.models.attention_facts import ModelFacts
from kvbench_kernels.support import GEMMS, NO_GPU, Accepted, Rejected, interpreting, supports

AUTO = "auto"


@dataclass(frozen=True)
class Request:
    """What a cell asks for. interpreter: Triton kernels run in its interpreter, on the CPU."""

    kv_format: str
    weights: str
    backend: str
    fallback: str  # "allow" or "refuse"
    device: str = "cpu"
    dtype: str = "float32"
    page_size: int = 16
    prefill_reads: str = "stored"
    decode: str = AUTO
    compile: str = AUTO
    kv_splits: int | None = None
    gemm: str = AUTO
    interpreter: bool = False


def request_of(spec: Mapping[str, Any]) -> Request:
    """The request of a cell whose `device` and `dtype` are resolved."""
    keys = [f.name for f in fields(Request) if f.name != "interpreter"]
    return Request(**{key: spec[key] for key in keys}, interpreter=interpreting())


@dataclass(frozen=True)
class Choice:
    """One aspect of a decision. rejected: (option, reason) pairs in the order in which they were tried.
    reason: a stable word: "requested", "decided_at_load", "best_available", or the reason of the rejection
    that led to the fallback. sentence: the same in words."""

    requested: str
    resolved: str
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    sentence: str = ""

    @property
    def fell_back(self) -> bool:
        return self.requested not in (AUTO, self.resolved)


@dataclass(frozen=True)
class Decision:
    """gemm: "native" (native weights), "by_shape" (each FP8 product takes the path for its shape), or one
    path for all. decode: "graph" (a step is one CUDA graph) or "eager". compile: "layer" or "off"."""

    kv_format: Choice
    weights: Choice
    backend: Choice
    gemm: Choice = Choice(AUTO, "native", "native_weights")
    decode: Choice = Choice(AUTO, "eager", "default")
    compile: Choice = Choice(AUTO, "off", "default")

    @property
    def fell_back(self) -> bool:
        return any(getattr(self, aspect).fell_back for aspect in ASPECTS)


ASPECTS = tuple(f.name for f in fields(Decision))  # also the cell keys that ask for them


@dataclass(frozen=True)
class Backend:
    """A backend as the resolver sees it; `kvbench.engines.reference.backends` has its code. supports: whether
    it can run a request on a model. triton: its kernels are written in Triton. These kernels include the
    fused FP8 products and split decodes, and on a GPU they allow CUDA graphs and compiled layers."""

    name: str
    supports: Callable[[Request, ModelFacts], Accepted | Rejected]
    triton: bool


def _torch_supports(request: Request, facts: ModelFacts) -> Accepted | Rejected:
    """Full and sliding attention, soft-cap and sinks in every KV format; MLA in native only."""
    for attribute, sentence in facts.unsupported:
        return Rejected("attention_unsupported", f"{sentence} (config attribute {attribute})")
    strange = sorted({layer.kind for layer in facts.layers} - {"full", "sliding", "mla"})
    if strange:
        where = [i for i, layer in enumerate(facts.layers) if layer.kind == strange[0]]
        return Rejected(
            "layer_kind_unsupported",
            f"Layer {where[0]} (and {len(where) - 1} more) is of kind {strange[0]!r}; the engine has full, "
            "sliding and MLA attention.",
        )
    if KV_FORMATS[request.kv_format].quantized and any(layer.kind == "mla" for layer in facts.layers):
        return Rejected(
            "mla_not_validated",
            f"The model caches a latent (MLA); {request.kv_format} has not been validated on it, only native "
            "has.",
        )
    return Accepted()


def _triton_supports(request: Request, facts: ModelFacts) -> Accepted | Rejected:
    """What the kernels support in every layer, and what the torch backend supports."""
    for layer in facts.layers:
        fmt = KV_FORMATS[request.kv_format]
        needs = layer.needs(fmt, request.page_size, request.dtype, request.device, request.interpreter)
        if isinstance(answer := supports(needs), Rejected):
            return answer
    if request.prefill_reads != "stored":
        sentence = "The Triton kernels read every token from the pages; fresh reads run on backend torch."
        return Rejected("fresh_reads", sentence)
    return _torch_supports(request, facts)


TORCH = Backend("torch", _torch_supports, triton=False)  # the reference, to which a request falls back
TRITON = Backend("triton", _triton_supports, triton=True)
BACKENDS: dict[str, Backend] = {backend.name: backend for backend in (TORCH, TRITON)}


def resolve(
    request: Request, facts: ModelFacts | None, backends: Mapping[str, Backend] = BACKENDS
) -> Decision:
    """What will run for `request` on a model with `facts`.

    facts None: the model is not loaded yet, so each choice is the request, with the reason `decided_at_load`.
    Fallbacks are tried in this order: the same format on the torch backend, native on the requested backend,
    native on torch. Raises UsageError for an unknown name; Refused when `fallback` is "refuse" and the
    request cannot run as asked, when nothing can run, and for `kv_splits` where nothing splits."""
    accepted: dict[str, Iterable[str]] = {
        "kv_format": KV_FORMATS,
        "weights": WEIGHT_FORMATS,
        "backend": (*backends, AUTO),
        "fallback": ("allow", "refuse"),
        "gemm": GEMMS,
        "decode": (AUTO, "graph", "eager"),
        "compile": (AUTO, "layer", "off"),
    }
    for key, names in accepted.items():
        if (value := getattr(request, key)) not in names:
            raise UsageError(f"{key} {value!r} is unknown; choose one of {', '.join(names)}.")
    if facts is None:
        sentence = "The model's config is not here yet; this is decided when it is loaded."
        asked = [getattr(request, aspect) for aspect in ASPECTS]
        return Decision(*(Choice(value, value, "decided_at_load", (), sentence) for value in asked))
    kv_format, backend = _resolve_attention(request, facts, backends)
    chosen = backends[backend.resolved]
    if request.kv_splits is not None and not chosen.triton:
        raise Refused(
            "splits_need_triton",
            f"kv_splits: {request.kv_splits} was asked for, and the cell runs on backend {chosen.name}, "
            "which has no splits; remove it, or ask for backend triton where its kernels run.",
        )
    return Decision(
        kv_format,
        _choice(request.weights, request.weights, []),  # each format has at least the reference product
        backend,
        _resolve_gemm(request, chosen),
        _resolve_speed(request, "decode", "graph", "eager", chosen),
        _resolve_speed(request, "compile", "layer", "off", chosen),
    )


def _resolve_attention(
    request: Request, facts: ModelFacts, backends: Mapping[str, Backend]
) -> tuple[Choice, Choice]:
    """(kv_format, backend). `auto` tries Triton first on a GPU only: its interpreter is for tests."""
    best = TRITON.name if request.device == "cuda" else TORCH.name
    first = best if request.backend == AUTO else request.backend
    options = dict.fromkeys((b, fmt) for fmt in (request.kv_format, "native") for b in (first, TORCH.name))
    rejections: list[tuple[str, str, Rejected]] = []
    for backend, kv_format in options:
        answer = backends[backend].supports(replace(request, backend=backend, kv_format=kv_format), facts)
        if isinstance(answer, Accepted):
            break
        rejections.append((backend, kv_format, answer))
    else:
        last = rejections[-1][2]
        raise Refused(last.reason, f"{last.sentence} Not even kv_format native can run on this model.")
    as_asked = not rejections or (request.backend == AUTO and kv_format == request.kv_format)
    if request.fallback == "refuse" and not as_asked:
        raise _refused(rejections[0][2], f"kv_format {request.kv_format} on backend {request.backend}")
    if request.backend == AUTO and first == TORCH.name:
        rejections.insert(0, (TRITON.name, kv_format, Rejected("no_gpu", NO_GPU.format(request.device))))
    formats = [(f, no) for b, f, no in rejections if b == backend and f != kv_format]
    return (
        _choice(request.kv_format, kv_format, formats),
        _choice(request.backend, backend, [(b, no) for b, _, no in rejections if b != backend]),
    )


def _resolve_gemm(request: Request, backend: Backend) -> Choice:
    """The path of FP8 products: the fused ones are Triton kernels."""
    asked = request.gemm
    if request.weights == "native":
        return Choice(asked, "native", "native_weights", (), "Native weights have no FP8 product.")
    if backend.triton and not (asked == "w8a8" and request.dtype == "float32"):
        return _choice(asked, "by_shape" if asked == AUTO else asked, [])
    if asked in (AUTO, "reference"):
        return _choice(asked, "reference", [])
    if backend.triton:
        no = Rejected(
            "gemm_needs_16_bits",
            "gemm: w8a8 gives 16-bit results, and this cell's dtype is float32; ask for bfloat16 or float16, "
            "or gemm: reference.",
        )
    else:
        no = Rejected(
            "gemm_needs_triton",
            f"gemm: {asked} is a Triton kernel, and this cell runs on backend {backend.name}; ask for "
            "backend triton where its kernels run, or gemm: reference.",
        )
    if request.fallback == "refuse":
        raise _refused(no, f"gemm {asked}")
    return _choice(asked, "reference", [(asked, no)])


def _resolve_speed(request: Request, aspect: str, fast: str, plain: str, backend: Backend) -> Choice:
    """CUDA graphs or compiled layers: both need the Triton backend on a GPU."""
    asked: str = getattr(request, aspect)
    if asked == plain:
        return _choice(asked, plain, [])
    if backend.triton and request.device == "cuda":
        return _choice(asked, fast, [])
    no = Rejected(
        f"{fast}_needs_triton_on_gpu",
        f"{aspect}: {fast} needs backend triton on a CUDA device; this cell runs on backend {backend.name}, "
        f"{request.device}.",
    )
    if asked == fast and request.fallback == "refuse":
        raise _refused(no, f"{aspect} {fast}")
    return _choice(asked, plain, [(fast, no)])


def _refused(answer: Rejected, what: str) -> Refused:
    advice = "Set engine: {fallback: allow} to run what can."
    return Refused(answer.reason, f"{what} was asked for and cannot run: {answer.sentence} {advice}")


def _choice(requested: str, resolved: str, rejections: Sequence[tuple[str, Rejected]]) -> Choice:
    rejected: dict[str, Rejected] = {}
    for option, no in rejections:
        rejected.setdefault(option, no)
    words = tuple((option, no.reason) for option, no in rejected.items())
    if requested == resolved:
        return Choice(requested, resolved, "requested", words, "It runs as asked.")
    if requested == AUTO and not rejected:
        return Choice(requested, resolved, "best_available", words, "Nothing stands against it.")
    no = next(iter(rejected.values())) if requested == AUTO else rejected[requested]
    return Choice(requested, resolved, no.reason, words, no.sentence)


def context_fault(facts: ModelFacts, context: int, new_tokens: int) -> Rejected | None:
    """Why `context` prompt tokens and `new_tokens` generated ones do not fit the model's positions, or None.
    The last generated token is never fed back and needs no position."""
    after = max(new_tokens - 1, 0)
    if facts.max_context is None or context + after <= facts.max_context:
        return None
    return Rejected(
        "invalid_context",
        f"A context of {context} tokens with {new_tokens} new ones needs {context + after} positions, and "
        f"the model ({facts.model_type}) has {facts.max_context}. Use a context of at most "
        f"{max(facts.max_context - after, 0)}; nothing is clipped.",
    )


def check_context(facts: ModelFacts, context: int, new_tokens: int) -> None:
    """Raises Refused("invalid_context") when they do not fit (`context_fault`)."""
    if fault := context_fault(facts, context, new_tokens):
        raise Refused(fault.reason, fault.sentence)
