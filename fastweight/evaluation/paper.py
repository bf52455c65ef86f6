"""What the paper reports (arXiv 2608.27763 and its preprint of May), as data, to stand beside what is measured here.

Names are those of our recipes. Figures are percent, or perplexities. Trap: the paper's addition figures are of one
seed at 124M parameters on (it seems) 100 problems a width; batch and model width for that task are not given.
"""

from typing import NamedTuple


class Addition(NamedTuple):
    """validation, mean over 33 to 48 digits, exact match at 33 and at 48 digits, in percent; None: not given."""

    validation: float | None
    longer: float
    d33: float | None
    d48: float | None


ADDITION = {
    "transformer": Addition(100, 65.8, 97, 49),
    "retnet": Addition(99.7, 82.9, 99, 63),
    "mamba2": Addition(100, 75.2, 100, 51),
    "falcon-1.3": Addition(None, 68.8, None, None),
    "falcon-1a.1": Addition(100, 80.6, 100, 59),
    "falcon-1a.2": Addition(100, 85.2, 100, 63),
    "falcon-1a.3": Addition(99.8, 85.9, 100, 69),
    "falcon-3a.3": Addition(99.9, 87.2, 100, 69),
}

# WikiText, LAMBADA, FineWeb-Edu; None: not given.
PERPLEXITY: dict[str, tuple[float, float | None, float]] = {
    "transformer": (33.25, 47.43, 17.38),
    "retnet": (36.86, 65.16, 18.79),
    "mamba2": (34.53, 48.74, 17.70),
    "deltanet": (34.19, 52.84, 17.84),
    "gated-deltanet": (30.99, 46.70, 17.32),
    "falcon-1.3": (33.00, None, 17.10),
    "falcon-1a.1": (34.41, 47.93, 17.70),
    "falcon-1a.2": (34.20, 51.01, 17.70),
    "falcon-1a.3": (34.02, 49.84, 17.40),
    "falcon-3a.3": (34.08, 53.38, 17.59),
}

# Average of eight tasks.
ZERO_SHOT = {
    "transformer": 48.16,
    "retnet": 48.05,
    "mamba2": 48.80,
    "deltanet": 48.88,
    "gated-deltanet": 48.78,
    "falcon-1a.1": 48.86,
    "falcon-1a.2": 49.30,
    "falcon-1a.3": 48.95,
    "falcon-3a.3": 49.00,
}
