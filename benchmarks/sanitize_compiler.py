"""Ten lines in which warps take different roles, as in the Hopper product, and nothing of it: what
compute-sanitizer says of these it says of the compiler's code. Every group of warps takes a ticket from a
counter, and each thread notes which.
"""

# Gluon code, as in hopper_gemm_kernel.py.
# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@gluon.jit
def _take(tickets, taken, WHO: gl.constexpr, WARPS: gl.constexpr):
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    barrier()
    ticket = gl.atomic_add(tickets + WHO, 1, sem="acq_rel", scope="gpu")
    gl.store(taken + (gl.program_id(0) * 2 + WHO) * 128 + thread, thread * 0 + ticket)


@gluon.jit
def groups_of_four_warps(tickets, taken):
    """Grid (programs,). tickets int32 [2], zeros; taken int32 [programs, 2, 128], threads of one warp in the
    first 32.
    """
    gl.warp_specialize([(_take, (tickets, taken, 0, 4)), (_take, (tickets, taken, 1, 4))], [4], [128])


@gluon.jit
def four_warps_and_one(tickets, taken):
    """As the product with its copying warp; the other three of its group of warps wait to the end."""
    gl.warp_specialize([(_take, (tickets, taken, 0, 4)), (_take, (tickets, taken, 1, 1))], [1], [24])


@gluon.jit
def no_roles(tickets, taken):
    """One group of warps."""
    _take(tickets, taken, 0, 4)
