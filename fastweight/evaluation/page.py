"""Markdown into one HTML file that opens from disk: tables, and pictures inside as base64.

Trap: a picture is found beside the Markdown file, and a missing one is an error, not a hole in the page.
"""

import base64
import html
import re
from pathlib import Path

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 0.92em; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid #ddd; text-align: left; white-space: nowrap; }
th { border-bottom: 2px solid #888; }
img { max-width: 100%; height: auto; }
code { background: #f3f3f3; padding: 0.1em 0.3em; border-radius: 3px; }
pre code { display: block; padding: 0.8rem; overflow-x: auto; }
"""
IMAGE = re.compile(r'<img src="([^"]+)"')


def html_page(markdown: str, folder: Path, title: str) -> str:
    """The page; pictures are read from `folder`. Raises ValueError for a picture that is not there."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark").enable("table").render(markdown)
    body = IMAGE.sub(lambda found: f'<img src="{_inside(folder / html.unescape(found[1]))}"', body)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}</body></html>\n'


def _inside(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"picture: got {path}, which is not there, expected a PNG beside the page")
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def findings(folder: Path) -> str:
    """What a person wrote about the results of a folder (findings.md), kept when they are made anew; else nothing."""
    written = folder / "findings.md"
    return written.read_text(encoding="utf-8").strip() if written.is_file() else ""


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; the first column is text, the others are right-aligned."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
