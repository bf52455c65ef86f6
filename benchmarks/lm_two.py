"""One GPU against several through `fastweight train lm`: the same losses with DDP and FSDP2, and tokens/s.

    python -m benchmarks.lm_two --gpus 2            prints a table, writes results/lm/two.json and .png

Three runs of one recipe on the same random tokens, the same global batch, bf16 autocast: one process, then torchrun
with DDP, then with FSDP2. Losses are compared at every line of metrics.jsonl with bfloat16's rounding as the measure;
the rate is the median of the second half of the lines.

Traps: random tokens are learned by their frequencies alone, so losses fall little; that they agree says that gradients
and steps do. All three start at once, to import and compile at the same time, and take turns from step WAIT on, so that
one of them at a time uses the devices for what is timed.
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
from typing import Any

import numpy as np
import torch

from fastweight.cli import main as main_of_fastweight

STEPS, EVERY, WAIT, ALLOWED = 12, 2, 4, 2**-8
MICRO_BATCHES = 4  # of a step on each of several GPUs; lm-paper has 8 on two
SETTINGS = (
    f"training.steps={STEPS}", f"training.log_every={EVERY}", "training.validate_every=0", "training.precision=bf16",
    "training.checkpoint_every=1000", "optimizer.warmup_steps=4", "engine.report=none", "engine.workers=2",
)  # fmt: skip


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


def worker(arguments: list[str], turn: Path, after: Path) -> None:
    """`fastweight ARGUMENTS`, which after step WAIT says so beside `after` and waits until `turn` exists; when it has
    trained it makes `after`."""
    from transformers import TrainerCallback

    from fastweight.training import trainer

    class Turns(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WAIT:
                _synchronize()
                after.with_suffix(".ready").touch()
                while not turn.exists():
                    time.sleep(0.01)
            if state.global_step == STEPS:
                _synchronize()
                after.touch()

    build = trainer.build_trainer

    def with_turns(*given: Any) -> Any:
        built = build(*given)
        built.add_callback(Turns())
        return built

    trainer.build_trainer = with_turns
    sys.argv = ["fastweight", *arguments]
    main_of_fastweight()


def started(name: str, work: Path, recipe: str, batch: int, micro: int, gpus: int, how: dict[str, str]) -> Any:
    """The processes of one run; `how` is its parallelism, whether to compile, and whom it waits for."""
    command = [sys.executable, "-m"]
    if gpus > 1:
        command += ["torch.distributed.run", f"--nproc-per-node={gpus}", f"--master-port={how['port']}", "-m"]
    command += ["benchmarks.lm_two", "--worker", str(work / how["after"]), str(work / f"{name}.done")]
    command += ["train", "lm", "--recipe", recipe, "--data", str(work / "data"), "--out", str(work / name)]
    own = (f"training.batch_size={batch}", f"training.micro_batch_size={micro}")
    own = (*own, f"engine.parallel={how['parallel']}", f"engine.compile={how['compile']}")
    command += [word for setting in (*SETTINGS, *own) for word in ("--set", setting)]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": "0"} if gpus == 1 else {})
    with (work / f"{name}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def result(name: str, gpus: int, work: Path, code: int) -> dict[str, Any]:
    """The lines of metrics of one run."""
    path = work / name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if not lines or lines[-1]["step"] != STEPS:
        return {"name": name, "failed": f"exit code {code}: {(work / f'{name}.log').read_text()[-3000:]}"}
    rates = [line["tokens_per_second"] for line in lines[len(lines) // 2 :]]
    return {
        "name": name,
        "gpus": gpus,
        "losses": [line["loss"] for line in lines],
        "tokens_per_second": median(rates),
        "peak_memory_gib": lines[-1]["peak_memory_gib"],
    }


def compared(runs: list[dict[str, Any]]) -> list[str]:
    """A line for each run: rate, scaling, largest relative difference of a loss from the first run's."""
    first, lines = runs[0], []
    for run in runs:
        if "failed" in run or "failed" in first:
            lines.append(f"{run['name']:6s} failed: {run.get('failed', 'nothing to compare with')}")
            continue
        gaps = [abs(a - b) / b for a, b in zip(run["losses"], first["losses"], strict=True)]
        run["largest_gap"], run["scaling"] = max(gaps), run["tokens_per_second"] / first["tokens_per_second"]
        run["agrees"] = run["largest_gap"] <= ALLOWED
        rate = f"{run['tokens_per_second']:10,.0f} tokens/s  x {run['scaling']:.3f}  {run['peak_memory_gib']:.1f} GiB"
        losses = f"losses {run['losses'][0]:.3f} to {run['losses'][-1]:.3f}, differ by {run['largest_gap']:.1e}"
        lines.append(f"{run['name']:6s} {run['gpus']} GPU  {rate}  {losses} ({'agree' if run['agrees'] else 'DIFFER'})")
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
    for run, style in zip(runs, ("-", "--", ":"), strict=False):
        right.plot(run["losses"], style, label=run["name"])
    right.set_xlabel("line of metrics")
    right.set_ylabel("loss")
    right.legend()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--recipe", default="falcon-1.3")
    parser.add_argument("--micro", type=int, default=32, help="sequences of a forward pass")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--limit", type=float, default=600, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("results/lm/two.json"))
    parser.add_argument("--draw-only", action="store_true", help="the picture again, from the JSON")
    chosen = parser.parse_args(arguments)
    if chosen.draw_only:
        return draw(json.loads(chosen.out.read_text()), chosen.out.with_suffix(".png"))
    batch, end = MICRO_BATCHES * chosen.gpus * chosen.micro, time.monotonic() + chosen.limit
    order = (("one", 1, "ddp"), ("ddp", chosen.gpus, "ddp"), ("fsdp2", chosen.gpus, "fsdp2"))
    with tempfile.TemporaryDirectory() as folder:
        work, running, after = Path(folder), [], "begin"
        write_data(work / "data", 50_257, STEPS * batch * 1024 + 8192)
        for place, (name, gpus, parallel) in enumerate(order):
            how = {"parallel": parallel, "compile": str(chosen.compile).lower(), "after": after}
            how["port"] = str(29_500 + place)
            running.append(started(name, work, chosen.recipe, batch, chosen.micro, gpus, how))
            after = f"{name}.done"
        while time.monotonic() < end and any(process.poll() is None for process in running):
            time.sleep(0.1)
            for (name, _, _), process in zip(order, running, strict=True):
                if process.poll():  # a failed run must not keep the others waiting
                    (work / f"{name}.done").touch()
            if all((work / f"{name}.ready").exists() or (work / f"{name}.done").exists() for name, _, _ in order):
                (work / "begin").touch()  # nobody else starts up beside the first that is timed
        for process in running:
            process.terminate()
        runs = [
            result(name, gpus, work, process.wait()) for (name, gpus, _), process in zip(order, running, strict=True)
        ]
    print("\n".join(compared(runs)), flush=True)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(runs, indent=1) + "\n")
    draw(runs, chosen.out.with_suffix(".png"))


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker(sys.argv[4:], Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
