"""Checks that the tests of several matrix products share."""

import torch

from kvbench_kernels.support import Accepted, Rejected


def made(*shape, scale=1.0, dtype=torch.bfloat16):
    """Random values on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_near(out, exact, share=1e-4):
    """Every element within one rounding to out's dtype and `share` of the exact values' root mean square."""
    allowed = exact.abs() * torch.finfo(out.dtype).eps + share * exact.pow(2).mean().sqrt()
    wrong = ~((out.to(exact.dtype) - exact).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} wrong, first {wrong.nonzero()[0].tolist()}"


def assert_same_in_a_graph(product, x, links, replays):
    """product(x). A chain of products in a replayed graph must give the bits of a chain that waits after each.

    Every product reads what the one before wrote, which an early start must not overtake.
    """
    first = product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for _ in range(links):
            y = product(y)
    expected = x
    for _ in range(links):
        expected = product(expected)
        torch.cuda.synchronize()
    for _ in range(replays):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(first, product(x))
    return first


def assert_supports(supports, accepted, rejected):
    """The answer to each (rows, N, K, dtype), and the reason of each rejection."""
    for arguments in accepted:
        assert supports(*arguments) == Accepted(), arguments
    for arguments, reason in rejected.items():
        answer = supports(*arguments)
        assert isinstance(answer, Rejected), arguments
        assert answer.reason == reason, arguments
