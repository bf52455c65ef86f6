"""Data: text from files or the hub into token shards for training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fastweight.cli.shared import app, console
from fastweight.processes import num_cores

if TYPE_CHECKING:
    from fastweight.data.prepare import Status


@app.command(
    epilog="Example: fastweight prepare hf:HuggingFaceFW/fineweb-edu:sample-10BT --out data/fineweb --workers 8"
)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="Files (txt, md, jsonl, parquet; gz, bz2, xz), directories, patterns, or hf:NAME[:CONFIG[:SPLIT]]."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write; begun before, it is gone on with.")],
    tokenizer: Annotated[
        str, typer.Option(help="Name on the hub, tokenizer.json, or a directory with one or with GPT-2's two files.")
    ] = "gpt2",
    validation_fraction: Annotated[
        float, typer.Option(help="Part of the documents for validation, chosen by a hash of their text.")
    ] = 0.005,
    validation_documents: Annotated[
        int | None, typer.Option(help="Keep at most so many of these; the others are left out.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after the document that reaches it.")] = None,
    text_field: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    separator: Annotated[
        str | None, typer.Option(help="Cuts text files into documents; otherwise a file is one document.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that encode; default: one for each core. The result is the same.")
    ] = None,
) -> None:
    """Turn text into token shards with a validation split; started again, it goes on where it was killed."""
    from fastweight.data.prepare import PrepareOptions
    from fastweight.data.prepare import prepare as write_shards

    options = PrepareOptions(
        validation_fraction=validation_fraction,
        validation_documents=validation_documents,
        max_tokens=max_tokens,
        text_field=text_field,
        separator=separator,
    )
    told = console()
    try:
        with _Bar(told, max_tokens) as bar:
            meta = write_shards(
                sources,
                out,
                tokenizer=tokenizer,
                options=options,
                workers=num_cores() if workers is None else workers,
                say=told.print,
                progress=bar.update,
            )
    except KeyboardInterrupt:
        told.print("Stopped. The same command goes on.")
        raise typer.Exit(130) from None
    table = Table("split", "tokens", "documents", "words", "MB of text", "bytes a token", box=None)
    for name, split in meta["splits"].items():
        counts = [f"{split[key]:,}" for key in ("tokens", "documents", "words")]
        table.add_row(name, *counts, f"{split['bytes'] / 1e6:,.1f}", f"{split['bytes'] / max(split['tokens'], 1):.3f}")
    Console().print(table)
    print(out)


class _Bar:
    """Tokens, rates and time left, while documents are encoded."""

    def __init__(self, told: Console, max_tokens: int | None) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.max_tokens, self.first = max_tokens, None
        text = TextColumn(
            "{task.fields[tokens]:,} tokens, {task.fields[rate]:,.0f} tokens/s, {task.fields[mb]:.1f} MB/s"
        )
        self.bar = Progress(
            TextColumn("preparing"),
            BarColumn(),
            text,
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=told,
        )
        self.task = self.bar.add_task("", total=None, tokens=0, rate=0.0, mb=0.0)

    def __enter__(self) -> "_Bar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def update(self, status: "Status") -> None:
        """Show a status; rates count from the first one, which a run that goes on begins with."""
        import time

        now = time.monotonic()
        self.first = self.first or (now, status)
        seconds = max(now - self.first[0], 1e-3)
        rates = [(a - b) / seconds for a, b in zip(status[:2], self.first[1][:2], strict=True)]
        done, total = (status.tokens, self.max_tokens) if self.max_tokens else (status.read, status.size)
        self.bar.update(self.task, completed=done, total=total, tokens=status.tokens, rate=rates[0], mb=rates[1] / 1e6)
