"""Training the 130M models on one very long row: memory, speed, and loss against position, on one GPU.

    python -m benchmarks.long_train --data SHARDS                     results/long-context/long_train.json, .png
    python -m benchmarks.long_train --plan                            bytes per token that a step will need, on a CPU
    python -m benchmarks.long_train --data SHARDS --tokens 4096,16384 --set model.hidden_size=64 ...    a rehearsal

For each recipe, in a process of its own: forward + backward + step on a row of each length, with checkpointing,
bfloat16 weights and the loss chunk by chunk: tokens/s, and peak bytes per token beyond weights and optimizer. Then some
seconds of training on short rows of the text, so that a loss means something, and the loss of every token of a long row
that was held out: read at once, again segment by segment with the state carried on, which must agree, and by a reader
who begins afresh every short row.

Traps: the plan follows every tensor that autograd or an operator hands out (through fake tensors, so it computes
nothing), not what kernels allocate inside; it is eager, as the run is. The held-out row is the end of the split; rows
to train on are drawn from what is before it, several times over when there is little.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweight.evaluation.provenance import made_by

SEGMENT, CHUNK, WARM, AGREES = 65_536, 8192, 3, 1e-2
SETTINGS = ("training.precision=bf16-weights", "engine.gradient_checkpointing=true")


def model_of(recipe: str, settings: list[str]) -> Any:
    from fastweight.recipes import load_recipe
    from fastweight.training.model import build_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return build_model(load_recipe(recipe, [*SETTINGS, *settings])).to(device).train()


class Stepper:
    """Forward, backward, clipping and fused AdamW on rows of ids."""

    def __init__(self, model: Any, rate: float) -> None:
        from fastweight.recipes import Optimizer
        from fastweight.training.groups import parameter_groups

        self.model, self.parameters = model, list(model.parameters())
        self.optimizer = torch.optim.AdamW(parameter_groups(model, Optimizer(learning_rate=rate)), fused=True)

    def __call__(self, ids: Tensor) -> Tensor:
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def learn(model: Any, ids: Tensor, seconds: float, rows: int, length: int, rate: float) -> dict[str, Any]:
    """Some training on short rows, which need no checkpoints: what was seen, and the loss at the end."""
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()  # the second is its name before transformers 5.24
    step, random = Stepper(model, rate), torch.Generator().manual_seed(0)
    begun, count, loss = time.monotonic(), 0, torch.zeros(())
    offsets = torch.arange(length)
    while (spent := time.monotonic() - begun) < seconds:
        for group in step.optimizer.param_groups:
            group["lr"] = rate * min(1.0, (count + 1) / 50, max(1.2 * (1 - spent / seconds), 0.02))
        starts = torch.randint(len(ids) - length, (rows, 1), generator=random)
        loss, count = step(ids[(starts + offsets).to(ids.device)]), count + 1
        if count % 10 == 0:  # the host must not run ahead of its own clock
            float(loss)
    return {"steps": count, "tokens": count * rows * length, "length": length, "loss": round(float(loss), 3)}


@torch.no_grad()
def losses(model: Any, ids: Tensor, segment: int) -> Tensor:
    """The loss of each token but the first of rows [B, T], in float32 [B, T - 1], the state carried over segments."""
    from fastweight.models.cache import CACHE_NAME, FastWeightCache

    targets = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
    found, cache, most = [], FastWeightCache(model.config), max(CHUNK // len(ids), 1)  # logits at a time
    model.eval()
    for part, wanted in zip(ids.split(segment, 1), targets.split(segment, 1), strict=True):
        named: dict[str, Any] = {CACHE_NAME: cache}
        hidden = model.model(input_ids=part, use_cache=True, **named).last_hidden_state
        for rows, labels in zip(hidden.split(most, 1), wanted.split(most, 1), strict=True):
            logits = model.lm_head(rows).float().flatten(0, 1)
            found.append(F.cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels))
    model.train()
    return torch.cat(found, 1)[:, :-1]


def by_position(of_tokens: Tensor, fresh: Tensor) -> list[dict[str, float]]:
    """Mean losses between powers of two of the position, over all rows, and of the same tokens read afresh."""
    edges = [0, *(2**power for power in range(6, of_tokens.shape[1].bit_length())), of_tokens.shape[1]]
    spans = [(start, stop) for start, stop in pairwise(edges) if stop > start]
    return [
        {"from": start, "to": stop}
        | {"loss": float(of_tokens[:, start:stop].mean()), "fresh": float(fresh[:, start:stop].nanmean())}
        for start, stop in spans
    ]


def read(model: Any, ids: Tensor, length: int, segment: int, short: int) -> dict[str, Any]:
    """Loss against position on rows of `length`, at once and in segments, and by how much blocks of them differ; the
    curve has beside it the losses of a reader who forgets all every `short` tokens, which divide `length`."""
    ids = ids[: len(ids) // length * length].view(-1, length)
    whole = losses(model, ids, length)
    parts = losses(model, ids, segment)
    pairs = zip(whole.split(CHUNK, 1), parts.split(CHUNK, 1), strict=True)
    worst = float(torch.stack([(a.mean() - b.mean()).abs() / a.mean() for a, b in pairs]).max())  # NaN stays NaN
    # The first token of each short row has no loss there.
    fresh = F.pad(losses(model, ids.view(-1, short), short), (1, 0), value=float("nan")).view_as(ids)[:, 1:]
    found = {"rows": len(ids), "length": length, "segment": segment, "mean": round(float(whole.mean()), 4)}
    found |= {"short": short, "fresh": round(float(fresh.nanmean()), 4)}
    return found | {"difference": worst, "agrees": worst <= AGREES, "curve": by_position(whole, fresh)}


def measure(model: Any, ids: Tensor, length: int, repeats: int) -> dict[str, Any]:
    """Steps on one row of `length` tokens."""
    cuda, row = ids.is_cuda, ids[:length][None]
    step = Stepper(model, 1e-5)
    first = float(step(ids[None, : min(length, 4096)]))  # the optimizer's state exists from here on
    held = torch.cuda.memory_allocated() if cuda else 0
    seconds, loss = [], 0.0
    for _ in range(1 + repeats):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begun = time.monotonic()
        loss = float(step(row))
        seconds.append(time.monotonic() - begun)
    if not loss < first + 2:  # also when it is not a number
        raise RuntimeError(f"the loss of a step is {loss}, after {first} on the first tokens")
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return {
        "length": length,
        "loss": round(loss, 4),
        "seconds": [round(s, 3) for s in seconds],
        "tokens_per_second": round(length / min(seconds[1:] or seconds)),
        "peak_gib": round(peak / 2**30, 2),
        "held_gib": round(held / 2**30, 2),
        "bytes_per_token": round(max(peak - held, 0) / length),
    }


def planned(recipe: str, length: int, settings: list[str]) -> dict[str, Any]:
    """What `measure` will find, from the shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.scaling import Allocations
    from fastweight.kernels import dispatch

    model = model_of(recipe, ["model.backend=triton", *settings])
    no_gpu = mock.patch.object(dispatch, "machine_reason", return_value=None)  # operators answer with shapes
    with no_gpu, FakeTensorMode(allow_non_fake_inputs=True), Allocations() as live:
        ids = torch.zeros(1, length, dtype=torch.long)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "length": length,
        "bytes_per_token": round(live.peak / length),
        "peak_gib": round((live.peak + 3 * weights) / 2**30, 1),  # and the two moments of AdamW
    }


def worker(chosen: argparse.Namespace, recipe: str) -> None:
    """All parts of one recipe, a line of JSON each."""
    from fastweight.data import open_shards

    def say(part: str, **found: Any) -> None:
        print("@" + json.dumps({"recipe": recipe, "part": part} | found), flush=True)

    torch.set_float32_matmul_precision("high")
    shards, model = open_shards(chosen.data, "train"), model_of(recipe, chosen.set)
    ids = torch.from_numpy(shards.tokens(0, shards.num_tokens)).to(next(model.parameters()).device)
    longest = max(chosen.tokens)
    before, held_out = ids[:-longest], ids[-longest:]
    for length in chosen.tokens if "step" in chosen.parts else ():
        say("step", **measure(model, held_out, length, chosen.repeats))
    if chosen.learn:
        say("learned", **learn(model, before, chosen.learn, chosen.rows, chosen.learn_tokens, 1e-3))
    for length in chosen.tokens if "read" in chosen.parts else ():
        say("read", **read(model, held_out, length, min(chosen.segment, length // 2), chosen.learn_tokens))


def run(chosen: argparse.Namespace, recipe: str, words: list[str], heard: Callable[[dict[str, Any]], None]) -> None:
    """Hands out the rows of one recipe's process as they come; the last says so when it failed or took too long."""
    command = [sys.executable, "-m", "benchmarks.long_train", "--worker", recipe, *words]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    log = chosen.out / f"{recipe}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True)
        timer = threading.Timer(chosen.limit, process.kill)
        timer.start()
        assert process.stdout is not None, "a pipe was asked for"
        try:
            for line in process.stdout:
                print(line.rstrip()[:2000], flush=True)
                if line.startswith("@"):
                    heard(json.loads(line[1:]))
        except KeyboardInterrupt:
            process.kill()
            raise
        finally:
            code, late = process.wait(), timer.finished.is_set()
            timer.cancel()
            process.stdout.close()
    if code:
        reason = f"{'out of time: ' if late else ''}exit code {code}: {log.read_text()[-1500:]}"
        heard({"recipe": recipe, "part": "failed", "reason": reason})
        print(reason, flush=True)
    log.unlink()


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each row but the curves."""
    lines = []
    for row in rows:
        shown = {key: value for key, value in row.items() if key not in ("recipe", "part", "curve")}
        lines.append(f"{row['recipe']:12s} {row['part']:8s} " + "  ".join(f"{k} {v}" for k, v in shown.items())[:300])
    return lines


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss against position, and how much less it is than that of a reader who begins afresh."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    read = [row for row in rows if row["part"] == "read"]
    if not read:
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for row in read:
        x = [(point["from"] + point["to"]) / 2 for point in row["curve"]]
        label = f"{row['recipe']}, {row['rows']} x {row['length']:,}"
        left.plot(x, [point["loss"] for point in row["curve"]], marker="o", markersize=3, label=label)
        right.plot(x, [point["fresh"] - point["loss"] for point in row["curve"]], marker="o", markersize=3)
    for axes in (left, right):
        for length in {row["length"] for row in rows if row["part"] == "learned"}:
            axes.axvline(length, color="#8a94a6", linestyle=":")
            axes.text(length, axes.get_ylim()[1], " longest in training", fontsize=8, va="top", color="#5b6472")
        axes.set_xscale("log", base=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("position in the row")
    left.set_ylabel("loss of held-out text, nats")
    right.set_ylabel(f"less than afresh every {read[0]['short']:,}, nats")
    figure.legend(fontsize=8, loc="outside lower center", ncols=len(read))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="directory of token shards")
    parser.add_argument("--recipes", default="falcon-1.3,falcon-1a.3")
    parser.add_argument("--tokens", type=numbers, default=[131_072, 1_048_576], help="lengths of rows")
    parser.add_argument("--segment", type=int, default=SEGMENT, help="tokens at a time of the reading in segments")
    parser.add_argument("--learn", type=float, default=0.0, help="seconds of training on short rows before")
    parser.add_argument(
        "--parts", nargs="*", choices=("step", "read"), default=["step", "read"], help="what to measure"
    )
    parser.add_argument("--learn-tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16, help="short rows of a step")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="settings of the recipe, as name=value")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each recipe")
    parser.add_argument("--plan", action="store_true", help="say what memory a step needs; measure nothing")
    parser.add_argument("--draw-only", action="store_true", help="the picture again, from the JSON")
    parser.add_argument("--worker")
    parser.add_argument("--out", type=Path, default=Path("results/long-context"))
    chosen = parser.parse_args(arguments)
    if chosen.data is None and not chosen.plan and not chosen.draw_only:
        parser.error("--data: got nothing, expected a directory that `fastweight prepare` wrote")
    if not chosen.plan and any(length % chosen.learn_tokens for length in chosen.tokens):
        parser.error(f"--tokens: got {chosen.tokens}, expected multiples of --learn-tokens {chosen.learn_tokens}")
    return chosen


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    chosen = parsed(words)
    if chosen.worker:
        return worker(chosen, chosen.worker)
    if chosen.plan:
        for recipe in chosen.recipes.split(","):
            for length in chosen.tokens:
                print(recipe, planned(recipe, length, chosen.set), flush=True)
        return None
    if chosen.draw_only:
        return draw(json.loads((chosen.out / "long_train.json").read_text())["rows"], chosen.out / "long_train.png")
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / "long_train.json"
    made = made_by("python -m benchmarks.long_train " + " ".join(words))
    rows: list[dict[str, Any]] = []

    def heard(row: dict[str, Any]) -> None:
        rows.append(row)
        file.write_text(json.dumps({"made": made, "rows": rows}, indent=1) + "\n")

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt: what there is, is shown
    with suppress(KeyboardInterrupt):
        for recipe in chosen.recipes.split(","):
            run(chosen, recipe, words, heard)
    draw(rows, chosen.out / "long_train.png")
    print("\n".join(table(rows)), flush=True)
    return None


if __name__ == "__main__":
    main()
