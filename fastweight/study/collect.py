"""A directory of results into one page: the paper's figures beside ours, then every experiment, then what is open.

    results/NAME/README.md (or one other .md)     becomes a section, pictures included
    results/NAME/study.json                       of a study on addition stands beside the paper's Table 3, one of
                                                  language models (recipe lm-...) beside its perplexities
    results/open.md                               open points, written by hand; absent figures are added to them

A difference is marked where it is larger than twice the spread over our seeds. Trap: our addition studies are
smaller than the paper's models, so their table compares orders, not levels, and says so.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from fastweight.evaluation import paper
from fastweight.evaluation.outcomes import Outcome, outcome_from
from fastweight.evaluation.page import html_page, markdown_table
from fastweight.evaluation.text_outcomes import TextOutcome
from fastweight.files import write_text
from fastweight.study.figures import spread

PICTURE = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|/)([^)\s]+)(\))")
HEADING = re.compile(r"^(#+) ", flags=re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def collect(results: Path) -> str:
    """The page as Markdown, with links relative to `results`. ValueError when there is nothing to collect."""
    sections = [(folder.name, text) for folder in _folders(results) if (text := _text_of(folder)) is not None]
    if not sections:
        raise ValueError(f"results: got {results}, expected a directory with results (NAME/README.md)")
    additions, texts = _addition_outcomes(results), _text_outcomes(results)
    parts = ["# Results", INTRODUCTION, "## Beside the paper", *_beside(additions, texts)]
    parts += [_shifted(text, name) for name, text in sections]
    parts += ["## Open", _open(results, additions)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


INTRODUCTION = """\
Everything that was measured, on one page; each section says by which command, where and at which commit. The paper's
own figures come first, with ours where there are any."""


def write_collection(results: Path, out: Path) -> list[Path]:
    """Write report.md and report.html; returns their paths. Links of the Markdown page hold when `out` is `results`."""
    text = collect(results)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "report.md", text)
    write_text(out / "report.html", html_page(text, results, "fastweight: results"))
    return [out / "report.md", out / "report.html"]


def _folders(results: Path) -> list[Path]:
    return sorted(path for path in results.iterdir() if path.is_dir()) if results.is_dir() else []


def _text_of(folder: Path) -> str | None:
    """The page of an experiment: its README, or its only Markdown file."""
    pages = sorted(folder.glob("*.md"))
    named = [page for page in pages if page.name == "README.md"] or [p for p in pages if p.name != "findings.md"][:1]
    return named[0].read_text(encoding="utf-8") if named else None


def _shifted(text: str, folder: str) -> str:
    """A page as a section of another: headings one deeper, links and pictures from the directory above."""
    blocks = BLOCK.findall(text)
    text = BLOCK.sub("\0", text)
    text = PICTURE.sub(lambda found: f"{found[1]}{folder}/{found[2]}{found[3]}", HEADING.sub(r"#\1 ", text))
    for block in blocks:
        text = text.replace("\0", block, 1)
    return text


def _outcomes(results: Path, recipes: str) -> dict[str, list[Outcome | TextOutcome]]:
    """Outcomes of all studies whose recipe begins so, by arm; arms may be models of the paper."""
    found: dict[str, list[Outcome | TextOutcome]] = {}
    for file in sorted(results.glob("*/study.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        for raw in told["outcomes"] if told["study"]["recipe"].startswith(recipes) else ():
            outcome = outcome_from(raw)
            found.setdefault(outcome.arm, []).append(outcome)
    return found


def _addition_outcomes(results: Path) -> dict[str, list[Outcome]]:
    found = _outcomes(results, "addition")
    return {arm: [o for o in group if isinstance(o, Outcome)] for arm, group in found.items()}


def _text_outcomes(results: Path) -> dict[str, list[TextOutcome]]:
    found = _outcomes(results, "lm-")
    return {arm: [o for o in group if isinstance(o, TextOutcome)] for arm, group in found.items()}


def _beside(additions: dict[str, list[Outcome]], texts: dict[str, list[TextOutcome]]) -> list[str]:
    addition = markdown_table(
        ["model", "paper: trained", "33 to 48", "at 33", "at 48", "here: seeds", "longer sums", "difference"],
        [_addition_row(name, additions.get(name, [])) for name in paper.ADDITION],
    )
    head = ["model", "paper: WikiText", "LAMBADA", "FineWeb-Edu", "zero-shot average"]
    language = markdown_table(
        [*head, "here: seeds", "validation", "WikiText-2", "LAMBADA"],
        [_language_row(name, texts.get(name, [])) for name in paper.PERPLEXITY],
    )
    return [
        "**Addition**, % of whole sums right, teacher-forced, longer than in training (paper: 124M, one seed). * marks "
        "differences above twice our spread over seeds; levels of smaller models need not agree.",
        addition,
        "**Language**, perplexities and zero-shot average at 124M to 130M parameters on 49.2B tokens of FineWeb-Edu. "
        "Ours are of smaller models on other, far fewer tokens: their order may be compared, their levels may not.",
        language,
    ]


def _language_row(name: str, ours: Sequence[TextOutcome]) -> list[str]:
    row = [name, *map(_figure, (*paper.PERPLEXITY[name], paper.ZERO_SHOT.get(name)))]
    if not ours:
        return [*row, "not run", "-", "-", "-"]
    told = (("validation", "perplexity"), ("wikitext2", "word_perplexity"), ("lambada", "perplexity"))
    return [*row, str(len(ours)), *(spread([o.scores[t][f] for o in ours if t in o.scores], 1) for t, f in told)]


def _addition_row(name: str, ours: Sequence[Outcome]) -> list[str]:
    row = paper.ADDITION[name]
    told = [name, *(_figure(value) for value in row)]
    values = [100 * value for o in ours if (value := o.mean("exact", longer=True)) is not None]
    if not values:
        return [*told, "not run", "-", "-"]
    off = mean(values) - row.longer
    mark = "*" if len(values) > 1 and abs(off) > 2 * stdev(values) else ""
    return [*told, str(len(values)), spread(values, 1), f"{off:+.1f}{mark}"]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _open(results: Path, outcomes: dict[str, list[Outcome]]) -> str:
    written = results / "open.md"
    parts = [written.read_text(encoding="utf-8").strip()] if written.is_file() else []
    missing = [name for name in paper.ADDITION if name not in outcomes]
    if missing:
        parts.append(f"* Table 3 (addition) has no figure of ours for {', '.join(missing)}.")
    parts.append(
        "* The paper's perplexities and zero-shot averages (49.2B tokens) have no figure of ours at that size."
    )
    return "\n".join(parts)
