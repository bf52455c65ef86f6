"""The command line: typed arguments into calls of training, evaluation and generation.

Each module registers its commands on the applications in `shared`. A ValueError is the user's mistake and ends as one
readable line with exit code 2, and so does a file that cannot be read or written; anything else keeps its traceback.
"""

import sys

from rich.console import Console

from fastweight.cli import addition, data, evaluate, generate, lab, machine, report, study, train
from fastweight.cli.shared import app

__all__ = ["addition", "app", "data", "evaluate", "generate", "lab", "machine", "main", "report", "study", "train"]


def main() -> None:
    """Entry point of `fastweight`."""
    try:
        app()
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:
            raise
        Console(stderr=True).print(f"Error: {error}", style="red", markup=False, highlight=False)
        sys.exit(2)


if __name__ == "__main__":
    main()
