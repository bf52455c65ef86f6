"""Workers that do not outlive the process that started them, however it ends, and how many there is room for."""

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def num_cores() -> int:
    """Cores that this process may use; all of them where the system cannot tell (macOS, Windows)."""
    mine = getattr(os, "sched_getaffinity", None)
    return len(mine(0)) if mine is not None else os.cpu_count() or 1


def end_with_parent() -> None:
    """In a worker: watch the parent from now on, and end at once when it is gone, even when it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
