"""What the GPU benchmark found -> lines on the terminal, gpu.md, and roofline.png; all from the JSON alone.

Times are the median of the rounds' medians. A target that cannot be judged because its rival was not timed in this run
is listed as such, not as met.
"""

from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu_cases import ALLOWED, CASES, OPS, REGIMES, SHAPES, TARGETS, Shape, Target, cost, floors

Row = dict[str, Any]
TIMED = ("forward_ms", "train_ms")
COLOURS = ("#2a7f62", "#1f5fa8", "#d98e04", "#b0413e", "#7b4ea3", "#4d6b2f", "#c2557a", "#3a9bb0", "#8a6d3b", "#222222")
MODES = {"forward": "forward_ms", "train": "train_ms"}


def join(row: Row, new: Row) -> None:
    """Adds what is new to a row; of times that it has already, it keeps all in `rounds` and shows the median."""
    for name, value in new.items():
        if name in TIMED:
            every = row.setdefault("rounds", {}).setdefault(name, [])
            every.append(value)
            value = median(every)
        row[name] = value


def worst(row: Row) -> tuple[str, float]:
    """Name and size of the largest error over all regimes."""
    flat = {f"{name}, {regime}": e for regime, found in row.get("errors", {}).items() for name, e in found.items()}
    return max(flat.items(), key=lambda item: item[1]) if flat else ("", 0.0)


def line(row: Row, rates: dict[str, float] | None) -> str:
    """One row for the terminal."""
    head = f"{row['op']:26s} {'x'.join(map(str, row['shape'])):18s}"
    if "failed" in row:
        return f"{head} failed: {row['failed']}"
    name, error = worst(row)
    if row.get("wrong"):
        return f"{head} WRONG: error of {name} {error:.1e}, allowed {ALLOWED:.1e}"
    if "forward_ms" not in row:
        return f"{head} checked: {name} {error:.1e}"
    low = floors(OPS[CASES[row["op"]].op], tuple(row["shape"]), rates) if rates else (0.0, 0.0)
    train = f"{row['train_ms']:8.3f}" if "train_ms" in row else f"{'-':>8s}"
    text = f"{head} {row['forward_ms']:8.3f} {train} ms  floors {low[0]:.3f} {low[1]:.3f}"
    return text + f"  {row.get('peak_mib', 0):6.0f} MiB  {name} {error:.1e}"


def decode_line(row: Row) -> str:
    head = f"decode {row['label']:30s} batch {row['batch']:4d}"
    if "us" not in row:
        return f"{head} {row.get('failed', 'WRONG')} error {row.get('error', 0):.1e}"
    return f"{head} {row['us']:8.2f} us a token, host {row['host_us']:6.1f} us, error {row['error']:.1e}"


def find(found: dict[str, Any], label: str, shape: Shape) -> Row | None:
    """The timed row of a case at a shape."""
    for row in found["rows"]:
        if row["op"] == label and tuple(row["shape"]) == shape and "forward_ms" in row:
            return row
    return None


def verdicts(found: dict[str, Any]) -> list[tuple[Target, Shape, float | None]]:
    """Every target at every shape of its width, with the ratio measured (None: not both were timed)."""
    judged = []
    for target in TARGETS:
        for shape in SHAPES:
            both = [CASES[label].shapes() for label in (target.label, target.against)]
            if shape[3] != target.width or not all(shape in shapes for shapes in both):
                continue
            own, rival = find(found, target.label, shape), find(found, target.against, shape)
            name = MODES[target.mode]
            known = own is not None and rival is not None and name in own and name in rival
            judged.append((target, shape, own[name] / rival[name] if known and own and rival else None))
    return judged


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].replace("|", "/")


def _shape(shape: Shape) -> str:
    return " x ".join(map(str, shape))


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)] + [""]


def _times(found: dict[str, Any]) -> list[str]:
    lines = []
    for shape in SHAPES:
        rows = []
        for row in found["rows"]:
            if tuple(row["shape"]) != shape:
                continue
            op = OPS[CASES[row["op"]].op]
            if "forward_ms" not in row:
                rows.append([row["op"], _last_line(row.get("failed", "wrong: not timed"))[:80], *[""] * 6])
                continue
            low, (name, error) = floors(op, shape, found["ceilings"]), worst(row)
            judged = CASES[row["op"]].judged
            train = row.get("train_ms")
            rows.append([
                row["op"], f"{row['forward_ms']:.3f}", f"{row['forward_ms'] / low[0]:.1f}" if judged else "",
                f"{train:.3f}" if train else "", f"{train / low[1]:.1f}" if train and judged else "",
                f"{row['peak_mib']:.0f}" if train else "", f"{row.get('host_us', 0):.0f}", f"{error:.1e} {name}",
            ])  # fmt: skip
        if rows:
            head = ["op", "forward ms", "x floor", "forward + backward ms", "x floor", "peak MiB", "host us", "error"]
            lines += [f"### {_shape(shape)}", "", *_table(head, rows)]
    return lines


def _targets(found: dict[str, Any]) -> list[str]:
    rows = []
    for target, shape, ratio in verdicts(found):
        said = "not timed in this run" if ratio is None else "met" if ratio <= target.most else "missed"
        shown = "" if ratio is None else f"{ratio:.2f}"
        rows.append([
            target.label, target.mode, _shape(shape), f"{target.most:.2f} of {target.against}", shown, said,
        ])  # fmt: skip
    return ["## Targets", "", *_table(["op", "mode", "shape", "at most", "measured", ""], rows)]


def _accuracy(found: dict[str, Any]) -> list[str]:
    checked = [row for row in found["rows"] if len(REGIMES.keys() & row.get("errors", {}).keys()) > 1]
    regimes = [regime for regime in REGIMES if any(regime in row["errors"] for row in checked)]
    rows = []
    for row in checked:
        if all(regime in row["errors"] for regime in regimes):
            cells = [max(row["errors"][regime].items(), key=lambda item: item[1]) for regime in regimes]
            rows.append([row["op"], *(f"{error:.1e} {name}" for name, error in cells)])
    if not rows:
        return []
    text = (
        "Largest relative RMS error of o and all gradients against the float64 recurrence, bfloat16, and whose it is."
    )
    return ["## Accuracy", "", text, "", *_table(["op", *regimes], rows)]


def _decoding(found: dict[str, Any]) -> list[str]:
    from benchmarks import gpu_decode

    rows = []
    for row in found["decode"]:
        low = gpu_decode.floor(row["batch"], found["ceilings"]["copy_bytes_per_s"])
        cells = [row["label"], str(row["batch"])]
        if "us" in row:
            cells += [f"{row['us']:.2f}", f"{low:.2f}", f"{row['us'] / low:.2f}", f"{row['host_us']:.0f}"]
        else:
            cells += [row.get("failed", "wrong")[:60], "", "", ""]
        rows.append(cells)
    if not rows:
        return []
    text = (
        f"One token of one layer inside a CUDA graph, {gpu_decode.HEADS} heads of {gpu_decode.WIDTH}, float32 state; "
        "the floor is the state read and written once."
    )
    head = ["op", "batch", "us", "floor us", "x floor", "host us outside a graph"]
    return ["## Decoding", "", text, "", *_table(head, rows)]


def markdown(found: dict[str, Any]) -> str:
    """The whole report."""
    where, rates = found["machine"], found["ceilings"]
    copy, product = rates["copy_bytes_per_s"] / 1e12, rates["bf16_flop_per_s"] / 1e12
    lines = [
        "# GPU benchmark", "",
        f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, commit {where['commit']}. "
        f"Command: `{where['command']}`. bfloat16, B x T x H x D with D = K = V. "
        f"Copy {copy:.2f} TB/s, matrix product {product:.0f} TFLOP/s, measured in the same run.", "",
        "![Roofline](roofline.png)", "", "## Times", "",
        "Whole op; forward without gradients, forward + backward through autograd. Errors are the largest of o and all "
        f"gradients over all regimes that were checked (allowed {ALLOWED:.1e}). Floors count inputs and outputs once.",
        "", *_times(found), *_targets(found), *_accuracy(found), *_decoding(found),
    ]  # fmt: skip
    if found["first_call_s"]:
        text = (
            "Seconds of the first forward and backward in a fresh process with its compilation: with all compiling at "
            "once, and (where it was asked for) with nothing else on the machine."
        )
        alone = found.get("first_call_alone_s", {})
        rows = [
            [label, f"{seconds:.1f}", f"{alone[label]:.1f}" if label in alone else ""]
            for label, seconds in found["first_call_s"].items()
        ]
        lines += ["## First call", "", text, "", *_table(["op", "s, all at once", "s, alone"], rows)]
    return "\n".join(lines)


def write(folder: Path, found: dict[str, Any]) -> None:
    """gpu.md, and roofline.png where matplotlib is installed."""
    if "ceilings" not in found:
        print("nothing was timed")
        return
    (folder / "gpu.md").write_text(markdown(found))
    try:
        draw(folder / "roofline.png", found)
    except ImportError:
        print("no picture: matplotlib is not installed; --redraw makes it elsewhere")


def draw(path: Path, found: dict[str, Any]) -> None:
    """Left: achieved rate against intensity under the measured roof. Right: time over the floor, shape by shape."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    height = 4 + 0.22 * sum("forward_ms" in row for row in found["rows"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, height), width_ratios=(1, 1.25))
    _roof(left, found)
    _bars(right, found)
    where = found["machine"]
    figure.suptitle(f"{where['device']}, torch {where['torch']}, Triton {where['triton']}, bfloat16", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _roof(axes: Any, found: dict[str, Any]) -> None:
    rates = found["ceilings"]
    bandwidth, peak = rates["copy_bytes_per_s"] / 1e12, rates["bf16_flop_per_s"] / 1e12
    ridge = peak / bandwidth
    axes.plot([30, ridge, 400], [30 * bandwidth, peak, peak], color="black", linewidth=1.2)
    colours = dict(zip(OPS, COLOURS, strict=False))
    for row in found["rows"]:
        case = CASES[row["op"]]
        if not case.judged or "forward_ms" not in row:
            continue
        costs = cost(OPS[case.op], tuple(row["shape"]))
        for (size, work), name, marker in zip(costs, TIMED, ("o", "s"), strict=True):
            if name in row:
                filled = "none" if case.peer else colours[case.op]
                axes.scatter(work / size, work / row[name] / 1e9, marker=marker, s=36, facecolors=filled,
                             edgecolors=colours[case.op], linewidths=1.2)  # fmt: skip
    shown = {CASES[row["op"]].op for row in found["rows"] if "forward_ms" in row}
    for name, colour in colours.items():
        if name in shown:
            axes.scatter([], [], marker="o", color=colour, label=name)
    axes.scatter([], [], marker="o", facecolors="none", edgecolors="grey", label="a peer's code (hollow)")
    axes.scatter([], [], marker="o", color="grey", label="forward")
    axes.scatter([], [], marker="s", color="grey", label="forward + backward")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.set_xticks([30, 60, 100, 200, 400], ["30", "60", "100", "200", "400"])
    marks = [1.5625 * 2**n for n in range(10) if 1.5625 * 2**n > axes.get_ylim()[0]]
    axes.set_yticks(marks, [f"{mark:.3g}" for mark in marks])
    axes.set_xlabel("operations per byte that must move")
    axes.set_ylabel("TFLOP/s achieved")
    axes.set_title(f"Roof: {bandwidth:.2f} TB/s and {peak:.0f} TFLOP/s, measured in the run", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="lower left")
    axes.spines[["top", "right"]].set_visible(False)


def _bars(axes: Any, found: dict[str, Any]) -> None:
    labels, place = [], 0.0
    for shape in SHAPES:
        for row in found["rows"]:
            case = CASES[row["op"]]
            if tuple(row["shape"]) != shape or not case.judged or "forward_ms" not in row:
                continue
            low = floors(OPS[case.op], shape, found["ceilings"])
            colour = "#8a94a6" if case.peer else "#2a7f62"
            for offset, bound, name, alpha in ((-0.2, low[0], "forward_ms", 0.5), (0.2, low[1], "train_ms", 1.0)):
                if name in row:
                    axes.barh(place + offset, row[name] / bound, height=0.38, color=colour, alpha=alpha)
                    axes.text(row[name] / bound, place + offset, f" {row[name]:.2f} ms", va="center", fontsize=6)
            labels.append((place, f"{row['op']}, {_shape(shape)}"))
            place += 1
        place += 0.6
    axes.set_yticks([at for at, _ in labels], [text for _, text in labels], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlim(left=0.9)
    marks = [mark for mark in (1, 2, 5, 10, 20, 50, 100, 200, 500) if mark < axes.get_xlim()[1]]
    axes.set_xticks(marks, [str(mark) for mark in marks])
    axes.minorticks_off()
    axes.set_title("Time over the floor (1 is the device's limit); pale: forward, full: forward + backward", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
