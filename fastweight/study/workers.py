"""Pieces of work into results, by processes side by side that are spread over the GPUs.

A process keeps its imports, compiled kernels and GPU from one piece to the next. After a piece that failed it is
replaced, and so is one that died: an error of a GPU stays with the process that met it, and every later piece would
meet it again. Traps: workers are told their GPU by CUDA_VISIBLE_DEVICES before they first use one, so modules must
not touch CUDA when they are imported; what is sent must pickle.
"""

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from fastweight.processes import end_with_parent

NO_GPU = ""  # instead of a GPU's name: work on the CPU where there are GPUs
Piece = tuple[Any, ...]
Work = Callable[..., tuple[bool, str]]  # from the parts of a piece to whether it went well, and a sentence


class _Worker(NamedTuple):
    """A process, its end of the pipe, the GPU it was told, and what it works on."""

    process: Any
    pipe: Connection
    gpu: str | None
    piece: Piece


def visible_gpus() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process may use; nothing is started on them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return [str(i) for i in range(count)] if named is None else named.split(",")[:count]


def run_pieces(
    pieces: Sequence[Piece],
    work: Work,
    workers: int,
    end: float | None = None,
    gpus: Sequence[str] = (),
    kind: Callable[[Piece], Any] = lambda piece: None,
) -> Iterator[tuple[Piece, str]]:
    """Work on pieces, `workers` at a time; yields each with the sentence it ended with, in the order of their ends.

    Args:
        work: a function of a module, called with the parts of a piece.
        end: on the clock of time.monotonic; pieces that are not done by then are given up and not yielded.
        gpus: names for CUDA_VISIBLE_DEVICES; workers take turns. Without any, workers see what this process sees.
        kind: what a process has compiled for: it takes the next piece of the kind of its last one, if there is any.
    """
    waiting, busy = deque(pieces), dict[Connection, _Worker]()
    places = deque([gpus[i % len(gpus)] if gpus else None for i in range(workers)])
    try:
        while (waiting or busy) and (end is None or time.monotonic() < end):
            while waiting and len(busy) < workers:
                worker = _hired(work, places.popleft(), waiting.popleft())
                busy[worker.pipe] = worker
            ready = wait(list(busy), None if end is None else max(end - time.monotonic(), 0))
            if not ready:
                return
            for pipe in ready:
                worker = busy.pop(pipe)  # type: ignore[arg-type]
                well, told = _answer(worker)
                if well and waiting:
                    busy[worker.pipe] = _given(worker, _next(waiting, kind, kind(worker.piece)))
                else:
                    worker.pipe.close()  # which ends the process
                    places.append(worker.gpu)
                yield worker.piece, told
    finally:
        for worker in busy.values():
            worker.process.terminate()


def _next(waiting: deque[Piece], kind: Callable[[Piece], Any], wanted: Any) -> Piece:
    """Takes the first piece of the wanted kind, or else the first."""
    piece = next((piece for piece in waiting if kind(piece) == wanted), waiting[0])
    waiting.remove(piece)
    return piece


def _hired(work: Work, gpu: str | None, piece: Piece) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work, gpu))
    process.start()
    theirs.close()
    return _given(_Worker(process, ours, gpu, piece), piece)


def _given(worker: _Worker, piece: Piece) -> _Worker:
    with suppress(BrokenPipeError):  # it died meanwhile, which its end of the pipe tells next
        worker.pipe.send(piece)
    return worker._replace(piece=piece)


def _answer(worker: _Worker) -> tuple[bool, str]:
    try:
        return worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        return False, f"failed: its process ended with code {worker.process.exitcode}"


def _serve(pipe: Connection, work: Work, gpu: str | None) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends us
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    while True:
        try:
            piece = pipe.recv()
        except EOFError:
            return
        pipe.send(work(*piece))
