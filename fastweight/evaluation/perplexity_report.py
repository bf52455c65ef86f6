"""Perplexities of several models into a terminal table, JSON, and a picture of loss against context.

Trap: a loss at one number of tokens in context is noisy; the picture shows means over widening ranges of it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from fastweight.evaluation.perplexity import LastWord, Perplexity
from fastweight.files import write_json

Results = Mapping[str, Perplexity | LastWord]
COLUMNS = {
    Perplexity: {
        "loss": "nats a token",
        "token_perplexity": "ppl token",
        "word_perplexity": "ppl word",
        "byte_perplexity": "ppl byte",
        "bits_per_byte": "bits a byte",
    },
    LastWord: {"accuracy": "accuracy", "accuracy_error": "±", "perplexity": "ppl last word"},
}
COUNTS = {
    Perplexity: ("num_documents", "num_tokens", "num_words", "num_bytes"),
    LastWord: ("num_texts",),
}


def table(results: Results, about: str) -> Table:
    """One row for each model; what was scored is in the title."""
    kind = type(next(iter(results.values())))
    drawn = Table(title=about, box=box.SIMPLE_HEAD)
    drawn.add_column("model", overflow="fold")
    for title in COLUMNS[kind].values():
        drawn.add_column(title, justify="right")
    for name, result in results.items():
        drawn.add_row(name, *(_number(getattr(result, field)) for field in COLUMNS[kind]))
    return drawn


def to_json(results: Results, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data: the settings, and for each model counts, figures, and loss by range of context."""
    return {"settings": dict(settings), "models": {name: _plain(result) for name, result in results.items()}}


def write_report(results: Results, settings: Mapping[str, Any], out: Path) -> list[Path]:
    """Write perplexity.json and, for documents, perplexity.png into a directory; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    data, picture = out / "perplexity.json", out / "perplexity.png"
    write_json(data, to_json(results, settings))
    documents = {name: result for name, result in results.items() if isinstance(result, Perplexity)}
    if documents:
        draw(documents, picture)
    return [data, picture] if documents else [data]


def by_context(result: Perplexity) -> list[tuple[float, float]]:
    """(tokens in context, mean loss) over ranges that widen by half octaves, empty ones left out."""
    length = len(result.position_losses)
    edges = np.unique(np.round(2 ** np.arange(0, np.log2(length + 1) + 0.5, 0.5)).astype(int))
    points = []
    for low, high in zip(edges, [*edges[1:], length + 1], strict=True):
        losses, counts = (a[low - 1 : high - 1].sum() for a in (result.position_losses, result.position_counts))
        if counts:
            points.append((float(np.sqrt(low * (min(high, length + 1) - 1))), float(losses / counts)))
    return points


def draw(results: Mapping[str, Perplexity], path: Path) -> None:
    """Write the picture: a line for each model."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fastweight.evaluation.picture import draw_by_context

    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    draw_by_context(panel, {name: by_context(result) for name, result in results.items()}, "loss (nats a token)")
    panel.grid(color="#DDDDDD", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=150)


def _plain(result: Perplexity | LastWord) -> dict[str, Any]:
    fields: Sequence[str] = [*COUNTS[type(result)], *COLUMNS[type(result)]]
    plain = {field: getattr(result, field) for field in fields}
    return plain | ({"loss_by_context": by_context(result)} if isinstance(result, Perplexity) else {})


def _number(value: float) -> str:
    return f"{value:,.3f}" if value < 1e4 else f"{value:.3g}"
