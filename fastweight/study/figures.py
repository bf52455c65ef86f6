"""Values over seeds as text: mean with spread (n - 1), and mean difference with its standard error."""

import math
from collections.abc import Sequence
from statistics import mean, stdev


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and standard deviation; the mean alone for one value, a dash without any."""
    if not values:
        return "-"
    told = f"{mean(values):,.{digits}f}"
    return told if len(values) < 2 else f"{told} ± {stdev(values):,.{digits}f}"


def difference(values: Sequence[float], digits: int) -> str:
    """Mean difference and its standard error; a dash without any."""
    if not values:
        return "-"
    told = f"{mean(values):+.{digits}f}"
    return told if len(values) < 2 else f"{told} ± {stdev(values) / math.sqrt(len(values)):.{digits}f}"
