"""Tries all networks and prints the page `docs/zoo.md` (`make zoo` writes it).

`python -m tools.zoo WORD ...` tries those with one of the words in their name, family, library or step, and prints a
line for each.
"""

from __future__ import annotations

import sys
import warnings

from tools.zoo.architectures import ARCHITECTURES, Architecture
from tools.zoo.attempts import attempt, import_libraries
from tools.zoo.check import Outcome
from tools.zoo.page import page


def main(words: list[str]) -> int:
    """Print the page, or a line for each of some networks."""
    warnings.simplefilter("ignore")
    import_libraries()
    results = []
    for number, architecture in enumerate(ARCHITECTURES, start=1):
        if words and not any(word in " ".join(map(str, architecture)) for word in words):
            continue
        outcome = attempt(architecture)
        results.append((architecture, outcome))
        print(f"{number}/{len(ARCHITECTURES)} {_line(architecture, outcome)}", file=sys.stderr, flush=True)
    if not words:
        print(page(results))
    return 0


def _line(architecture: Architecture, outcome: Outcome) -> str:
    error = "" if outcome.error is None else f" {outcome.error:.1e}"
    return f"{architecture.name} ({architecture.library}, {architecture.step}): {outcome.path}{error} {outcome.reason}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
