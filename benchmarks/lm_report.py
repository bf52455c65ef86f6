"""Measured rows of language models into Markdown tables and a picture.

MFU here is 6 N FLOP per token over 790 TFLOP/s, which is what bfloat16 products reach on an H200, so that it compares
with figures of others; `fastweight train lm` logs it against the data sheet and counts the memories' own work too.
"""

import json
from pathlib import Path
from statistics import median
from typing import Any

PEAK = 790e12
PEERS = {"fla": "FLA GatedDeltaNet, eager", "llama": "Llama, SDPA, compiled"}
DECODERS = {"fla": "FLA GatedDeltaNet", "llama": "Llama, static cache"}
HOW = (
    "bfloat16 weights (gates float32), fused AdamW, clipping, random tokens; our models with compiled blocks.",
    f"MFU is 6 N FLOP per token over {PEAK / 1e12:.0f} TFLOP/s. While a case imports and compiles, others do so too or",
    "are timed, so seconds to the first step are an upper bound (target 60; compiling: after the model is built).",
    "While one is timed, all others are stopped. A step on 1 x 64 tokens lasts as long as the host needs for it.",
    "Decoding is greedy. Llama's static cache counts as filled, with zeros; ours read theirs (64 long ones: one,",
    "whose state is repeated). FLA's Triton kernels choose among at most 3 of their configurations each, evenly",
    "spread, and what they refuse on Hopper is TileLang's. With all configurations, 202 s of tuning, its model had",
    "reached 244,000 tokens/s at 32 x 1,024 and 301,000 at 2 x 16,384.",
)
UNSTEADY = 1.15  # highest rate of a case over its lowest
UNCHECKED = (
    "**Only the first loss was checked in this run** (10.98, where log 50,257 is 10.82). A short training run right\n"
    "after it, on the same kernels, came to a loss of NaN within four steps: read the training rows as the speed of\n"
    "these kernels, not as proof that they train. The benchmark now refuses a loss that does not fall."
)
Row = dict[str, Any]


def rate(row: Row) -> float:
    return float(median(row["tokens_per_second"]))


def mfu(row: Row) -> float:
    return 6 * row["parameters"] * rate(row) / PEAK


def label(row: Row) -> str:
    name = str(row["name"])
    if row["what"] == "train":
        name = PEERS.get(name, name)
    else:
        name = DECODERS.get(name, name) + ("" if row.get("cuda_graph", True) else ", eager")
    return name + (f" ({row['commit'][:7]})" if "commit" in row else "")


def unsteady(row: Row) -> bool:
    """Whether its rates differ by so much that somebody else was at work."""
    return max(row["tokens_per_second"]) > UNSTEADY * min(row["tokens_per_second"])


def good(rows: list[Row], what: str, batch: int, length: int) -> list[Row]:
    """The rows of one table that have a result, fastest first."""
    chosen = [row for row in rows if (row["what"], row["batch"], row["length"]) == (what, batch, length)]
    return sorted((row for row in chosen if "failed" not in row), key=lambda row: -rate(row))


def places(rows: list[Row], what: str) -> list[tuple[int, int]]:
    found = {(row["batch"], row["length"]) for row in rows if row["what"] == what and "failed" not in row}
    return sorted(found, key=lambda place: (place[1], place[0]))


def training_tables(rows: list[Row]) -> list[str]:
    lines = []
    for batch, length in places(rows, "train"):
        lines += ["", f"## Training, batch {batch}, {length:,} tokens", ""]
        lines += [
            "| model | parameters | tokens/s | lowest to highest | MFU | peak GiB | s to first step | compiling |"
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
        for row in good(rows, "train", batch, length):
            spread = f"{min(row['tokens_per_second']):,} to {max(row['tokens_per_second']):,}"
            cells = [
                label(row) + (" (*)" if unsteady(row) else ""),
                f"{row['parameters'] / 1e6:.1f}M",
                f"{rate(row):,.0f}",
                spread,
                f"{100 * mfu(row):.1f} %",
            ]
            compiling = f"{row['first_step_s'] - row['built_s']:.0f}" if "built_s" in row else ""
            cells += [f"{row['peak_gib']:.1f}", f"{row['first_step_s']:.0f}", compiling]
            lines.append("| " + " | ".join(cells) + " |")
        if any(unsteady(row) for row in good(rows, "train", batch, length)):
            lines += [
                "",
                "(*) Not steady: others kept the host busy meanwhile. The highest rate is nearest to the model's own.",
            ]
    return lines


def decoding_tables(rows: list[Row]) -> list[str]:
    lines = []
    for batch, length in places(rows, "decode"):
        lines += ["", f"## Decoding, batch {batch}, after a prompt of {length:,} tokens", ""]
        lines += [
            "| model | tokens/s | CUDA graph | prompt tokens/s | peak GiB |",
            "| --- | ---: | --- | ---: | ---: |",
        ]
        for row in good(rows, "decode", batch, length):
            graph, read = "yes" if row["cuda_graph"] else "no", row["prefill_tokens_per_second"]
            cells = [label(row), f"{rate(row):,.0f}", graph, f"{read:,}" if read else "not timed"]
            lines.append("| " + " | ".join([*cells, f"{row['peak_gib']:.1f}"]) + " |")
    return lines


def markdown(report: dict[str, Any], picture: str) -> str:
    rows, where = report["rows"], report["machine"]
    lines = ["# Language models on one GPU", "", f"    {where['command']}", ""]
    lines += [f"* {name}: {value}" for name, value in where.items() if name != "command"]
    if any("commit" in row for row in rows):
        lines += ["", "A commit in brackets: a row of another run."]
    lines += ["", *HOW, "", f"![Speeds]({picture})"]
    if any(row["what"] == "train" and "failed" not in row and "last_loss" not in row for row in rows):
        lines += ["", UNCHECKED]
    lines += [*training_tables(rows), *decoding_tables(rows)]
    failed = [
        f"* {row['what']} {label(row)} {row['batch']} x {row['length']}: {row['failed'].split(' | ')[-1][-160:]}"
        for row in rows
        if "failed" in row
    ]
    if failed:
        lines += ["", "## Without a result", "", *failed]
    return "\n".join([*lines, ""])


def draw(report: dict[str, Any], path: Path) -> None:
    """A panel of bars for each table, fastest on top, peers in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = report["rows"]
    panels = [(what, *place) for what in ("train", "decode") for place in places(rows, what)]
    panels = [panel for panel in panels if len(good(rows, *panel)) > 1]  # one bar compares nothing
    if not panels:
        return
    height = -(-len(panels) // 2)
    figure, grid = plt.subplots(height, 2, figsize=(13, 3.6 * height), squeeze=False)
    for axes, (what, batch, length) in zip(grid.flat, panels, strict=False):
        chosen = good(rows, what, batch, length)
        colours = ["#8a94a6" if row["name"] in PEERS else "#2a7f62" for row in chosen]
        axes.barh(range(len(chosen)), [rate(row) for row in chosen], color=colours)
        for place, row in enumerate(chosen):
            extra = f", MFU {100 * mfu(row):.0f} %" if what == "train" else ""
            axes.text(rate(row), place, f"  {rate(row):,.0f}{extra}", va="center", fontsize=8)
        axes.set_yticks(range(len(chosen)), [label(row) for row in chosen], fontsize=8)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        kind = "training" if what == "train" else "decoding after a prompt"
        axes.set_title(f"{kind}: batch {batch}, {length:,} tokens; tokens/s", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(grid.flat)[len(panels) :]:
        axes.set_axis_off()
    where = report["machine"]
    figure.suptitle(f"{where['device']}, torch {where['torch']}, commit {where['commit']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def write_report(path: Path) -> list[Path]:
    """Markdown and picture beside the JSON."""
    report = json.loads(path.read_text())
    text, picture = path.with_suffix(".md"), path.with_suffix(".png")
    draw(report, picture)
    text.write_text(markdown(report, picture.name))
    return [path, text, picture]
