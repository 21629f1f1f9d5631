"""Log-probabilities and divergences against float64 references."""

from __future__ import annotations

import math

import torch

from kvbench.runners.text.logits import ROWS, compare, logprobs


def logits(rows, vocab=500, scale=4.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * scale


def test_logprobs_equal_a_float64_log_softmax_over_slice_borders():
    x = logits(ROWS["cpu"] * 2 + 3) + 300.0
    targets = torch.arange(len(x))
    exact = x.double().log_softmax(-1)[targets, targets]
    assert (logprobs(x, targets) - exact).abs().max() < 1e-6
    assert logprobs(x, targets).dtype == torch.float64


def test_uniform_logits_give_minus_log_vocab():
    got = logprobs(torch.zeros(2, 1000), torch.tensor([0, 999]))
    assert torch.allclose(got, torch.full((2,), -math.log(1000.0), dtype=torch.float64), atol=1e-12)


def test_divergence_of_equal_logits_is_exactly_zero():
    x = logits(40)
    found = compare(x, x.clone(), torch.zeros(40, dtype=torch.long))
    assert found.kld.abs().max() == 0.0
    assert found.delta_p.abs().max() == 0.0
    assert bool(found.top1_equal.all())


def test_divergence_equals_the_definition_in_float64():
    native = logits(70)
    candidate = native + 1e-3 * logits(70, scale=1.0).flip(1)
    targets = torch.randint(0, 500, (70,), generator=torch.Generator().manual_seed(0))
    found = compare(native, candidate, targets)
    p, q = native.double().log_softmax(-1), candidate.double().log_softmax(-1)
    assert (found.kld - (p.exp() * (p - q)).sum(-1)).abs().max() < 1e-10
    true = torch.arange(70), targets
    assert (found.delta_p - (q.exp() - p.exp())[true]).abs().max() < 1e-7
    assert torch.equal(found.native, logprobs(native, targets))
    assert torch.equal(found.candidate, logprobs(candidate, targets))


def test_a_shift_of_all_logits_changes_nothing():
    native = logits(8)
    found = compare(native, native + 5.0, torch.zeros(8, dtype=torch.long))
    assert found.kld.abs().max() < 1e-11
    assert bool(found.top1_equal.all())


def test_divergence_of_far_distributions_is_finite_and_right():
    native, candidate = logits(6), logits(6).flip(1) * 30
    found = compare(native, candidate, torch.zeros(6, dtype=torch.long))
    p, q = native.double().log_softmax(-1), candidate.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).sum(-1)
    assert exact.min() > 100
    assert ((found.kld - exact) / exact).abs().max() < 1e-6


def test_top1_counts_another_argmax_and_a_nan_stays_a_nan():
    native, candidate = torch.zeros(2, 5), torch.zeros(2, 5)
    native[:, 1], candidate[0, 1], candidate[1, 2] = 3.0, 3.0, 3.0
    assert compare(native, candidate, torch.tensor([1, 1])).top1_equal.tolist() == [True, False]
    candidate[0, 0] = float("nan")
    found = compare(native, candidate, torch.tensor([1, 1]))
    assert found.kld.isnan().tolist() == [True, False]
    assert found.candidate.isnan().tolist() == [True, False]
