"""`python -m tools.zoo WORD ...` tries the networks with one of the words in their name, family, library or step.

It prints a line for each; `make zoo` tries all of them and writes docs/zoo.md.
"""

from __future__ import annotations

import sys

from tools.zoo.architectures import ARCHITECTURES
from tools.zoo.attempts import try_all

if __name__ == "__main__":
    words = sys.argv[1:]
    if not words:
        sys.exit("which networks? Name a word of their name, family, library or step, such as Bert.")
    try_all(one for one in ARCHITECTURES if any(word in " ".join(map(str, one)) for word in words))
