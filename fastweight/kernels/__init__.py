"""Triton kernels of the memory, split by algebraic class and imported only when called.

`dispatch` is the one door: it says whether a call is supported and runs it. Importing this package needs no Triton.
"""

import contextlib
from collections.abc import Iterator

_rebuild = False


@contextlib.contextmanager
def rebuilt_states() -> Iterator[None]:
    """Calls made inside keep no chunk states for their backward pass, which makes them again from the residuals.

    That saves K V / 64 elements per token and value head (more than half of what a call keeps) and costs one more read
    of keys and residuals. For rules with the regression objective and a scalar gain; others raise ValueError inside.
    """
    global _rebuild
    before, _rebuild = _rebuild, True
    try:
        yield
    finally:
        _rebuild = before


def states_are_rebuilt() -> bool:
    return _rebuild
