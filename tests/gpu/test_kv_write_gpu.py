"""What the interpreter cannot show of paged_write and paged_gather: graphs, kernel names, no waiting, prefill
sizes.
"""

from contextlib import contextmanager

import pytest
import torch

from kvbench_kernels.attention.reference import paged_write_torch
from kvbench_kernels.kv.gather import paged_gather
from kvbench_kernels.kv.write import paged_write
from kvbench_kernels.launches import record
from tests.kernels.kv_pages import FORMATS, hard_rows, make_pool

pytestmark = pytest.mark.gpu


@contextmanager
def no_sync():
    """Any wait of the host for the device inside the block is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_graph_holds_the_write_and_sees_new_inputs_slots_and_scales(fmt):
    k, v = (torch.zeros(4, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.full((4,), -1, device="cuda")
    ours, twin = (make_pool(fmt, "cuda", torch.bfloat16) for _ in range(2))
    paged_write(ours.cache, k, v, slots, ours.health)  # compiles; stores nothing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_write(ours.cache, k, v, slots, ours.health)
    for step in range(3):
        k.copy_(hard_rows(4, 2, 64, torch.bfloat16, "cuda", seed=2 * step))
        v.copy_(hard_rows(4, 2, 64, torch.bfloat16, "cuda", seed=2 * step + 1))
        slots.copy_(torch.tensor([step, 17 + step, -1, 63 - step]))
        if fmt.endswith("static"):
            for pool in (ours, twin):
                assert pool.cache.k_scale is not None
                pool.cache.k_scale.fill_(0.5 + step)
        graph.replay()
        paged_write_torch(twin.cache, k, v, slots, twin.health)
        assert ours.content() == twin.content()


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_profiler_sees_one_kernel_of_the_recorded_name(fmt):
    x = torch.ones(4, 2, 64, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(4, device="cuda")
    pages = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    reads = torch.zeros(2, dtype=torch.int64, device="cuda")
    pool = make_pool(fmt, "cuda", torch.bfloat16)

    def both():
        paged_write(pool.cache, x, x, slots, pool.health)
        paged_gather(pool.cache, pages, 4, torch.bfloat16, reads)

    both()
    torch.cuda.synchronize()
    with (
        record() as launches,
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile,
    ):
        both()
        torch.cuda.synchronize()
    seen = [event.key for event in profile.key_averages() for _ in range(event.count) if "kv_" in event.key]
    names = sorted(launch.name for launch in launches)
    assert sorted(seen) == names == [f"kv_gather_{fmt}", f"kv_write_{fmt}"]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("fmt", FORMATS)
def test_neither_waits_for_the_device(fmt):
    x = torch.ones(4, 2, 64, device="cuda", dtype=torch.bfloat16)
    pool = make_pool(fmt, "cuda", torch.bfloat16)
    pages = torch.zeros((1, 1), dtype=torch.int32, device="cuda")
    slots = torch.arange(4, device="cuda")
    with no_sync():
        paged_write(pool.cache, x, x, slots, pool.health)
        k, _ = paged_gather(pool.cache, pages, 4, torch.bfloat16, pool.health[:2])
    assert pool.health.tolist() == [4, 0 if fmt == "native" else 4, 0]
    assert torch.allclose(k, torch.ones_like(k), atol=0.03)
