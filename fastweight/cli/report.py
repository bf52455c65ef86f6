"""Report: all results on one page, beside the paper's figures."""

from pathlib import Path
from typing import Annotated

import typer

from fastweight.cli.shared import app


@app.command(epilog="Example: fastweight report results --out runs/report")
def report(
    results: Annotated[Path, typer.Argument(help="Directory with one folder for each experiment.")] = Path("results"),
    out: Annotated[Path | None, typer.Option(help="Where report.md and report.html go; default: the same.")] = None,
) -> None:
    """Collect results into one page (Markdown, and HTML that opens from disk), with the paper's figures beside ours."""
    from fastweight.study.collect import write_collection

    for file in write_collection(results, out or results):
        print(f"{file.suffix[1:]:<4} {file}")
