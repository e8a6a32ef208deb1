"""The paired test is scipy's, flips and KL are what they say, and a difference is called significant when it should be."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import binomtest, ttest_ind_from_stats

from echoreduce.errors import ShapeError
from echoreduce.measure.paired import compare, divergence, pool, sign_test, standard_error, unpaired_test


@pytest.mark.parametrize("total", [1, 2, 5, 6, 17, 100, 2001, 40000])
def test_the_sign_test_is_the_two_sided_binomial_test(total: int) -> None:
    for gained in {0, 1, total // 3, total // 2, total // 2 + total // 50, (total + 1) // 2, total}:
        expected = binomtest(gained, total, 0.5).pvalue
        assert sign_test(gained, total - gained) == pytest.approx(expected, rel=1e-9, abs=1e-300)
        assert sign_test(gained, total - gained) == sign_test(total - gained, gained)


def test_the_level_is_passed_where_it_should_be() -> None:
    assert sign_test(0, 0) == 1.0
    assert sign_test(0, 5) == 0.0625
    assert sign_test(0, 6) == 0.03125


def scores(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_flips_are_counted_in_both_directions() -> None:
    exact = scores([-1, -2, -3], [-2, -1, -3], [-3, -2, -1], [-1, -2, -math.inf])
    variant = scores([-2, -1, -3], [-1, -2, -3], [-3, -1, -2], [-1, -2, -math.inf])  # right to wrong, wrong to right, wrong to wrong, same
    found = compare(exact, variant, torch.tensor([0, 0, 0, 0]), torch.ones(4, 3))
    assert (found.gained, found.lost, found.changed) == (1, 1, 3)
    assert (found.exact, found.accuracy, found.examples) == (0.5, 0.5, 4)
    assert found.p_value == 1.0
    assert not found.significant


def test_the_norm_divides_by_characters() -> None:
    exact = scores([-2, -3])
    found = compare(exact, exact, torch.tensor([1]), torch.tensor([[2, 6]]))
    assert (found.accuracy, found.accuracy_norm) == (0, 1)


def test_divergence_is_kl_of_the_choices_that_there_are() -> None:
    exact, variant = scores([0.0, 0.0, -math.inf], [-5, -6, -7]), scores([math.log(1), math.log(3), -math.inf], [-5, -6, -7])
    assert divergence(exact, variant) == pytest.approx((0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)) / 2)
    assert divergence(exact, exact) == 0
    assert divergence(exact, exact + 7) == pytest.approx(0, abs=1e-15)  # the softmax does not see a constant


def test_the_standard_error_is_that_of_a_mean() -> None:
    values = torch.tensor([1.0] * 30 + [0.0] * 12, dtype=torch.float64)
    assert standard_error(30, 42) == pytest.approx((values.std() / math.sqrt(42)).item())


def test_pooled_tasks_are_one_large_task() -> None:
    torch.manual_seed(0)
    exact = torch.randn(900, 3, dtype=torch.float64)
    variant, labels = exact + 0.3 * torch.randn(900, 3), torch.randint(0, 3, (900,))
    whole = compare(exact, variant, labels, torch.ones(900, 3))
    parts = [compare(exact[a:b], variant[a:b], labels[a:b], torch.ones(b - a, 3)) for a, b in ((0, 100), (100, 250), (250, 900))]
    pooled = pool(parts)
    for name in ("examples", "gained", "lost", "changed", "p_value"):
        assert getattr(pooled, name) == getattr(whole, name)
    for name in ("accuracy", "accuracy_norm", "exact", "exact_norm", "divergence"):
        assert getattr(pooled, name) == pytest.approx(getattr(whole, name))
    assert pooled.standard_error == pytest.approx(whole.standard_error, rel=0.02)
    with pytest.raises(ShapeError, match="no task"):
        pool([])


def test_a_variant_that_only_loses_is_significant() -> None:
    exact = scores(*[[-1, -2]] * 50)
    variant = torch.where(torch.arange(50)[:, None] < 6, exact.flip(1), exact)
    found = compare(exact, variant, torch.zeros(50, dtype=torch.int64), torch.ones(50, 2))
    assert (found.lost, found.gained) == (6, 0)
    assert found.significant


@pytest.mark.parametrize("correct", [1, 400, 4990, 5000, 5100, 9999])
def test_the_unpaired_test_is_that_of_two_means(correct: int) -> None:
    """Welch's test of the answers as zeros and ones, whose t is normal at this number of examples."""
    examples, before = 10000, 5000
    moments = [value for right in (correct, before) for value in (right / examples, standard_error(right, examples) * 100, examples)]
    expected = ttest_ind_from_stats(*moments, equal_var=False).pvalue
    assert unpaired_test(correct / examples, before / examples, examples) == pytest.approx(expected, rel=2e-3, abs=1e-100)


def test_the_unpaired_test_without_errors() -> None:
    assert unpaired_test(0.0, 0.0, 10) == 1.0
    assert unpaired_test(1.0, 0.0, 10) == 0.0


def test_the_paired_test_finds_what_the_unpaired_one_does_not() -> None:
    exact = scores(*[[-1, -2]] * 1000)
    variant = torch.where(torch.arange(1000)[:, None] < 12, exact.flip(1), exact)
    found = compare(exact, variant, torch.arange(1000) % 2, torch.ones(1000, 2))
    assert found.unpaired_p_value == 1.0 == found.p_value
    found = compare(exact, variant, torch.arange(1000) // 500, torch.ones(1000, 2))
    assert found.significant
    assert found.unpaired_p_value > 0.5


def test_shapes_must_belong_together() -> None:
    with pytest.raises(ShapeError, match="same examples"):
        compare(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3), torch.ones(2, 3))
    with pytest.raises(ShapeError, match="at least one"):
        compare(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0), torch.ones(0, 3))
