"""`python -m tools.zoo` trains all networks and keeps their outcomes (`make zoo` then writes docs/zoo.md from them).

`python -m tools.zoo WORD ...` tries those with a word in their name, family, library or step, and keeps nothing.
"""

from __future__ import annotations

import sys

from tools.zoo.architectures import ARCHITECTURES
from tools.zoo.attempts import try_all
from tools.zoo.page import keep

if __name__ == "__main__":
    words = sys.argv[1:]
    if words:
        try_all(one for one in ARCHITECTURES if any(word in " ".join(map(str, one)) for word in words))
    else:
        keep(try_all(ARCHITECTURES))
