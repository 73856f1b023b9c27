"""Compares the golden runs of this source with the committed values, with one another and with the revision before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.golden import base
from tools.golden.launch import Outcomes, train, with_twins
from tools.golden.ledgers import facts_of, write_missing
from tools.golden.numbers import numbers, unraised, verdict
from tools.golden.runs import kernels_are_there, quiet
from tools.golden.scenarios import Scenario, scenarios
from tools.golden.values import lines_of, same, values_of, wrong_twins, wrong_values, wrong_weights

FOLDER = base.ROOT / "tests" / "golden"
_RAISE = (
    "weights changed while RANDOM_NUMBERS did not: sums of seeded runs are others under the same noise. If that is "
    "meant, raise RANDOM_NUMBERS in privacy/randomness.py and run `python -m tools.golden write`."
)
Say = Callable[[str], object]


def read(name: str) -> dict[str, Any]:
    """Committed values."""
    values: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return values


def problems(revision: str | None = None, say: Say = print) -> Iterator[str]:
    """Train all golden runs, and say what differs.

    Args:
        revision: Whose weights they must have; None: the one that raised `RANDOM_NUMBERS` last.
        say: Called with what was compared.
    """
    quiet()
    line = verdict(numbers(), read("numbers.json"))
    if line is not None:
        yield line
    yield from wrong_ledgers()
    chosen = with_twins(scenarios())
    say(f"training {len(chosen)} golden runs")
    outcomes = train(chosen)
    yield from wrong_values(scenarios(), outcomes, read("runs.json"))
    yield from wrong_twins(chosen, outcomes)
    yield from other_weights(scenarios(), outcomes, revision, say)


def wrong_ledgers() -> Iterator[str]:
    """Say which committed ledgers are read otherwise than when they were written."""
    facts = read("ledgers/facts.json")
    for path in sorted((FOLDER / "ledgers").glob("*.jsonl")):
        now, then = facts_of(path), facts[path.stem]
        now["epsilon"] = {name: value for name, value in now["epsilon"].items() if name in then["epsilon"]}
        if not same(now, then):
            yield f"the ledger {path.name} is {now}, and was {then}"


def other_weights(chosen: Sequence[Scenario], outcomes: Outcomes, revision: str | None, say: Say) -> Iterator[str]:
    """Say which runs have other weights than an earlier revision gives them on this machine.

    Where the revision has no way to train them as this one does, its own golden runs are compared.
    """
    revision = revision or base.to_match()
    if revision is None:
        say("no revision to compare weights with: this is no git checkout, or its history is cut off")
        return
    now, then = base.random_numbers(), base.random_numbers(revision)
    if now != then:
        say(f"weights are not compared: RANDOM_NUMBERS is {now}, and was {then} at {revision[:10]}")
        return
    if base.is_present(revision):
        say(f"weights are not compared: the source is that of {revision[:10]}")
        return
    say(f"training those of {revision[:10]}")
    before = weights_before(chosen, revision, say)
    wrong = list(wrong_weights(chosen, outcomes, before))
    same = len({scenario.name for scenario in chosen} & {*before}) - len(wrong)
    say(f"{same} of {len(chosen)} runs have the weights of {revision[:10]}, to the bit")
    if not same and not wrong:
        yield f"{revision[:10]} has none of these runs: compare with a later one, --base REVISION."
    if wrong:
        yield _RAISE
        yield from wrong


def weights_before(chosen: Sequence[Scenario], revision: str, say: Say) -> Outcomes:
    """Train with the source of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        place = base.extract(revision, Path(folder))
        try:
            return train(chosen, source=place / "src")
        except subprocess.CalledProcessError:
            if not (place / "tools" / "golden").exists():
                raise
        say("it has another interface: with its own golden runs")
        common = [scenario for scenario in chosen if scenario.name in _names(place)]
        return train(common, source=place / "src", runner=place)


def _names(checkout: Path) -> set[str]:
    words = ["-c", "from tools.golden.scenarios import scenarios; print(*(one.name for one in scenarios()))"]
    environment = {**os.environ, "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}"}
    done = subprocess.run([sys.executable, *words], cwd=checkout, env=environment, capture_output=True, check=True)
    return set(done.stdout.decode().split())


def write(say: Say = print) -> None:
    """Write the committed values again, and the ledgers that are missing.

    Raises:
        SystemExit: The same key gives other numbers than the committed ones, and `RANDOM_NUMBERS` is not raised.
    """
    quiet()
    if not kernels_are_there():
        raise SystemExit("write golden values on a machine with the compiled kernels: here their noise is unknown.")
    now, path = numbers(), FOLDER / "numbers.json"
    if path.exists():
        line = unraised(now, read("numbers.json"))
        if line is not None:
            raise SystemExit(line)
    path.write_text(lines_of(now), encoding="utf-8")
    for name in write_missing(FOLDER / "ledgers"):
        say(f"new ledger: {name}")
    chosen = list(scenarios())
    say(f"training {len(chosen)} golden runs")
    outcomes = train(chosen)
    values = {scenario.name: values_of(outcomes[scenario.name]) for scenario in chosen}
    (FOLDER / "runs.json").write_text(lines_of(values), encoding="utf-8")
