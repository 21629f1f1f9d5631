"""Backends: whose code writes and reads the KV pages and attends to them, and which kernels are theirs.

One object a backend, under its name in `kvbench.matrix.resolve_backend`. Triton is imported when its kernels
are first needed.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import torch

from kvbench.engines.reference.attention import Attention, TorchAttention, TritonAttention
from kvbench.formats.kv import KVFormat
from kvbench.matrix import resolve_backend as declared
from kvbench.models.attention_facts import LayerFacts
from kvbench_kernels.attention.reference import paged_gather_torch, paged_write_torch
from kvbench_kernels.support import interpreting

TWIN = "_torch"  # what the names of the reference implementations end with
LIBRARY = "scaled_dot_product_attention"  # the launch of a library's attention

Gather = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Backend:
    """The torch backend, the reference: gathers and dequantizes pages, then attends in torch.

    write, gather: `paged_write` and `paged_gather` of the kernels, or their reference implementations.
    attention(store, chunk, *, splits, fresh=False): what a forward of `chunk` attends with. grouped: it
    attends to each group of like sequences separately, always on gathered pages."""

    name, grouped = declared.TORCH.name, True

    def __init__(self) -> None:
        self.attention: Callable[..., Attention] = TorchAttention

    @cached_property
    def write(self) -> Callable[..., None]:
        return paged_write_torch

    @cached_property
    def gather(self) -> Gather:
        return paged_gather_torch

    def owns(self, kernel: str, prompt: bool) -> bool:
        """Whether a launch of that name is one of this backend's, in a prompt or in a decode step."""
        return kernel.endswith(TWIN)

    def label(self) -> str:
        """Where its attention runs: "torch", "interpreter" or "gpu"."""
        return "torch"

    def execution(
        self, layers: Iterable[LayerFacts], fmt: KVFormat, page_size: int, dtype: str, device: str
    ) -> str:
        """Dtypes of dot operands and accumulator in a decode step, as the backend declares them."""
        return dtype


class TritonBackend(Backend):
    """Kernels that read the pages; prompts of one length gather them for a library's attention."""

    name, grouped = declared.TRITON.name, False

    def __init__(self) -> None:
        self.attention = TritonAttention.of

    @cached_property
    def write(self) -> Callable[..., None]:
        from kvbench_kernels.kv.write import paged_write

        return paged_write

    @cached_property
    def gather(self) -> Gather:
        from kvbench_kernels.kv.gather import paged_gather

        return paged_gather

    def owns(self, kernel: str, prompt: bool) -> bool:
        return not kernel.endswith(TWIN) and (prompt or kernel != LIBRARY)

    def label(self) -> str:
        return "interpreter" if interpreting() else "gpu"

    def execution(
        self, layers: Iterable[LayerFacts], fmt: KVFormat, page_size: int, dtype: str, device: str
    ) -> str:
        from kvbench_kernels.attention.route import execution

        needs = {layer.needs(fmt, page_size, dtype, device, interpreting()) for layer in layers}
        return " and ".join(sorted({execution(need) for need in needs}))


TORCH, TRITON = Backend(), TritonBackend()
BACKENDS: dict[str, Backend] = {TORCH.name: TORCH, TRITON.name: TRITON}
