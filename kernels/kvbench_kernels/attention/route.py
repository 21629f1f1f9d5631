"""Which decode kernel takes a layer, how it divides the work, and what it computes in.

The Gluon kernel (`hopper_decode.py`) runs what it supports on a GPU of compute capability 9, the portable one
(`decode.py`) everything else. A new kernel is one more line in `decode_kernel`, `plan`, `workspace` and
`execution`."""

import functools
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from kvbench_kernels.attention import hopper_plan, tiles
from kvbench_kernels.attention.decode import choose_splits, paged_decode
from kvbench_kernels.attention.hopper_plan import Plan, plan_decode, supports_hopper
from kvbench_kernels.support import Accepted, AttentionNeeds


def takes_hopper(needs: AttentionNeeds) -> bool:
    """Whether the Gluon kernel serves this layer on the current device."""
    return isinstance(supports_hopper(needs, _capability()), Accepted)


def decode_kernel(needs: AttentionNeeds) -> Callable[..., Tensor]:
    """The fastest kernel for this layer, with paged_decode's signature (the Gluon one without extras)."""
    return _hopper if takes_hopper(needs) else paged_decode


def plan(needs: AttentionNeeds, batch: int, longest: int, mean: int, splits: int | None) -> int | Plan:
    """decode_kernel's `splits`: as given, or chosen by the tokens of the longest and the average sequence."""
    if splits is not None:
        return splits
    if takes_hopper(needs):
        return plan_decode(needs.fmt, batch, needs.kv_heads, longest, _multiprocessors(), float(mean))
    return choose_splits(batch, needs.kv_heads, longest, _multiprocessors())


def workspace(needs: AttentionNeeds, batch: int, chosen: int | Plan, device: torch.device) -> Hashable | None:
    """Memory for the calls of one CUDA graph; None if the kernel keeps none between calls."""
    if not takes_hopper(needs):
        return None
    most = chosen.splits if isinstance(chosen, Plan) else chosen
    from kvbench_kernels.attention.hopper_decode import plan_workspace

    return plan_workspace(batch, needs.q_heads, needs.kv_heads, needs.head_dim, most, device)


def execution(needs: AttentionNeeds) -> str:
    """Operands and accumulator of both products in a decode: "float16 x float16 -> float32"."""
    if takes_hopper(needs):
        return hopper_plan.execution(needs.fmt, needs.dtype)
    return tiles.execution(needs.fmt, getattr(torch, needs.dtype))


def _hopper(
    *args: object, sliding_window: None = None, softcap: None = None, sinks: None = None, **more: object
) -> Tensor:
    from kvbench_kernels.attention.hopper_decode import paged_decode_hopper  # Gluon, where it is needed

    return paged_decode_hopper(*args, **more)  # type: ignore[arg-type]


@functools.cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@functools.cache
def _multiprocessors() -> int:
    """Of the device; 1 without a GPU."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 1
