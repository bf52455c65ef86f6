"""One GPU against several, without any: where idle time of a profile goes, how runs are compared and reported."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gaps, lm_two
from benchmarks.gaps import Span

MS = 1_000_000


def test_idle_time_is_found_and_given_to_the_phase_of_the_host() -> None:
    device = [
        Span("gemm", 0, 4 * MS), Span("gemm", 3 * MS, 5 * MS),  # overlap counts once
        Span("ncclDevKernel", 4 * MS, 7 * MS),  # 2 ms of it alone
        Span("gemm", 10 * MS, 12 * MS), Span("Memcpy HtoD", 13 * MS, 14 * MS),
    ]  # fmt: skip
    host = [
        Span("step: get_batch_samples", 6 * MS, 9 * MS), Span("cudaStreamSynchronize", 6 * MS, 9 * MS),
        Span("step: training_step", 11 * MS, 20 * MS), Span("aten::mm", 12 * MS, 13 * MS),
    ]  # fmt: skip
    lines = gaps.report(device, host, steps=2)
    assert lines[0] == "a step: 7.00 ms = computing 4.00 + exchange alone 1.00 + idle 2.00; 2 launches"
    assert [" ".join(line.split()) for line in lines[1:3]] == [
        "idle 1.500 ms a step in get_batch_samples",
        "idle 0.500 ms a step in training_step",
    ]
    assert "3.000 ms at     7.00 in get_batch_samples: cudaStreamSynchronize 2.000 ms" in lines[3]
    assert lines[4].endswith("in training_step: no call that waits")
    assert gaps.report([], host, 1) == ["no events of a device"]


def test_ranges_that_the_host_named_are_not_work_of_the_device() -> None:
    def event(name: str, start: int, on_host: bool) -> Any:
        kind = "DeviceType.CPU" if on_host else "DeviceType.CUDA"
        values = {"name": name, "start_ns": start, "duration_ns": 5, "device_type": kind}
        return SimpleNamespace(**{key: (lambda value=value: value) for key, value in values.items()})

    events = [event("step: log", 0, True), event("step: log", 1, False), event("gemm", 2, False)]
    device, host = gaps.split(events)
    assert device == [Span("gemm", 2, 7)]
    assert host == [Span("step: log", 0, 5)]


def test_methods_become_phases_of_a_real_profile() -> None:
    class Trainer:
        def log(self, value: int) -> int:
            return value + 1

    trainer = Trainer()
    gaps.marked(trainer, ["log"])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert trainer.log(2) == 3
    events: Any = profile.profiler
    assert "step: log" in {span.name for span in gaps.split(events.kineto_results.events())[1]}


def test_results_are_compared_with_the_first_run(tmp_path: Path) -> None:
    def leave(name: str, factor: float, steps: int = lm_two.STEPS) -> None:
        (tmp_path / name).mkdir()
        lines = [
            {"step": step, "loss": factor * (11 - step / 10), "tokens_per_second": 100 * step, "peak_memory_gib": 2.0}
            for step in range(lm_two.EVERY, steps + 3, lm_two.EVERY)
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
        (tmp_path / f"{name}.log").write_text("said")

    leave("one", 1.0)
    leave("ddp", 1.001)
    leave("fsdp2", 1.1)
    leave("short", 1.0, steps=lm_two.STEPS - lm_two.EVERY)
    (tmp_path / "ddp.gaps").write_text("a step\n")
    runs = [lm_two.result(name, 2, tmp_path, [0, 1]) for name in ("one", "ddp", "fsdp2", "short")]
    lines = lm_two.compared(runs)
    assert lines[1] == "ddp: a step"
    assert "1,000 tokens/s  x 1.000" in lines[2]
    assert lines[2].endswith("differ by 1.0e-03 (agree)")
    assert lines[3].endswith("(DIFFER)")
    assert "failed: exit codes [0, 1]: said" in lines[4]
    lm_two.draw(runs, tmp_path / "two.png")
    assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--runs", "one,ddb"], "--runs: got one,ddb, expected different ones of one, ddp, fsdp2"),
        (["--runs", "one,one"], "--runs: got one,one"),
        (["--runs", "one,ddp", "--gaps", "fsdp2"], r"--gaps: got fsdp2, expected some of --runs one,ddp"),
    ],
)
def test_runs_that_are_none_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lm_two.main(words)
    assert re.search(message, capsys.readouterr().err)


def test_a_rank_that_fails_ends_its_run_and_a_limit_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess
    import sys

    def process(code: str) -> Any:
        return subprocess.Popen([sys.executable, "-c", code])

    running = {
        "bad": [process("raise SystemExit(3)"), process("import time; time.sleep(60)")],
        "slow": [process("import time; time.sleep(60)")],
    }
    (tmp_path / "slow.ready").touch()
    (tmp_path / "notes").write_text("a note\n")
    lm_two.watched(running, tmp_path, limit=2)
    assert [[p.wait(5) for p in processes] for processes in running.values()] == [[3, -9], [-9]]
    assert (tmp_path / "bad.done").exists()
    assert (tmp_path / "begin").exists()
    assert "a note\n2 s are over: slow is ended" in capsys.readouterr().out
