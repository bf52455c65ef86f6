"""One GPU against several through `fastweight train lm`: the same losses with DDP and FSDP2, and tokens/s.

    python -m benchmarks.lm_two --gpus 2            prints a table, writes results/lm/two.json and .png
    python -m benchmarks.lm_two --runs one,ddp --gaps ddp      where the device stands still

Runs of one recipe on the same random tokens, the same global batch, bf16 autocast: one process, several with DDP,
with FSDP2. Losses are compared at every line of metrics.jsonl with bfloat16's rounding as the measure; the rate is the
median of the second half of the lines.

Traps: random tokens are learned by their frequencies alone, so losses fall little; that they agree says that gradients
and steps do. All start at once, to import and compile at the same time, and take turns from step WAIT on, so that one
of them at a time uses the devices for what is timed. Every process notes when it passes which phase; the notes are
printed as they come. At --limit whatever still runs is ended, and what has finished is reported.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks import gaps
from fastweight.cli import main as main_of_fastweight

STEPS, EVERY, WAIT, PROFILED, ALLOWED = 12, 4, 4, 2, 2**-8
MICRO_BATCHES = 4  # of a step on each of several GPUs; lm-paper has 8 on two
SETTINGS = (
    f"training.steps={STEPS + PROFILED}", f"training.log_every={EVERY}", "training.validate_every=0",
    "training.precision=bf16", "training.checkpoint_every=1000", "optimizer.warmup_steps=4", "engine.report=none",
)  # fmt: skip
KINDS = ("one", "ddp", "fsdp2")
BEGAN = "LM_TWO_BEGAN"  # variable of the environment: when the parent began


class Turn(NamedTuple):
    """A run's place in the order, as paths in the parent's folder: whom it waits for, what it makes at its end."""

    name: str
    waits_for: Path
    done: Path
    profile: bool

    @property
    def ready(self) -> Path:
        return self.done.with_suffix(".ready")

    def note(self, phase: str) -> None:
        """A line with the time for the parent to print; appended whole, whoever else writes."""
        seconds = time.time() - float(os.environ.get(BEGAN, "0"))
        line = f"{seconds:6.1f} s  {self.name}.{os.environ.get('RANK', '0')}: {phase}\n"
        with (self.done.parent / "notes").open("a") as notes:
            notes.write(line)


def write_data(directory: Path, vocab_size: int, num_tokens: int) -> None:
    """Random tokens, the lower ids more often, with a tokenizer of as many words."""
    from tokenizers import Tokenizer, models

    from fastweight.data.writer import SplitWriter

    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (directory / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer" / "tokenizer.json"))
    random, writer = np.random.default_rng(0), SplitWriter(directory, "train", np.dtype("<u2"))
    for _ in range(num_tokens // 4096):
        ids = 1 + (random.random(4095) ** 3 * (vocab_size - 1)).astype(np.int64)
        writer.append(np.array([*ids, 0]), num_bytes=0, num_words=0)
    meta = {"vocab_size": vocab_size, "fingerprint": "words"}
    splits = {"train": vars(writer.close())}
    (directory / "meta.json").write_text(json.dumps({"format": 1, "tokenizer": meta, "splits": splits}))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def worker(arguments: list[str], turn: Turn) -> None:
    """`fastweight ARGUMENTS`, which waits for its turn at step WAIT and saves nothing."""
    from fastweight.training import trainer

    build = trainer.build_trainer

    def with_turns(*given: Any) -> Any:
        turn.note("model and data are there")
        built = build(*given)
        built.add_callback(_turns(turn))
        gaps.marked(built)
        return built

    turn.note("imported")
    trainer.build_trainer = with_turns
    sys.argv = ["fastweight", *arguments]
    try:
        main_of_fastweight()
    finally:
        turn.note("is gone")


def _turns(turn: Turn) -> Any:
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        profile: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = False  # gigabytes, while the next run is timed
            if state.global_step == 1:
                _synchronize()
                turn.note("first step")
            if state.global_step == WAIT:
                _wait(turn)
            if state.global_step == STEPS and turn.profile:
                _synchronize()
                self.profile = torch.profiler.profile().__enter__()
            if state.global_step == STEPS + PROFILED and self.profile is not None:
                _synchronize()
                self.profile.__exit__(None, None, None)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _synchronize()
            turn.note("trained")
            if state.is_world_process_zero:
                turn.done.touch()
            if self.profile is not None and state.is_world_process_zero:
                lines = gaps.report(*gaps.split(self.profile.profiler.kineto_results.events()), PROFILED)
                turn.done.with_suffix(".gaps").write_text("\n".join(lines) + "\n")

    return Turns()


def _wait(turn: Turn) -> None:
    _synchronize()
    turn.ready.touch()
    turn.note(f"ready after step {WAIT}")
    while not turn.waits_for.exists():
        time.sleep(0.01)
    turn.note("begins")


class Plan(NamedTuple):
    """What all runs share."""

    gpus: int
    recipe: str
    micro: int
    settings: tuple[str, ...]
    profiled: tuple[str, ...]


def gpus_of(name: str, plan: Plan) -> int:
    return 1 if name == "one" else plan.gpus


def started(name: str, place: int, after: str, work: Path, plan: Plan) -> list[subprocess.Popen[bytes]]:
    """The processes of the run `name`, the `place`th in the order, as torchrun would start them; its own launcher is
    one more process to import and to end."""
    gpus = gpus_of(name, plan)
    command = [sys.executable, "-m", "benchmarks.lm_two", "--worker", name, str(work / after)]
    command += [str(work / f"{name}.done"), "gaps" if name in plan.profiled else "none"]
    command += ["train", "lm", "--recipe", plan.recipe, "--data", str(work / "data"), "--out", str(work / name)]
    command += ["--max-steps", str(STEPS + (PROFILED if name in plan.profiled else 0))]  # one schedule for all
    own = (f"training.batch_size={MICRO_BATCHES * plan.gpus * plan.micro}", f"training.micro_batch_size={plan.micro}")
    own = (*own, f"engine.parallel={'fsdp2' if name == 'fsdp2' else 'ddp'}")
    command += [word for setting in (*SETTINGS, *own, *plan.settings) for word in ("--set", setting)]
    if gpus == 1:
        environments = [os.environ | {"CUDA_VISIBLE_DEVICES": "0"}]
    else:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29_500 + place),
            "WORLD_SIZE": str(gpus),
        }
        ranks = map(str, range(gpus))
        environments = [environment | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"} for rank in ranks]
    with (work / f"{name}.log").open("w") as log:
        return [subprocess.Popen(command, env=each, stdout=log, stderr=subprocess.STDOUT) for each in environments]


def result(name: str, gpus: int, work: Path, codes: list[int]) -> dict[str, Any]:
    """The lines of metrics of one run."""
    path = work / name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    lines = [line for line in lines if line["step"] <= STEPS]
    if [line["step"] for line in lines] != [*range(EVERY, STEPS + 1, EVERY)]:
        return {"name": name, "failed": f"exit codes {codes}: {(work / f'{name}.log').read_text()[-3000:]}"}
    rates = [line["tokens_per_second"] for line in lines[len(lines) // 2 :]]
    told = work / f"{name}.gaps"
    return {
        "name": name,
        "gpus": gpus,
        "losses": [line["loss"] for line in lines],
        "tokens_per_second": median(rates),
        "peak_memory_gib": lines[-1]["peak_memory_gib"],
    } | ({"gaps": told.read_text().splitlines()} if told.is_file() else {})


def compared(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each run: rate, scaling, largest relative difference of a loss from the first run's."""
    first, lines = runs[0], []
    for run in runs:
        lines += [f"{run['name']}: {line}" for line in run.get("gaps", [])]
        if "failed" in run or "failed" in first:
            lines.append(f"{run['name']:9s} failed: {run.get('failed', 'nothing to compare with')}")
            continue
        pairs = zip(run["losses"], first["losses"], strict=True)
        run["largest_gap"] = max(abs(a - b) / b for a, b in pairs)
        run["scaling"] = run["tokens_per_second"] / first["tokens_per_second"]
        run["agrees"] = run["largest_gap"] <= ALLOWED
        rate = f"{run['tokens_per_second']:10,.0f} tokens/s  x {run['scaling']:.3f}  {run['peak_memory_gib']:.1f} GiB"
        losses = f"losses {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}, differ by {run['largest_gap']:.1e}"
        lines.append(f"{run['name']:9s} {run['gpus']} GPU  {rate}  {losses} ({'agree' if run['agrees'] else 'DIFFER'})")
    return lines


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Rates as bars beside what perfect scaling would give, and losses by log line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = [run for run in runs if "failed" not in run]
    if not runs:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    ideal = [runs[0]["tokens_per_second"] * run["gpus"] / 1e3 for run in runs]
    left.barh(range(len(runs)), ideal, color="none", edgecolor="#8a94a6", linestyle="--")
    left.barh(range(len(runs)), [run["tokens_per_second"] / 1e3 for run in runs], color="#2a7f62")
    left.set_yticks(range(len(runs)), [f"{run['name']}, {run['gpus']} GPU" for run in runs])
    left.invert_yaxis()
    left.set_xlabel("thousand tokens/s; dashed: one GPU times their number")
    for place, run in enumerate(runs):
        right.plot(run["losses"], ("-", "--", ":", "-.")[place % 4], label=run["name"])
    right.set_xlabel("line of metrics")
    right.set_ylabel("loss")
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def watched(running: dict[str, list[subprocess.Popen[bytes]]], work: Path, limit: float) -> None:
    """Prints notes, gives the first its turn when all are ready, and ends at the limit whatever runs."""
    end, heard, notes = time.monotonic() + limit, 0, work / "notes"
    while time.monotonic() < end and any(_lives(processes) for processes in running.values()):
        time.sleep(0.1)
        for name, processes in running.items():
            if any(process.poll() for process in processes):  # one rank has failed: the others wait for it in vain
                _kill(processes)
            if not _lives(processes):  # a run that failed must not keep the others waiting
                (work / f"{name}.done").touch()
        if all((work / f"{name}.ready").exists() or (work / f"{name}.done").exists() for name in running):
            (work / "begin").touch()  # nobody else starts up beside the first that is timed
        text = notes.read_text() if notes.is_file() else ""
        print(text[heard:], end="", flush=True)
        heard = len(text)
    for name, processes in running.items():
        if _lives(processes):
            print(f"{limit:.0f} s are over: {name} is ended", flush=True)
            _kill(processes)


def _lives(processes: list[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is None for process in processes)


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--runs", default="one,ddp,fsdp2", help="in order; the first is what others are compared with")
    parser.add_argument("--gaps", default="", help="runs that are profiled for two steps after they are timed")
    parser.add_argument("--recipe", default="falcon-1.3")
    parser.add_argument("--micro", type=int, default=32, help="sequences of a forward pass")
    parser.add_argument("--vocab", type=int, default=50_257, help="of the random tokens")
    parser.add_argument("--set", action="append", default=[], help="more settings of the recipe, as name=value")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("results/lm/two.json"))
    parser.add_argument("--draw-only", action="store_true", help="the picture again, from the JSON")
    chosen = parser.parse_args(arguments)
    if chosen.draw_only:
        return draw(json.loads(chosen.out.read_text()), chosen.out.with_suffix(".png"))
    names, profiled = chosen.runs.split(","), chosen.gaps.split(",") if chosen.gaps else []
    if len(set(names)) < len(names) or not set(names) <= set(KINDS):
        parser.error(f"--runs: got {chosen.runs}, expected different ones of {', '.join(KINDS)}")
    if not set(profiled) <= set(names):
        parser.error(f"--gaps: got {chosen.gaps}, expected some of --runs {chosen.runs}")
    began = time.monotonic()
    os.environ[BEGAN] = str(time.time())
    settings = (f"engine.compile={str(chosen.compile).lower()}", *chosen.set)
    plan = Plan(chosen.gpus, chosen.recipe, chosen.micro, settings, tuple(profiled))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        work = Path(folder)
        write_data(work / "data", chosen.vocab, 2**20)
        print(f"{time.monotonic() - began:6.1f} s  data written", flush=True)
        before = ["begin", *(f"{name}.done" for name in names)]
        running = {name: started(name, i, before[i], work, plan) for i, name in enumerate(names)}
        watched(running, work, chosen.limit - (time.monotonic() - began))
        codes = {name: [process.wait() for process in processes] for name, processes in running.items()}
        runs = [result(name, gpus_of(name, plan), work, codes[name]) for name in names]
    print(f"all took {time.monotonic() - began:.0f} s", *compared(runs), sep="\n", flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(runs, indent=1) + "\n")
    draw(runs, chosen.out.with_suffix(".png"))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        name, waits_for, done, profile, *words = sys.argv[sys.argv.index("--worker") + 1 :]
        worker(words, Turn(name, Path(waits_for), Path(done), profile == "gaps"))
    else:
        main()
