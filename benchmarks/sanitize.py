"""Every kernel once, on small shapes, for compute-sanitizer; each result is also set against its torch twin.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck  python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize
    compute-sanitizer --tool racecheck python -m benchmarks.sanitize --share 1/8 hopper_gemm

Run it once without compute-sanitizer first: it then finds the kernels compiled, which takes longest under it.
Parts named after the command are the only ones that run, so that several can run side by side: KV formats
(`int8_sym native`), and `quantizer`, `w8a16`, `w8a8`, `hopper_gemm` for the kernels of FP8 weights.
`compiler` is a kernel of ten lines in which warps have roles, as in `hopper_gemm`: racecheck reports the read
of a role against its write in both. Without the caching allocator every tensor is an allocation of its own,
so that memcheck sees an access past its end.

--share 1/8 takes every eighth case of FP8 weights, for eight processes side by side.

Prints one line a kernel and shape; exit code 1 when a result is wrong (compute-sanitizer has its own for what
it finds)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import sanitize_weights
from benchmarks.goals import chosen
from kvbench.engines.reference.kv.layer import allocate_layer
from kvbench.formats.kv import KV_FORMATS, KVShape
from kvbench_kernels.attention import decode, hopper_plan, prefill, reference
from kvbench_kernels.attention.route import decode_kernel
from kvbench_kernels.gemm import skinny_config, skinny_linear
from kvbench_kernels.kv import gather, write
from kvbench_kernels.kv.layout import LayerPages
from kvbench_kernels.launches import record
from kvbench_kernels.support import AttentionNeeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there by the interpreter: TRITON_INTERPRET=1
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
PAGE, LENGTHS = 16, (1, 17, 70)
SHAPES = ((8, 2, 128), (9, 3, 64), (4, 2, 80))  # query heads, KV heads, head dim
LONG = 2200  # tokens: more tiles than the merge of a program takes at a time, with any tiling
TILINGS = (
    hopper_plan.ONE_WARP, hopper_plan.ONE_WARP_DEEP, hopper_plan.TWO_WARPS, hopper_plan.FOUR_WARPS,
    hopper_plan.FOUR_WARPS_DEEP,
)  # fmt: skip


def main() -> int:
    torch.manual_seed(0)
    parts, wrong = (*KV_FORMATS, *sanitize_weights.PARTS), 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sanitize")
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--share", type=share_of, default=(0, 1), metavar="I/N")
    given = parser.parse_args()
    names = chosen(",".join(given.parts), parts, "The part") or list(parts)
    formats = [name for name in names if name in KV_FORMATS]
    for fmt in formats:
        for heads in SHAPES:
            wrong += attention(fmt, *heads)
        if HOPPER:
            wrong += hopper_tilings(fmt)
    if formats:
        wrong += skinny()
    # The interpreter's bfloat16 is none.
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    for name in names:
        if name not in formats:
            torch.manual_seed(0)
            wrong += sanitize_weights.PARTS[name](DEVICE, dtype, report, given.share)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print(f"{', '.join(names)}: " + ("all as their twins" if not wrong else f"{wrong} wrong"))
    return 1 if wrong else 0


def share_of(text: str) -> sanitize_weights.Share:
    """ "2/8" -> (1, 8)."""
    i, n = (int(part) for part in text.split("/"))
    if not 1 <= i <= n:
        raise argparse.ArgumentTypeError(f"{text} is no share: write I/N with 1 <= I <= N, such as 2/8.")
    return i - 1, n


@dataclass(frozen=True)
class Filled:
    """Scattered pages of ragged sequences: queries, payload and scales, then page table and lengths."""

    q: Tensor  # [tokens, Hq, D] of all sequences, packed
    cache: LayerPages
    where: tuple[Tensor, Tensor]

    @property
    def ends(self) -> Tensor:
        return self.where[1].cumsum(0)


def fill(fmt: str, q_heads: int, kv_heads: int, dim: int, lengths: Sequence[int]) -> Filled:
    """Written by the kernel itself."""
    counts = [-(-n // PAGE) for n in lengths]
    scale = (0.05, 0.05) if KV_FORMATS[fmt].scale_kind == "static" else None
    shape = KVShape(kv_heads, dim, dim)
    live = allocate_layer(KV_FORMATS[fmt], shape, PAGE, sum(counts), torch.bfloat16, DEVICE, scale)
    table = torch.full((len(lengths), max(counts)), -1, dtype=torch.int32, device=DEVICE)
    order = torch.randperm(sum(counts), device=DEVICE).int()
    slots, first = [], 0
    for row, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        table[row, :count] = order[first : first + count]
        token = torch.arange(n, device=DEVICE)
        slots.append(table[row, token // PAGE].long() * PAGE + token % PAGE)
        first += count
    q, k, v = (randn(sum(lengths), heads, dim) for heads in (q_heads, kv_heads, kv_heads))
    write.paged_write(live, k, v, torch.cat(slots), torch.zeros(3, dtype=torch.int64, device=DEVICE))
    return Filled(q, live, (table, torch.tensor(lengths, dtype=torch.int32, device=DEVICE)))


def attention(fmt: str, q_heads: int, kv_heads: int, dim: int) -> int:
    """Write, gather, decode (what the route chooses, and the portable one) and prefill of three ragged
    sequences.
    """
    data = fill(fmt, q_heads, kv_heads, dim, LENGTHS)
    cache, q, table = data.cache, data.q, data.where[0]
    reads = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    wrong = 0
    gathers = (gather.paged_gather, reference.paged_gather_torch)
    ours, theirs = (f(cache, table[2:], LENGTHS[2], torch.bfloat16, reads) for f in gathers)
    for side in (0, 1):
        wrong += report(f"gather {fmt} {dim}", ours[side], theirs[side], 0)
    last = q[data.ends - 1]
    needs = AttentionNeeds(cache.fmt, q_heads, kv_heads, dim, dim, PAGE, "bfloat16", DEVICE)
    variants: list[dict[str, Any]] = [{}]
    if q_heads % 2 == 0:
        sinks = torch.randn(q_heads, device=DEVICE)
        variants += [{"sliding_window": 20}, {"softcap": 5.0}, {"sinks": sinks}]
    starts = torch.cat((torch.zeros(1, device=DEVICE), data.ends)).int()
    for extra in variants:
        name = f"{fmt} {dim} {next(iter(extra), '')}"
        due = reference.paged_decode_torch(cache, last, *data.where, dim**-0.5, splits=1, **extra)
        for splits in (1, 3):
            kernels = [decode.paged_decode] if extra else [decode_kernel(needs), decode.paged_decode]
            for kernel in kernels:
                with record() as launches:
                    found = kernel(cache, last, *data.where, dim**-0.5, splits=splits, reads=reads, **extra)
                wrong += report(f"{launches[0].name} {name} splits {splits}", found, due, 2e-2)
        found, due = (
            f(cache, q, *data.where, starts, max(LENGTHS), dim**-0.5, **extra)
            for f in (prefill.paged_prefill, reference.paged_prefill_torch)
        )
        wrong += report(f"prefill {name}", found, due, 2e-2)
    return wrong


def hopper_tilings(fmt: str) -> int:
    """Every tiling of the Hopper kernel: one program along a sequence, some, and so many that parts are
    merged twice.
    """
    from kvbench_kernels.attention.hopper_decode import paged_decode_hopper

    wrong = 0
    for dim in hopper_plan.HEAD_DIMS:
        data = fill(fmt, 8, 2, dim, (33, LONG))
        last = data.q[data.ends - 1]
        arguments = (data.cache, last, *data.where, dim**-0.5)
        due = reference.paged_decode_torch(*arguments, splits=1)
        for tiling in TILINGS:
            for splits, least in ((1, 1), (5, 1), (LONG // tiling.tile, 1), (5, 512)):
                found = paged_decode_hopper(*arguments, splits=hopper_plan.Plan(splits, least, tiling))
                wrong += report(
                    f"hopper {fmt} {dim} {tiling} splits {splits} least {least}", found, due, 2e-2
                )
    return wrong


def skinny() -> int:
    """Each kind of tiling that was measured fastest somewhere, on one weight and on three of unlike sizes."""
    wrong = 0
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    for tiling in sorted(set(skinny_config.MEASURED.values()), key=str):
        for m in (1, 3) if tiling.kind == "vector" else (5, 16):
            for rows in ((200,), (200, 40, 40)):
                x, *weights = (torch.randn(n, 1160, device=DEVICE, dtype=dtype) for n in (m, *rows))
                found = skinny_linear.skinny_linear_many(x, weights, tiling=tiling)
                for out, w in zip(found, weights, strict=True):
                    wrong += report(
                        f"skinny_linear {m} {rows} {tiling}", out, x.double() @ w.double().T, 2e-2
                    )
    return wrong


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


def report(name: str, found: Any, due: Any, share: float) -> int:
    """1 where found is further from due than this share of the largest element."""
    print(name, flush=True)  # where it stopped, if it does
    error = (found.double() - due.double()).abs().max().item()
    fine = error <= share * due.double().abs().max().item()
    if not fine:
        print(f"{name}: off by {error:.3g}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
