"""Evaluate language models: perplexity, last words, and the tasks of lm-evaluation-harness."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from fastweight.cli.shared import RunDirs, console, eval_app, need

if TYPE_CHECKING:
    from fastweight.data import Tokenizer
    from fastweight.evaluation.perplexity import Document, Ending

Dtype = Annotated[str, typer.Option(help="Of the weights: auto (as saved), float32 or bfloat16.")]
TokenizerName = Annotated[str | None, typer.Option(help="Name or path; default: the one saved with the checkpoint.")]


@eval_app.command("ppl", epilog="Example: fastweight eval ppl runs/lm-tiny/* --data data/fineweb --out runs/report")
def eval_ppl(
    runs: RunDirs,
    data: Annotated[Path | None, typer.Option(help="Prepared data, scored as one stream.")] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="File, directory, pattern or hf:NAME; each text starts afresh. Repeatable.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="wikitext, lambada, lambada=FILE or hf:NAME.")] = None,
    split: Annotated[str, typer.Option(help="Of prepared data.")] = "validation",
    window: Annotated[
        Literal["sliding", "disjoint"], typer.Option(help="Sliding windows overlap: more context, more time.")
    ] = "disjoint",
    length: Annotated[
        int | None, typer.Option(help="Tokens of context in a window; default: the first run's training sequences.")
    ] = None,
    stride: Annotated[int | None, typer.Option(help="Step of sliding windows; default: half their length.")] = None,
    batch_size: Annotated[int, typer.Option(help="Windows at a time; the figures do not depend on it.")] = 8,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first so many documents.")] = None,
    separator: Annotated[str | None, typer.Option(help="Cuts text files into documents.")] = None,
    text_field: Annotated[str, typer.Option(help="Column that holds the text.")] = "text",
    tokenizer: TokenizerName = None,
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Directory for perplexity.json and perplexity.png.")] = None,
) -> None:
    """Perplexity by token, word and byte, bits a byte, or LAMBADA's last words, of any causal language model."""
    from fastweight.evaluation.checkpoint import load_language_model
    from fastweight.evaluation.perplexity_report import table, write_report

    if sum(map(bool, (data, text, dataset))) != 1:
        raise ValueError("--data, --text, --dataset: got none or several, expected exactly one of them")
    if stride is not None and window == "disjoint":
        raise ValueError(f"--stride: got {stride} with disjoint windows, expected --window sliding")

    def texts(tokens: "Tokenizer") -> "list[Document] | list[Ending]":
        from fastweight.evaluation import texts

        if data is not None:
            return texts.documents_of_data(data, split, tokens, limit)
        if dataset is not None:
            return texts.documents_of_dataset(dataset, tokens, limit)
        return texts.documents_of_texts(text or [], tokens, text_field=text_field, separator=separator, limit=limit)

    if out is not None:
        need("matplotlib", "the picture")
    told, results, step = console(), {}, 0
    for run, name in zip(runs, _names(runs), strict=True):
        loaded = load_language_model(run, tokenizer=tokenizer, dtype=dtype, name=name, say=told.print)
        length = loaded.length if length is None else length
        step = length if window == "disjoint" else (max(length // 2, 1) if stride is None else stride)
        results[loaded.name] = _perplexity(loaded, texts(loaded.tokenizer), length, step, batch_size, told)
    scored = str(data or dataset or " ".join(text or []))
    Console().print(table(results, f"{scored}: {window} windows of {length} tokens"))
    if out is not None:
        settings = {"scored": scored, "split": split if data else None, "limit": limit}
        settings |= {"window": window, "length": length, "stride": step, "batch_size": batch_size, "dtype": dtype}
        for file in write_report(results, settings, out):
            print(f"{file.suffix[1:]:<4} {file}")


@eval_app.command("harness", epilog="Example: fastweight eval harness runs/falcon-1.3 --num-fewshot 1")
def eval_harness(
    runs: RunDirs,
    tasks: Annotated[str | None, typer.Option(help="Names, by commas; default: the paper's eight.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Solved examples in front of each question; default: as each task says.")
    ] = None,
    include: Annotated[Path | None, typer.Option(help="Directory with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Score only the first so many samples of each task.")] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Longest context; default: the training sequences'.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    tokenizer: TokenizerName = None,
    dtype: Dtype = "auto",
    out: Annotated[Path | None, typer.Option(help="Directory for harness.json.")] = None,
) -> None:
    """Tasks of lm-evaluation-harness, and the average accuracy; needs the `eval` extra."""
    need("lm_eval", "the harness", extra="eval")
    from fastweight.evaluation import harness
    from fastweight.evaluation.checkpoint import load_language_model
    from fastweight.files import write_json

    names = list(harness.PAPER) if tasks is None else [name.strip() for name in tasks.split(",")]
    told, results = console(), {}
    for run, name in zip(runs, _names(runs), strict=True):
        loaded = load_language_model(run, tokenizer=tokenizer, dtype=dtype, name=name, say=told.print)
        results[loaded.name] = harness.evaluate(
            loaded,
            names,
            num_fewshot=num_fewshot,
            include=include,
            limit=limit,
            length=length,
            batch_size=batch_size,
            say=told.print,
        )
    Console().print(harness.table(results))
    if out is not None:
        settings = {"num_fewshot": num_fewshot, "limit": limit, "length": length, "dtype": dtype}
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "harness.json", harness.to_json(results, settings))
        print(f"json {out / 'harness.json'}")


def _names(runs: list[Path]) -> list[str]:
    """The directories' own names where they tell the runs apart, else the paths."""
    short = [run.resolve().name for run in runs]
    return short if len(set(short)) == len(runs) else list(map(str, runs))


def _perplexity(loaded: Any, texts: Any, length: int, stride: int, batch_size: int, told: Console) -> Any:
    """Score documents or endings, with a bar."""
    from fastweight.evaluation.perplexity import Ending, last_word, perplexity

    with _bar(told, loaded.name) as progress:
        options = {"length": length, "batch_size": batch_size, "progress": progress}
        if texts and isinstance(texts[0], Ending):
            return last_word(loaded.model, texts, **options)
        end_of_text = loaded.tokenizer.end_of_text
        return perplexity(loaded.model, texts, end_of_text=end_of_text, stride=stride, **options)


@contextmanager
def _bar(told: Console, name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens, rate and time left; gives the function that moves it."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(name), BarColumn(), TextColumn("{task.completed:,} of {task.total:,} tokens"))
    rate = TextColumn("{task.fields[rate]:,.0f} tokens/s")
    start = time.monotonic()
    with Progress(*columns, rate, TimeRemainingColumn(), console=told, transient=True) as bar:
        task = bar.add_task("", total=0, rate=0.0)

        def move(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, rate=done / max(time.monotonic() - start, 1e-3))

        yield move
