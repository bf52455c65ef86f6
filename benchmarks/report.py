"""Rows of results -> a table on the terminal, and JSON, Markdown and a picture in a folder.

The report says where the numbers come from: processor, threads, versions, commit, load of the machine, date, command.
"""

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.gate import Verdict

RACE_COLUMNS = ("what", "mode", "median ms", "min", "max", "ratio", "of minima", "target", "verdict")
SCALING_COLUMNS = ("rule", "T", "time us", "bytes kept", "peak bytes")
GROWTH_COLUMNS = ("rule", "time", "bytes kept", "peak bytes", "verdict")
WORDS = {"what", "mode", "target", "verdict", "rule"}
STYLES = {"pass": "green", "miss": "yellow", "red gate": "red"}
NOISY = 1.5  # a median this many times its minimum
Cells = tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One contestant in one mode of one race; times in milliseconds, ratio against the race's baseline."""

    race: str
    shape: str
    contestant: str
    mode: str
    kind: str
    target: str
    verdict: str  # "pass", "miss", "red gate" or "" (no target)
    median_ms: float | None = None
    min_ms: float | None = None
    max_ms: float | None = None
    ratio: float | None = None
    ratio_of_minima: float | None = None

    def cells(self) -> Cells:
        """As text, in the order of RACE_COLUMNS."""
        numbers = (self.median_ms, self.min_ms, self.max_ms, self.ratio, self.ratio_of_minima)
        digits = (1, 1, 1, 2, 2)
        text = ("-" if value is None else f"{value:.{n}f}" for value, n in zip(numbers, digits, strict=True))
        return (self.contestant, self.mode, *text, self.target, self.verdict)


@dataclass(frozen=True)
class ScalingRow:
    """One rule at one length, forward + backward; bytes and microseconds per token and head."""

    rule: str
    tokens: int
    time_us: float
    saved_bytes: float
    peak_bytes: float

    def cells(self) -> Cells:
        """As text, in the order of SCALING_COLUMNS."""
        return (self.rule, str(self.tokens), f"{self.time_us:.2f}", f"{self.saved_bytes:.0f}", f"{self.peak_bytes:.0f}")


@dataclass(frozen=True)
class Growth:
    """Exponents p of total ~ T**p over all lengths of one rule; the verdict is on time and bytes kept."""

    rule: str
    time: float
    saved: float
    peak: float
    verdict: str

    def cells(self) -> Cells:
        """As text, in the order of GROWTH_COLUMNS."""
        return (self.rule, f"{self.time:.2f}", f"{self.saved:.2f}", f"{self.peak:.2f}", self.verdict)


@dataclass
class Report:
    """Everything one run found."""

    environment: dict[str, Any]
    gates: list[Verdict] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    scaling: list[ScalingRow] = field(default_factory=list)
    growths: list[Growth] = field(default_factory=list)

    def races(self) -> dict[str, list[Row]]:
        """Rows by race and shape, in order."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(f"{row.race}, (B, T, H, D) = {row.shape}", []).append(row)
        return groups

    def tables(self) -> list[tuple[str, Cells, list[Cells]]]:
        """Title, header and lines of every table."""
        tables = []
        for title, group in self.races().items():
            baseline = group[0].contestant
            meaning = f"speed-up over {baseline}" if group[0].kind == "speed-up" else f"time relative to {baseline}"
            tables.append((f"{title}: ratio = {meaning}", RACE_COLUMNS, [row.cells() for row in group]))
        if self.scaling:
            title = "Forward + backward per token and head as T grows"
            tables.append((title, SCALING_COLUMNS, [row.cells() for row in self.scaling]))
            title = "Exponent p of total ~ T^p (1 is linear)"
            tables.append((title, GROWTH_COLUMNS, [growth.cells() for growth in self.growths]))
        return tables

    def show(self, console: Console) -> None:
        """The tables on the terminal, then one line that counts the verdicts."""
        for title, header, lines in self.tables():
            table = Table(title=title, title_justify="left")
            for column in header:
                table.add_column(column, justify="left" if column in WORDS else "right", no_wrap=True)
            for cells in lines:
                table.add_row(*cells, style=STYLES.get(cells[-1]))
            console.print(table)
        console.print(self.noise() + self.summary(), soft_wrap=True)

    def summary(self) -> str:
        """How many targets were met, and which were not."""
        judged = [(f"{row.contestant} {row.mode} {row.shape}", row.verdict) for row in self.rows if row.verdict]
        judged += [(f"{growth.rule} growth", growth.verdict) for growth in self.growths]
        failed = [f"{name} ({verdict})" for name, verdict in judged if verdict != "pass"]
        return f"{len(judged) - len(failed)} of {len(judged)} targets met" + (
            ": not " + "; ".join(failed) if failed else ""
        )

    def noise(self) -> str:
        """A warning when medians lie far above minima: other programs were running."""
        spread = max((row.median_ms / row.min_ms for row in self.rows if row.median_ms and row.min_ms), default=1.0)
        if spread <= NOISY:
            return ""
        return f"The machine was busy (a median is {spread:.1f} times its minimum): repeat when it is quiet. "

    def markdown(self) -> str:
        """The whole report as Markdown."""
        where = self.environment
        text = ["# CPU benchmark", "", f"    {where['command']}", ""]
        text += [f"* {name}: {value}" for name, value in where.items() if name != "command"]
        text += ["", f"{self.noise()}{self.summary()}. Times are medians over interleaved rounds.", ""]
        text += ["![Measured against the targets](benchmark.png)"]
        for title, header, lines in self.tables():
            rule = tuple("---" if column in WORDS else "---:" for column in header)
            text += ["", f"## {title}", "", *("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))]
        text += [
            "",
            "## The gate",
            "",
            "Tensor with the largest relative error, checked before any time was taken:",
            "",
        ]
        lines = dict.fromkeys(f"* {'ok' if gate.green else 'RED'}: {gate}" for gate in self.gates)
        return "\n".join([*text, *lines, ""])

    def save(self, folder: Path) -> None:
        """Write benchmark.json, benchmark.md and benchmark.png into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "benchmark.json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        (folder / "benchmark.md").write_text(self.markdown())
        from benchmarks.picture import draw

        draw(folder / "benchmark.png", self)


def processor() -> str:
    """Model name of the CPU."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        root = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def environment(command: str) -> dict[str, Any]:
    """Where and with what the numbers were taken."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/fastweight", ":/benchmarks")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "commit": (_git("rev-parse", "--short", "HEAD") or "unknown") + (" with local changes" if changed else ""),
        "cpu": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "load": round(os.getloadavg()[0], 2),
    }
