"""Tensors of more than 2^31 elements that take no memory on a CPU, and kernels of which the interpreter runs
only the end.
"""

import math
import mmap

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

# Linux's MAP_NORESERVE, which mmap has no name for: pages that are never written are not accounted for.
NORESERVE = 0x4000


def address_space(*shape, dtype, device="cpu", front=2**31):
    """Zeros [*shape]; memory is taken where something is written. `front` zeros more lie before them: there
    an offset ends up that wrapped in 32 bits, so that it gives a wrong result instead of a dead process. A
    GPU's are torch.empty.
    """
    if device != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = (front + math.prod(shape)) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError as error:
        pytest.skip(f"needs {size / 2**30:.0f} GiB of address space: {error}")
    return torch.frombuffer(memory, dtype=dtype, offset=front * dtype.itemsize).view(shape)


def empty(*shape, dtype, device):
    """torch.empty, to be put in its place: the outputs that a wrapper allocates."""
    return address_space(*(shape if isinstance(shape[0], int) else shape[0]), dtype=dtype, device=device.type)


class LastPrograms:
    """A kernel that runs only the last programs along the grid's first axis; they are told where they really
    stand.
    """

    def __init__(self, kernel):
        self.kernel, self.fn = kernel, kernel.fn

    def __getitem__(self, grid):
        def launch(*args, **options):
            def stand(x, y, z):
                interpreter_builder.grid_idx = (x + grid[0] - 1, y, z)

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(interpreter_builder, "set_grid_idx", stand)
                return self.kernel[(1, *grid[1:])](*args, **options)

        return launch
