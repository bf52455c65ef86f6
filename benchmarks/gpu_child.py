"""A process that runs one case of the GPU benchmark, and for a library that tunes itself, another that tunes before it.

On a machine with a second GPU the second process compiles and tunes there, at the shapes that will be timed, and leaves
what it found in the caches that both share; then the first loads it and is timed on the same GPU as everybody else.

Trap: a library's choice among its configurations is made while others use the same GPU, as far as there are others.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch

from benchmarks.gpu_cases import CASES
from benchmarks.gpu_worker import DECODE

WORKER = (sys.executable, "-m", "benchmarks.gpu_worker")
CACHES = ("TRITON_CACHE_DIR", "TILELANG_CACHE_DIR")


def second_device() -> str | None:
    """The second GPU that this process may use, as CUDA_VISIBLE_DEVICES names it."""
    if torch.cuda.device_count() < 2:
        return None
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[1]


class Child:
    """A worker and what it says; `cache` is the folder of all compiled code."""

    def __init__(self, label: str, numbers: list[int], cache: str) -> None:
        self.label, self.numbers = label, numbers
        self.warm, self.said = False, queue.Queue[dict[str, Any]]()
        self.quiet = label != DECODE and CASES[label].quiet
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the child)
        folders = {name: os.path.join(cache, name.lower()) for name in CACHES}
        for folder in folders.values():
            os.makedirs(folder, exist_ok=True)
        environment = os.environ | folders
        words, elsewhere = [label, *map(str, numbers)], second_device()
        self.tuner: subprocess.Popen[Any] | None = None
        if elsewhere is not None and label != DECODE and CASES[label].tunes:
            self.tuner = subprocess.Popen(
                [*WORKER, "tune", *words], stdout=subprocess.DEVNULL, stderr=self.log,
                env=environment | {"CUDA_VISIBLE_DEVICES": elsewhere},
            )  # fmt: skip
            words.insert(0, "later")
        self.process = subprocess.Popen(
            [*WORKER, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, bufsize=1,
            env=environment,
        )  # fmt: skip
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("@"):
                self.said.put(json.loads(line[1:]))
        self.said.put({"kind": "end"})

    @property
    def tuned(self) -> bool:
        """Whether nothing is tuned for it any more; when that has just ended, the child goes on."""
        if self.tuner is not None:
            if self.tuner.poll() is None:
                return False
            self.tuner = None
            self.go()
        return True

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def hold(self, stopped: bool) -> None:
        if self.alive:
            self.process.send_signal(signal.SIGSTOP if stopped else signal.SIGCONT)

    def go(self) -> None:
        if self.process.stdin is not None and self.alive:
            with contextlib.suppress(BrokenPipeError):  # it ended just now: `until` will say so
                self.process.stdin.write("go\n")
                self.process.stdin.flush()

    def close(self) -> None:
        if self.log.closed:
            return
        if self.tuner is not None:
            self.tuner.kill()
            self.tuner.wait()
        self.process.kill()
        self.process.wait()
        self.listener.join()
        for pipe in (self.process.stdin, self.process.stdout, self.log):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def until(self, kind: str, report: Any, end: float, kill: bool = True) -> dict[str, Any] | None:
        """What it says of that kind; everything else on the way goes into the report.

        Too late, it is killed, or without `kill` the answer is None.
        """
        while True:
            try:
                said = self.said.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                if not kill:
                    return None
                self.process.kill()
                self.process.wait()
                return {"failed": "out of time"}
            if said["kind"] == "end":
                self.said.put(said)  # whoever asks again hears it again
                self.log.seek(0)
                return {"failed": self.log.read().strip()[-300:] or "the process ended"}
            report.take(said)
            self.warm |= said["kind"] == "warm"
            self.quiet &= said["kind"] != "first"
            if said["kind"] == kind:
                return said

    def warmed(self, report: Any, end: float, kill: bool) -> dict[str, Any] | None:
        """`until` it is warm, which it may have said before."""
        return {"kind": "warm"} if self.warm else self.until("warm", report, end, kill)

    def drain(self, report: Any) -> bool:
        """Whether it is warm by now."""
        self.warmed(report, time.monotonic() + 0.05, kill=False)
        return self.warm

    def still_quiet(self, report: Any) -> bool:
        """Whether it has not used the device so far."""
        if self.quiet:
            self.drain(report)
        return self.quiet
