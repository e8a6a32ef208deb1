"""Two runs of the same multiple-choice questions, compared in pairs: accuracy, flips, KL, and a test.

Accuracies of a few hundred questions have a standard error of points, and both runs share it, so their difference alone says little.
The questions are the same, hence all that counts is where the two answers differ: how many turned right, how many turned wrong, and
whether a fair coin would divide them so (McNemar's exact test, the two-sided binomial test on the discordant pairs). The paper compares the
two accuracies as if each run had questions of its own, which finds less; both tests are here. KL sees changes too small to turn an answer.

Leaves out: where scores come from (`integrations.choice`), corrections for many tests (`pool` makes one test of many tasks).
Source: McNemar, 1947; the paper, Section 7.2 (unpaired test). The conventions of `acc`, `acc_norm` and their standard error are
lm-eval's (Gao et al., 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from echoreduce.errors import ShapeError

#: Level of the test.
SIGNIFICANCE = 0.05


@dataclass(frozen=True)
class Comparison:
    """A variant against the exact run on one task.

    Attributes:
        examples: questions.
        accuracy, accuracy_norm: share of right answers by score, and by score per character of the choice (lm-eval's acc, acc_norm).
        exact, exact_norm: the same of the exact run.
        standard_error: of `accuracy`, sqrt(a (1 - a) / (n - 1)).
        gained, lost: answers that turned right, and wrong.
        changed: answers that are another choice, right or wrong.
        divergence: mean KL(exact || variant) of the softmax of the scores over a question's choices, nats.
        p_value: of the two-sided test, see `sign_test`.
    """

    examples: int
    accuracy: float
    accuracy_norm: float
    exact: float
    exact_norm: float
    standard_error: float
    gained: int
    lost: int
    changed: int
    divergence: float
    p_value: float

    @property
    def significant(self) -> bool:
        """Whether the two accuracies differ at the level `SIGNIFICANCE`."""
        return self.p_value < SIGNIFICANCE

    @property
    def unpaired_p_value(self) -> float:
        """Of the paper's test, see `unpaired_test`; of pooled tasks with the errors of one task, which are a little larger."""
        return unpaired_test(self.accuracy, self.exact, self.examples)


def compare(exact: Tensor, variant: Tensor, labels: Tensor, characters: Tensor) -> Comparison:
    """Compare two runs of one task.

    Args:
        exact, variant: log-likelihoods of the choices in nats, float64 [examples, choices]; -inf where a question has fewer choices.
        labels: right choice, int64 [examples].
        characters: length of each choice's text, [examples, choices], at least 1.
    Raises:
        ShapeError: shapes differ, or there are no examples.
    """
    if exact.shape != variant.shape or exact.shape != characters.shape or exact.shape[:1] != labels.shape or not len(labels):
        shapes = [tuple(t.shape) for t in (exact, variant, characters, labels)]
        raise ShapeError(f"scores, lengths and labels must belong to the same examples, at least one, got shapes {shapes}")
    answers, before = variant.argmax(1), exact.argmax(1)
    right, right_before = answers == labels, before == labels
    gained, lost = int((right & ~right_before).sum()), int((~right & right_before).sum())
    examples, correct = len(labels), int(right.sum())
    return Comparison(
        examples=examples,
        accuracy=correct / examples,
        accuracy_norm=_share((variant / characters).argmax(1) == labels),
        exact=_share(right_before),
        exact_norm=_share((exact / characters).argmax(1) == labels),
        standard_error=standard_error(correct, examples),
        gained=gained,
        lost=lost,
        changed=int((answers != before).sum()),
        divergence=divergence(exact, variant),
        p_value=sign_test(gained, lost),
    )


def pool(comparisons: Iterable[Comparison]) -> Comparison:
    """All tasks as one: sums of counts, means over examples, one test of all discordant pairs.

    Raises:
        ShapeError: there is no comparison.
    """
    tasks = list(comparisons)
    if not tasks:
        raise ShapeError("no task to pool")
    examples = sum(task.examples for task in tasks)
    gained, lost = sum(task.gained for task in tasks), sum(task.lost for task in tasks)

    def mean(name: str) -> float:
        return math.fsum(getattr(task, name) * task.examples for task in tasks) / examples

    return Comparison(
        examples=examples,
        accuracy=mean("accuracy"),
        accuracy_norm=mean("accuracy_norm"),
        exact=mean("exact"),
        exact_norm=mean("exact_norm"),
        standard_error=math.sqrt(math.fsum((task.standard_error * task.examples) ** 2 for task in tasks)) / examples,
        gained=gained,
        lost=lost,
        changed=sum(task.changed for task in tasks),
        divergence=mean("divergence"),
        p_value=sign_test(gained, lost),
    )


def _share(right: Tensor) -> float:
    return int(right.sum()) / len(right)


def standard_error(correct: int, examples: int) -> float:
    """Of a share of right answers: sqrt(a (1 - a) / (n - 1)); 0 for one example."""
    share = correct / examples
    return math.sqrt(share * (1 - share) / (examples - 1)) if examples > 1 else 0.0


def divergence(exact: Tensor, variant: Tensor) -> float:
    """Mean KL(exact || variant) in nats of the softmax over each question's choices.

    Args:
        exact, variant: [examples, choices]; -inf where a question has fewer choices.
    """
    p, q = exact.double().log_softmax(1), variant.double().log_softmax(1)
    return torch.where(exact == -math.inf, 0.0, p.exp() * (p - q)).sum(1).mean().item()


def sign_test(gained: int, lost: int) -> float:
    """Two-sided exact p-value of `gained` and `lost` discordant pairs under a fair coin (McNemar's exact test); 1 if there are none.

    p = min(1, 2 sum_{i <= min(gained, lost)} C(n, i) / 2^n), n = gained + lost. Error: relative 1e-9 up to n = 100,000.
    """
    total, fewer = gained + lost, min(gained, lost)
    logs = (math.lgamma(total + 1) - math.lgamma(i + 1) - math.lgamma(total - i + 1) - (total - 1) * math.log(2) for i in range(fewer + 1))
    return min(1.0, math.fsum(map(math.exp, logs)))


def unpaired_test(accuracy: float, exact: float, examples: int) -> float:
    """Two-sided p-value of two accuracies with the binomial standard error of each, as if they were of different questions.

    p = erfc(|z| / sqrt(2)), z = (accuracy - exact) / sqrt(s**2 + s_exact**2), s**2 = a (1 - a) / (n - 1); 1 if the accuracies are equal,
    0 if they differ without any error.

    Args:
        accuracy, exact: shares of right answers, 0 to 1.
        examples: questions of each run, n.
    Source: the paper, Section 7.2.
    """
    if accuracy == exact:
        return 1.0
    error = math.hypot(*(standard_error(round(share * examples), examples) for share in (accuracy, exact)))
    return math.erfc(abs(accuracy - exact) / error / math.sqrt(2)) if error > 0 else 0.0
