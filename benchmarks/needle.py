"""Recall against distance: pairs hidden in filler, asked for at the end: `python -m benchmarks.needle`.

    results/long-context/needle.json, needle.png     share of right answers by distance, for each model
    --merge A/needle.json B/needle.json              one file and picture of several runs, of a model each

A row of T tokens is filler; N keys, each followed by its value, stand at random places, and the last 2 N tokens ask for
every key once: the token after a question is to be the key's value. Small models are trained on rows of --tokens with
distances drawn evenly on a log scale, and asked in rows of --lengths: what is lost in longer ones at a distance that
was trained is lost to the filler before the pair, what is lost at longer distances to that behind it.

Traps: the answer is asked for, not shown, so recall cannot come from copying; keys of a row are different tokens, and
filler is neither key nor value; chance is 1 / VALUES. A memory that forgets by itself (a carry below 1 at filler) shows
as a curve that falls with distance, one that is full shows as a low curve.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweight.evaluation.provenance import made_by
from fastweight.models import FastWeightConfig, FastWeightForCausalLM
from fastweight.recipes import Optimizer
from fastweight.training.groups import parameter_groups

FILLERS, KEYS, VALUES, PAIRS = 32, 64, 32, 8
VOCAB = FILLERS + KEYS + VALUES
FEWEST = 8  # questions of a point in the picture
EXTRA: dict[str, dict[str, Any]] = {"": {}, ".3": {"step": "direct", "qk_norm": "rms"}}


class Rows(NamedTuple):
    """Tokens [B, T], the answers [B, N], and how far behind its question each pair lies [B, N]."""

    ids: Tensor
    answers: Tensor
    distances: Tensor


def draw(rows: int, tokens: int, random: torch.Generator) -> Rows:
    """Pairs at distances that are spread evenly over their logarithms, each pair on two places of its own."""
    end = tokens - 2 * PAIRS
    ids = torch.randint(FILLERS, (rows, tokens), generator=random)
    slots = end // 2  # pair places, counted backwards from the questions
    place = torch.exp(torch.rand(rows, PAIRS, generator=random) * math.log(slots)).long().clamp(max=slots)
    place = _apart(place.sort(-1).values, slots)  # 1 .. slots
    order = torch.rand(rows, PAIRS, generator=random).argsort(-1)
    place, at = place.gather(-1, order), end - 2 * place.gather(-1, order)
    keys = FILLERS + torch.rand(rows, KEYS, generator=random).argsort(-1)[:, :PAIRS]
    values = FILLERS + KEYS + torch.randint(VALUES, (rows, PAIRS), generator=random)
    ids.scatter_(1, at, keys).scatter_(1, at + 1, values)
    asked = torch.rand(rows, PAIRS, generator=random).argsort(-1)
    questions = end + 2 * torch.arange(PAIRS)
    ids[:, questions] = keys.gather(-1, asked)
    return Rows(ids, values.gather(-1, asked), questions - at.gather(-1, asked))


def _apart(place: Tensor, slots: int) -> Tensor:
    """Sorted places moved up where two are the same, and down again where that led past the end."""
    for i in range(1, place.shape[1]):
        place[:, i] = torch.maximum(place[:, i], place[:, i - 1] + 1)
    for i in range(place.shape[1] - 1, -1, -1):
        place[:, i] = place[:, i].clamp(max=slots - (place.shape[1] - 1 - i))
    return place


def answered(model: Any, ids: Tensor) -> Tensor:
    """Logits [B, N, vocab] behind the questions."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, -2 * PAIRS :: 2])


def model_of(mixer: str, width: int, layers: int) -> Any:
    """A small model; ".3" as in the recipes: RMS-normalised keys, and the token emits the step itself."""
    name, dot, number = mixer.partition(".")
    if dot + number not in EXTRA:
        raise ValueError(f"models: got {mixer}, expected a mixer, alone or with .3")
    settings = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": max(width // 64, 1)}
    settings |= {"vocab_size": VOCAB, "num_hidden_layers": layers, "initializer_range": 0.5 * width**-0.5}
    torch.manual_seed(0)
    return FastWeightForCausalLM(FastWeightConfig(mixer=name, **settings, **EXTRA[dot + number]))


def train(model: Any, tokens: int, rows: int, steps: int, rate: float, limit: float) -> dict[str, Any]:
    """AdamW with warm-up and cosine on fresh rows, until `steps` or `limit` seconds; how far it came."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(parameter_groups(model, Optimizer(learning_rate=rate)), betas=(0.9, 0.95), fused=True)
    random, begun = torch.Generator().manual_seed(1), time.monotonic()
    warm, told, loss, step = max(steps // 20, 1), begun, torch.zeros(()), 0
    for step in range(1, steps + 1):
        progress = max(step / steps, (time.monotonic() - begun) / limit)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / warm, 0.5 + 0.5 * math.cos(math.pi * min(progress, 1)))
        batch = draw(rows, tokens, random)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = answered(model, batch.ids.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.answers.flatten().to(device))
        loss.backward()
        loss = loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        now = time.monotonic()
        if now - told > 10 or step == steps:
            told, left = now, min((now - begun) / step * (steps - step), limit - (now - begun))
            print(f"step {step} of {steps}, loss {float(loss):.3f}, {left:.0f} s left", flush=True)
        if now - begun > limit:
            break
    return {"steps": step, "seconds": round(time.monotonic() - begun, 1), "loss": round(float(loss), 4)}


@torch.no_grad()
def recall(model: Any, longest: int, problems: int, rows: int) -> list[dict[str, float]]:
    """Share of right answers by distance (between powers of two), over rows of `longest` tokens."""
    device, random = next(model.parameters()).device, torch.Generator().manual_seed(2)
    model.eval()
    bins: dict[int, list[int]] = {}
    for _ in range(-(-problems // rows)):
        batch = draw(rows, longest, random)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            right = answered(model, batch.ids.to(device)).argmax(-1).cpu() == batch.answers
        for distance, hit in zip(batch.distances.flatten().tolist(), right.flatten().tolist(), strict=True):
            count = bins.setdefault(distance.bit_length() - 1, [0, 0])
            count[0] += hit
            count[1] += 1
    return [
        {"distance": 2**power, "right": hits / total, "asked": total} for power, (hits, total) in sorted(bins.items())
    ]


def draw_curves(results: list[dict[str, Any]], tokens: int, path: Path) -> None:
    """Recall against distance, a panel for each length of the rows; bars are one standard error, and a line marks what
    training has shown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lengths = sorted({one["tokens"] for result in results for one in result["curves"]})
    figure, panels = plt.subplots(
        1, len(lengths), figsize=(1.5 + 4 * len(lengths), 3.8), sharey=True, squeeze=False, constrained_layout=True
    )
    for axes, length in zip(panels[0], lengths, strict=True):
        for result in results:
            of_length = [one["curve"] for one in result["curves"] if one["tokens"] == length]
            curve = [point for one in of_length for point in one if point["asked"] >= FEWEST]
            x, y = [1.4 * point["distance"] for point in curve], [point["right"] for point in curve]
            wide = [math.sqrt(max(p * (1 - p), 1e-4) / point["asked"]) for p, point in zip(y, curve, strict=True)]
            axes.errorbar(x, y, wide, marker="o", markersize=3, capsize=2, label=result["model"])
        axes.axvline(tokens, color="#8a94a6", linestyle="--", label="longest in training")
        axes.axhline(1 / VALUES, color="#8a94a6", linestyle=":", label="chance")
        axes.set(ylim=(0, 1.1), xlabel="tokens between pair and question", title=f"rows of {length:,} tokens")
        axes.set_xscale("log", base=2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("right answers")
    panels[0][-1].legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write(found: dict[str, Any], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "needle.json").write_text(json.dumps(found, indent=1) + "\n")
    draw_curves(found["results"], found["tokens"], directory / "needle.png")


def main(arguments: list[str] | None = None) -> None:
    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="falcon-1.3,falcon-1a.3")
    parser.add_argument("--tokens", type=int, default=1024, help="of a row in training")
    parser.add_argument("--lengths", type=numbers, default=[1024, 8192, 65_536], help="of rows in the test")
    parser.add_argument("--rows", type=int, default=32, help="of a training step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=2e-3, help="learning rate")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--problems", type=int, default=128, help="rows of the test")
    parser.add_argument("--test-rows", type=int, default=8, help="rows at a time")
    parser.add_argument("--limit", type=float, default=600, help="seconds of training for each model")
    parser.add_argument("--out", type=Path, default=Path("results/long-context"))
    parser.add_argument("--draw-only", action="store_true", help="the picture again, from the JSON")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="JSON files that become one; train nothing")
    chosen = parser.parse_args(arguments)
    if chosen.draw_only:
        found = json.loads((chosen.out / "needle.json").read_text())
        return draw_curves(found["results"], found["tokens"], chosen.out / "needle.png")
    if chosen.merge:
        parts = [json.loads(path.read_text()) for path in chosen.merge]
        made = parts[0]["made"] | {"command": "; ".join(part["made"]["command"] for part in parts)}
        results = [result for part in parts for result in part["results"]]
        return write(parts[0] | {"made": made, "results": results}, chosen.out)
    device, results = "cuda" if torch.cuda.is_available() else "cpu", []
    for name in chosen.models.split(","):
        model = model_of(name, chosen.width, chosen.layers).to(device).train()
        seen = train(model, chosen.tokens, chosen.rows, chosen.steps, chosen.rate, chosen.limit)
        print(name, seen, flush=True)
        results.append({"model": name} | seen | {"curves": []})
        for length in chosen.lengths:
            curve = recall(model, length, chosen.problems, chosen.test_rows)
            results[-1]["curves"].append({"tokens": length, "curve": curve})
            print(f"{length:,}:", *(f"{point['distance']}: {point['right']:.2f}" for point in curve), flush=True)
        made = made_by("python -m benchmarks.needle " + " ".join(arguments or sys.argv[1:]))
        sizes = {"tokens": chosen.tokens, "width": chosen.width, "layers": chosen.layers, "device": device}
        write({"made": made} | sizes | {"results": results}, chosen.out)
    return None


if __name__ == "__main__":
    main()
