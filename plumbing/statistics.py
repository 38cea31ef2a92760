"""Statistics of evaluations: how sure an accuracy is, or a difference of two; calibration.

With k attempts at each question avg@k is the mean over all attempts, and pass@k the share of the
questions that at least one attempt answers. The intervals of both are over questions: attempts at
one question depend on each other, so that k of them tell less than k questions.

Test: pytest tests/test_statistics.py
"""

import math

Z_95 = 1.959964  # the normal distribution holds 95 % within this many standard deviations


def wilson_interval(correct: float, total: float) -> tuple[float, float]:
    """The 95 % interval (low, high) of the share correct / total, by Wilson's score.

    It stays honest for few questions and for shares near 0 and 1. Counts need not be whole.
    ValueError for what is no share.
    """
    if not 0 <= correct <= total:
        raise ValueError(f"{correct} of {total} is no share")
    if total == 0:
        return 0.0, 1.0
    share = correct / total
    shrink = 1 + Z_95**2 / total
    centre = (share + Z_95**2 / (2 * total)) / shrink
    variance = share * (1 - share) / total + Z_95**2 / (4 * total**2)
    half = Z_95 / shrink * math.sqrt(variance)
    # Rounding must not push the interval past the share itself.
    low = min(share, max(0.0, centre - half))
    high = max(share, min(1.0, centre + half))
    return low, high


def average_interval(right: list[int], attempts: int) -> tuple[float, float]:
    """The 95 % interval of avg@k. right: how many of a question's k attempts are, by question.

    attempts: k. It is Wilson's interval of as many independent attempts as would make the mean vary
    as the questions' shares do: one a question if its attempts always agree, all k of them if they
    agree no more than those at different questions. If nothing or everything is right, the shares
    tell nothing about that, and one a question is taken. At k = 1 it is `wilson_interval`.
    """
    questions = len(right)
    share = sum(right) / (questions * attempts)
    independent = share * (1 - share)  # the variance of one attempt
    variance = sum((count / attempts - share) ** 2 for count in right) / questions
    if independent == 0:
        worth = 1.0
    elif variance * attempts <= independent:
        worth = attempts
    else:
        worth = independent / variance
    total = questions * worth
    return wilson_interval(share * total, total)


def sign_test(gained: int, lost: int) -> float:
    """The two-sided p-value of McNemar's exact test, for two models on the same questions.

    gained: questions that only the second model has right; lost: those that only the first has
    right. If the models were equally good, a question that only one has right would be either's
    with probability 1/2. p is then the probability of a split at least as uneven; an even split has
    p = 1. ValueError for a negative count.
    """
    if min(gained, lost) < 0:
        raise ValueError(f"{gained} gained and {lost} lost are no counts")
    changed = gained + lost
    as_uneven = sum(math.comb(changed, rarer) for rarer in range(min(gained, lost) + 1))
    return min(1.0, 2 * as_uneven / 2**changed)


def pass_at(right: list[int], attempts: int, draws: int) -> float:
    """pass@draws: how probably one of `draws` attempts is right, drawn from the k that were made.

    The unbiased estimate of Chen et al. 2021 (arXiv 2107.03374), a mean over questions. right and
    attempts: as in `average_interval`. draws: from 1, where it is avg@k, to k.
    """
    all_wrong = [math.comb(attempts - count, draws) for count in right]
    return 1 - sum(all_wrong) / (len(right) * math.comb(attempts, draws))


def calibration_error(confidences: list[float], correct: list[bool], bin_size: int = 100) -> float:
    """The RMS calibration error, Humanity's Last Exam's measure.

    Answers are sorted by confidence and cut into bins of `bin_size`; the last bin takes what is
    left over. The error is sqrt(mean over answers of (mean confidence - accuracy of its bin)²).
    HLE's published script leaves the last bin out of the sum; this one counts it.

    confidences: in [0, 1], at least one, as many as `correct`. ValueError otherwise.
    """
    if len(confidences) != len(correct):
        raise ValueError("calibration needs as many confidences as answers")
    if not confidences:
        raise ValueError("calibration needs at least one answer")
    if not all(0 <= confidence <= 1 for confidence in confidences):
        raise ValueError("calibration needs confidences in [0, 1]")
    # The key leaves `correct` out, so that equal confidences are not sorted by what came out.
    order = sorted(range(len(confidences)), key=lambda index: confidences[index])
    number_of_bins = max(1, len(order) // bin_size)
    squares = 0.0
    for number in range(number_of_bins):
        start = number * bin_size
        end = start + bin_size
        if number == number_of_bins - 1:
            end = len(order)
        gap = sum(confidences[index] - float(correct[index]) for index in order[start:end])
        squares += gap**2 / (end - start)
    return math.sqrt(squares / len(order))
