"""Statistics of an evaluation: how sure an accuracy is, and how honest stated confidences are.

Test: pytest tests/test_statistics.py
"""

import math

Z_95 = 1.959964  # the normal distribution holds 95 % within this many standard deviations


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """The 95 % interval (low, high) of the share correct / total, by Wilson's score.

    It stays honest for few questions and for shares near 0 and 1. ValueError for what is no share.
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
