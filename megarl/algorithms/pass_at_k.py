"""Accuracy over several samples of a problem, pass@k, and their confidence intervals.

Plain numbers, no tensors.
"""

import math
from collections.abc import Sequence
from statistics import fmean, variance

Z_95 = 1.959963984540054  # 97.5% quantile of the normal distribution


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Returns the probability that `k` samples, drawn without replacement, include a correct one.

    1 - C(n-c, k) / C(n, k) is unbiased for the probability that k new samples contain a correct one
    (Chen et al., arXiv 2107.03374, equation 1). Raises ValueError unless k is at most the number of
    samples.
    """
    if not 0 < k <= samples:
        raise ValueError(
            f"pass@{k} needs at least {k} samples of a problem, not {samples}; draw more"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def ks_of(samples: int) -> list[int]:
    """Returns the k to report besides 1: the powers of two below `samples`, and `samples`."""
    powers = [2**power for power in range(1, (samples - 1).bit_length())]
    return powers + [samples] * (samples > 1)


def mean_interval(scores: Sequence[float], samples: int | None) -> tuple[float, float]:
    """Returns the 95% confidence interval of the mean score over problems like these.

    `scores` has each problem's score over `samples` samples. The interval is Wilson's, with the
    effective number of independent samples (Franco et al., "Comparative Study of Confidence
    Intervals for Proportions in Complex Sample Surveys", J. Surv. Stat. Methodol. 7, 2019). That
    number ranges from the number of problems, if all samples of a problem agree, to `samples` times
    as many, if problems do not differ. Unlike the normal interval (arXiv 2411.00640), which is
    returned if `samples` is None, Wilson's stays within 0..1 and has a width even if every score is
    0 or 1.
    """
    n = len(scores)
    mean = fmean(scores)
    spread = variance(scores) if n > 1 else 0.0
    if samples is None:
        half = Z_95 * math.sqrt(spread / n)
        return mean - half, mean + half
    of_one = mean * (1 - mean)  # variance of a single independent sample
    size = n
    if of_one:
        size = min(max(n * of_one / spread, n), n * samples) if spread else n * samples
    added = Z_95**2 / size
    centre = (mean + added / 2) / (1 + added)
    half = Z_95 / (1 + added) * math.sqrt(of_one / size + added / (4 * size))
    # rounding must not leave the bounds
    return max(0.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))
