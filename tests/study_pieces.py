"""Work for the processes of a study's test, in a module that is quickly imported."""

import os


def work(number: int) -> tuple[bool, str]:
    """Piece 1 fails, piece 2 takes its process with it."""
    if number == 2:
        os._exit(7)
    return number != 1, f"{number} by {os.getpid()} on {os.environ['CUDA_VISIBLE_DEVICES']}"
