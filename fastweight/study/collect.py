"""A directory of results into one page: the paper's figures beside ours, then every experiment, then what is open.

    results/NAME/README.md (or one other .md)     becomes a section, pictures included
    results/NAME/study.json                       of a study on addition stands beside the paper's Table 3, one of
                                                  language models beside its perplexities; and claims.py reads it
    results/open.md                               open points, written by hand; absent figures are added to them

A difference is marked where it is larger than twice the spread over our seeds. Trap: our addition studies are
smaller than the paper's models, so their table compares orders, not levels, and says so.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from fastweight.evaluation import paper
from fastweight.evaluation.outcomes import Outcome, outcome_from
from fastweight.evaluation.page import html_page, markdown_table
from fastweight.evaluation.text_outcomes import TextOutcome
from fastweight.files import write_text
from fastweight.study.claims import Read, Trained, is_addition, sentences
from fastweight.study.figures import spread
from fastweight.study.plan import Study
from fastweight.study.report import by_arm, kinds

PICTURE = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#|/)([^)\s]+)(\))")
HEADING = re.compile(r"^(#+) (.*)", flags=re.MULTILINE)
BLOCK = re.compile(r"^```.*?^```", flags=re.MULTILINE | re.DOTALL)


def collect(results: Path) -> str:
    """The page as Markdown, with links relative to `results`. ValueError when there is nothing to collect."""
    pages = {folder.name: text for folder in _folders(results) if (text := _text_of(folder)) is not None}
    if not pages:
        raise ValueError(f"results: got {results}, expected a directory with results (NAME/README.md)")
    titles = _titles(pages)
    studies, texts = _studies(results)
    parts = ["# Results", INTRODUCTION, *(f"* [{title}](#{name})" for name, title in titles.items())]
    parts = ["\n\n".join(parts[:2]), "\n".join(parts[2:]), "## Beside the paper", *_beside(studies, texts)]
    claims = sentences(studies, texts)
    parts += [CLAIMS, "\n".join(claims)] if claims else []
    parts += [_section(text, name, titles[name]) for name, text in pages.items()]
    parts += ["## Open", _open(results, studies)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


INTRODUCTION = """\
Everything that was measured, on one page; each section says by which command, where and at which commit. The paper's
own figures come first, with ours where there are any, and what holds here of its claims."""
CLAIMS = """\
**Claims**, computed from the outcomes. One arm is ahead of another where the mean difference, seed by seed, is larger
than the standard deviation over seeds of both, and than two standard errors of a test of so few problems; ± is the
standard error of a difference. What holds does so for our models, tasks and sizes, not for the paper's."""


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


def _titles(pages: Mapping[str, str]) -> dict[str, str]:
    """The first heading of every page; the folder's name beside it where others are called the same."""
    found = {name: first[2] if (first := HEADING.search(text)) else name for name, text in pages.items()}
    count = Counter(found.values())
    return {name: t if count[t] == 1 or t == name else f"{t} ({name})" for name, t in found.items()}


def _section(text: str, folder: str, title: str) -> str:
    """A page as a section of another: headings one deeper, links and pictures from the directory above."""
    text = HEADING.sub(lambda found: f"{found[1]} {title}", text, count=1)
    blocks = BLOCK.findall(text)
    text = BLOCK.sub("\0", text)
    text = PICTURE.sub(lambda found: f"{found[1]}{folder}/{found[2]}{found[3]}", HEADING.sub(r"#\1 \2", text))
    for block in blocks:
        text = text.replace("\0", block, 1)
    return f'<a id="{folder}"></a>\n\n{text}'


def _studies(results: Path) -> tuple[list[Trained], list[Read]]:
    """All studies of drawn problems, and those of language models."""
    drawn, texts = [], []
    for file in sorted(results.glob("*/study.json")):
        told = json.loads(file.read_text(encoding="utf-8"))
        study, outcomes = Study(**told["study"]), [outcome_from(raw) for raw in told["outcomes"]]
        of_text, others = kinds(outcomes)
        if of_text:
            texts.append(Read(file.parent.name, study, by_arm(study, of_text)))
        else:
            drawn.append(Trained(file.parent.name, study, by_arm(study, others)))
    return drawn, texts


def _beside(studies: Sequence[Trained], texts: Sequence[Read]) -> list[str]:
    """The paper's tables, each once for every study of ours that has its models."""
    parts = [ADDITION]
    for one in [one for one in studies if is_addition(one)] or [None]:
        groups = {} if one is None else one.groups
        names = [*paper.ADDITION, *(arm for arm in groups if arm not in paper.ADDITION)]
        rows = [_addition_row(name, groups.get(name, [])) for name in names]
        parts += [*([] if one is None else [_where(one.folder, groups)]), markdown_table(ADDITION_HEAD, rows)]
    parts.append(LANGUAGE)
    for one in [one for one in texts if any(arm in paper.PERPLEXITY for arm in one.groups)] or [None]:
        ours = {} if one is None else one.groups
        names = [*paper.PERPLEXITY, *(arm for arm in ours if arm not in paper.PERPLEXITY)]
        rows = [_language_row(name, ours.get(name, [])) for name in names]
        parts += [*([] if one is None else [_where(one.folder, ours)]), markdown_table(LANGUAGE_HEAD, rows)]
    return parts


ADDITION = """\
**Addition**, % of whole sums right, teacher-forced unless generated (paper: 124M, one seed). "Longer" is longer than in
training; "digits" counts theirs, since the paper does not say which of the two it counts. * marks differences of its
mean from our whole sums above twice our spread over seeds; levels of smaller models need not agree."""
ADDITION_HEAD = ["model", "paper: trained", "33 to 48", "at 33", "at 48", "here: seeds", "trained", "longer sums"]
ADDITION_HEAD += ["shortest of them", "longest", "longer, generated freely", "longer, digits", "difference"]
LANGUAGE = """\
**Language**, perplexities and zero-shot average at 124M to 130M parameters on 49.2B tokens of FineWeb-Edu. Ours are of
smaller models on other, far fewer tokens: their order may be compared, their levels may not."""
LANGUAGE_HEAD = ["model", "paper: WikiText", "LAMBADA", "FineWeb-Edu", "zero-shot average"]
LANGUAGE_HEAD += ["here: seeds", "validation", "WikiText-2", "LAMBADA"]


def _where(folder: str, groups: Mapping[str, Sequence[Outcome]] | Mapping[str, Sequence[TextOutcome]]) -> str:
    sizes = sorted({o.num_parameters for group in groups.values() for o in group})
    told = " to ".join(f"{size / 1e6:.1f}M" for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"Here: [{folder}](#{folder}), {told} parameters."


def _language_row(name: str, ours: Sequence[TextOutcome]) -> list[str]:
    row = [name, *map(_figure, (*paper.PERPLEXITY.get(name, (None,) * 3), paper.ZERO_SHOT.get(name)))]
    if not ours:
        return [*row, "not run", "-", "-", "-"]
    told = (("validation", "perplexity"), ("wikitext2", "word_perplexity"), ("lambada", "perplexity"))
    return [*row, str(len(ours)), *(spread([o.scores[t][f] for o in ours if t in o.scores], 1) for t, f in told)]


def _addition_row(name: str, ours: Sequence[Outcome]) -> list[str]:
    row = paper.ADDITION.get(name)
    told = [name, *map(_figure, row or (None,) * 4)]
    if not ours:
        return [*told, "not run", *["-"] * 7]
    first = min((i for i, size in enumerate(ours[0].sizes) if size > ours[0].trained[1]), default=None)
    cells = [_means(ours, "exact", False), _means(ours, "exact", True)]
    cells += [[o.shares["exact"][at] for o in ours] if at is not None else [] for at in (first, -1)]
    cells.append(_means([o for o in ours if "generated" in o.shares], "generated", True))
    cells.append(_means(ours, "token", True))
    told += [str(len(ours)), *(spread([100 * value for value in values], 1) for values in cells)]
    longer = [100 * value for value in cells[1]]
    if row is None or not longer:
        return [*told, "-"]
    off = mean(longer) - row.longer
    mark = "*" if len(longer) > 1 and abs(off) > 2 * stdev(longer) else ""
    return [*told, f"{off:+.1f}{mark}"]


def _means(ours: Sequence[Outcome], measure: str, longer: bool) -> list[float]:
    return [value for o in ours if (value := o.mean(measure, longer)) is not None]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _open(results: Path, studies: Sequence[Trained]) -> str:
    written = results / "open.md"
    parts = [written.read_text(encoding="utf-8").strip()] if written.is_file() else []
    known = {arm for one in studies if is_addition(one) for arm in one.groups}
    missing = [name for name in paper.ADDITION if name not in known]
    if missing:
        parts.append(f"* Table 3 (addition) has no figure of ours for {', '.join(missing)}.")
    parts.append(
        "* The paper's perplexities and zero-shot averages (49.2B tokens) have no figure of ours at that size."
    )
    return "\n".join(parts)
