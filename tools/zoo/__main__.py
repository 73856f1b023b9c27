"""`python -m tools.zoo` tries all and prints the page `docs/zoo.md` (`make zoo` writes it).

`python -m tools.zoo WORD ...` tries those whose name, family, library or step has one of the words.
"""

from __future__ import annotations

import sys

from tools.zoo.architectures import ARCHITECTURES
from tools.zoo.attempts import attempt


def main(words: list[str]) -> int:
    """Print the page, or the outcomes of some."""
    for architecture in ARCHITECTURES:
        if words and not any(word in " ".join(map(str, architecture)) for word in words):
            continue
        outcome = attempt(architecture)
        error = "" if outcome.error is None else f"{outcome.error:.1e}"
        ratio = "" if outcome.ratio is None else f"{outcome.ratio:.1f}x"
        print(
            f"{architecture.name} ({architecture.library}, {architecture.step}): {outcome.path} {error} "
            f"f{outcome.precision} {outcome.parameters} {ratio} {len(outcome.fixes)} {outcome.seconds:.1f}s {outcome.reason}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
