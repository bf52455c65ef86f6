"""Panels into lab.json, pictures, a Markdown page and the same page as one HTML file that opens from disk."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from fastweight.evaluation.page import findings, html_page, markdown_table
from fastweight.files import write_json, write_text
from fastweight.lab.cells import QUESTIONS, Cell
from fastweight.lab.experiments import PANELS, Panel, Settings

INTRODUCTION = """\
No model is trained here: streams of key-value pairs go through each rule, as the layer would feed them, and the
memory is asked what it still knows. Recall is the cosine of its answer with what was stored (1 right, 0 unrelated),
so it does not matter that an additive rule stores at another scale. Colour says which step a rule takes, the dash
which objective it follows; bands are one standard error over trials. *Least squares* is recursive least squares, the
best linear memory of all pairs so far, and never forgets; *online ridge* is falcon-1 as appendix A writes it."""


def write_lab(
    panels: Mapping[str, Panel], cells: Sequence[Cell], settings: Settings, out: Path, made: Mapping[str, str]
) -> list[Path]:
    """Write everything into `out`; `made` says by which command, where and when. Returns the paths, pages first."""
    from fastweight.lab.pictures import draw_cells, draw_family, draw_one

    out.mkdir(parents=True, exist_ok=True)
    draw_family(panels, out / "family.png")
    draw_cells(cells, out / "pairing.png")
    for name, panel in panels.items():
        draw_one(panel, out / f"{name}.png")
    write_json(
        out / "lab.json",
        {
            "made": dict(made),
            "settings": asdict(settings),
            "panels": {name: asdict(panel) for name, panel in panels.items()},
            "cells": [asdict(cell) for cell in cells],
        },
    )
    text = page(panels, cells, settings, made, findings(out))
    write_text(out / "README.md", text)
    write_text(out / "lab.html", html_page(text, out, "What a memory remembers"))
    pictures = [out / f"{name}.png" for name in ("family", "pairing", *panels)]
    return [out / "lab.html", out / "README.md", out / "lab.json", *pictures]


def page(
    panels: Mapping[str, Panel], cells: Sequence[Cell], settings: Settings, made: Mapping[str, str], found: str = ""
) -> str:
    """The Markdown page; `found` is what a person says of it."""
    sizes = (
        f"{settings.trials} trials of {settings.tokens} pairs, keys of {settings.key_dim}, values of "
        f"{settings.value_dim}; gain {settings.gain:g} and ridge {settings.ridge:g} where they are not swept."
    )
    parts = ["# What a memory remembers", INTRODUCTION, sizes, "![The family](family.png)", found]
    for name, panel in panels.items():
        asked = (PANELS[name].__doc__ or "").strip()
        parts += [
            f"## {panel.title}",
            f"{asked} {panel.note}".strip(),
            f"![{panel.title}]({name}.png)",
            _numbers(panel),
        ]
    parts += ["## Pairing and timing", CELLS_NOTE, "![Pairing and timing](pairing.png)", _shares(cells)]
    parts.append("; ".join(f"{key}: {value}" for key, value in made.items()))
    return "\n\n".join(part for part in parts if part) + "\n"


CELLS_NOTE = """\
Tokens that walk through a fixed successor map, restarts 1 in 8; keys and values are the tokens' codes, there is no
convolution, nothing is trained. *next*: the answer is the token that comes next (this one has come before); *again*:
this token's own value, which has come before; *first*: its own value at its first coming (an unseen code lies partly
in the span of those seen, so this is not 0 before the write). Next-latent pairing answers "what follows?", same-step
pairing "what is this?"; a read after a same-step write sees its own token. A short convolution on the keys can turn
the one question into the other, so in a trained model the difference is smaller than here."""


def _numbers(panel: Panel) -> str:
    head = [panel.x_label, *(f"{x:.3g}" for x in panel.x)]
    return markdown_table(
        head, [[name, *(f"{mean:.3g}" for mean in means)] for name, (means, _) in panel.lines.items()]
    )


def _shares(cells: Sequence[Cell]) -> str:
    head = ["rule", "pairing", "timing", *(f"{question} %" for question in QUESTIONS)]
    rows = [[c.rule, c.pairing, c.timing, *(f"{100 * c.right[q]:.1f}" for q in QUESTIONS)] for c in cells]
    return markdown_table(head, rows)
