"""`python -m tools.golden.part NAMES FOLDER`: one process that trains golden runs, or one of two by `torchrun`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tools.golden.runs import run
from tools.golden.scenarios import Scenario
from tools.trainers import quiet


def main(names: Path, folder: Path) -> None:
    """Train the scenarios whose names are in a file, and write what they left to `FOLDER/outcomes.json`."""
    quiet()
    chosen = [Scenario.named(name) for name in json.loads(names.read_text(encoding="utf-8"))]
    # First those that are killed in forks of this process: it has trained nothing yet.
    order = sorted(range(len(chosen)), key=lambda place: chosen[place].end != "sigkill")
    outcomes = {}
    for place in order:
        outcomes[chosen[place].name] = run(chosen[place], folder / str(place)).to_dict()
    if os.environ.get("RANK", "0") == "0":
        in_order = {scenario.name: outcomes[scenario.name] for scenario in chosen}
        (folder / "outcomes.json").write_text(json.dumps(in_order), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
