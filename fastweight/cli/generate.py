"""Generate: text from a language model as it comes, or answers of an addition model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fastweight.cli.shared import app, console


@app.command(epilog='Example: fastweight generate runs/lm-tiny/falcon-1 "Once upon a time" --max-new-tokens 60')
def generate(
    run: Annotated[Path, typer.Argument(help="Run directory or checkpoint.")],
    prompts: Annotated[
        list[str], typer.Argument(help='Beginnings of texts, or sums such as "12+34=" for an addition model.')
    ],
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Stop here, if the text has no end before.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token; default 1.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens of this share; default 1.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; default 0.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Name or path; default: the one saved with the checkpoint.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="As cpu or cuda:1; default: the GPU if there is one.")] = None,
) -> None:
    """Go on from prompts: text streams to stdout, tokens/s and the size of the state follow on stderr.

    An addition model answers sums (two numbers of the same length; digits come out least significant first), and the
    answers are checked.
    """
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    given = {name: value for name, value in sampling.items() if value is not None}
    if _task_of(run) == "addition":
        if given or tokenizer or device:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in given) or "--tokenizer or --device"
            raise ValueError(f"{named}: got one for an addition model, expected sums only: its answers are greedy")
        _answer_sums(run, prompts)
    else:
        _stream_text(run, prompts, given, tokenizer, device)


def _task_of(path: Path) -> str:
    """What the model was trained for, by the record of its run; text where there is none."""
    from fastweight.recipes.rundir import RUN_RECORD

    for directory in (path, path.parent):
        if (directory / RUN_RECORD).is_file():
            run: dict[str, Any] = json.loads((directory / RUN_RECORD).read_text(encoding="utf-8"))["run"]
            return run["task"].get("kind", "addition")
    return "text"


def _answer_sums(path: Path, prompts: list[str]) -> None:
    from fastweight.evaluation.addition import answer, find_checkpoint
    from fastweight.evaluation.checkpoint import load_model
    from fastweight.recipes import AdditionTask

    checkpoint, run = find_checkpoint(path, console().print)
    model = load_model(checkpoint)
    for prompt in prompts:
        given, right = answer(model, prompt, least_first=isinstance(run.task, AdditionTask) and run.task.least_first)
        print(f"{prompt}{given}  ({'right' if given == right else f'wrong, {right} is right'})")


def _stream_text(
    path: Path, prompts: list[str], sampling: dict[str, Any], tokenizer: str | None, device: str | None
) -> None:
    from fastweight.evaluation.checkpoint import load_language_model
    from fastweight.evaluation.sampling import Sampling, continue_text

    told, how = console(), Sampling(**sampling)
    loaded = load_language_model(path, tokenizer=tokenizer, say=told.print)
    if device is not None:
        try:
            loaded.model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device: got {device}, expected one of this machine ({error})") from None
    for prompt in prompts:
        print(prompt, end="", flush=True)
        pace = continue_text(loaded, prompt, how, lambda text: print(text, end="", flush=True))
        print(flush=True)
        rate = (pace.new_tokens - 1) / pace.seconds if pace.seconds > 0 else 0.0
        state = "" if pace.state_bytes is None else f", state {pace.state_bytes:,} bytes"
        told.print(
            f"{pace.new_tokens} tokens, {rate:.1f} tokens/s after {pace.prompt_seconds:.2f} s for {pace.prompt_tokens} "
            f"of prompt{state}",
            style="dim",
            highlight=False,
        )
