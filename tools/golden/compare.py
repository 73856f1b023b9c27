"""Compares the golden runs of this source with the committed values, with one another and with an earlier revision.

Weights must be, to the bit, those of the revision in `tests/golden/base.txt`. Every later revision is compared with
that one, and not with its parent alone: differences do not add up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from tools.golden.ledgers import add_facts, facts_of
from tools.golden.numbers import numbers, unraised, verdict
from tools.golden.runs import kernels_are_there
from tools.golden.scenarios import Scenario, scenarios, with_twins
from tools.golden.values import Outcomes, equal, lines_of, values_of, wrong_twins, wrong_values, wrong_weights
from tools.trainers import quiet

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "golden"
_RAISE = (
    "weights changed while RANDOM_NUMBERS did not: sums of seeded runs are others under the same noise. If that is "
    "meant, raise RANDOM_NUMBERS in privacy/randomness.py and run `python -m tools.golden write`."
)
_NUMBERS = "tests/golden/numbers.json"
_RUNS = "tests/golden/runs.json"
_SET_BASE = "commit the golden values, then run `python -m tools.golden base` and commit tests/golden/base.txt"
_MOST_SECONDS = 900
Say = Callable[[str], object]


def read(name: str) -> dict[str, Any]:
    """Committed values."""
    values: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return values


def problems(revision: str | None = None, say: Say = print, is_whole: bool = True) -> Iterator[str]:
    """Train all golden runs, and say what differs.

    Args:
        revision: The revision whose weights they must have; None: the one in `tests/golden/base.txt`.
        say: Receiver of a line about each comparison.
        is_whole: Read the committed ledgers, too, and compare the weights with the revision, whose runs are trained.
    """
    quiet()
    line = verdict(numbers(), read("numbers.json"))
    if line is not None:
        yield line
    if is_whole:
        yield from wrong_ledgers()
    chosen = with_twins(scenarios())
    say(f"training {len(chosen)} golden runs")
    outcomes = train(chosen)
    yield from wrong_values(scenarios(), outcomes, read("runs.json"))
    yield from wrong_twins(chosen, outcomes)
    if is_whole:
        yield from other_weights(scenarios(), outcomes, revision, say)


def wrong_ledgers() -> Iterator[str]:
    """Say which committed ledgers are read otherwise than when they were written."""
    facts = read("ledgers/facts.json")
    for path in sorted((FOLDER / "ledgers").glob("*.jsonl")):
        now, then = facts_of(path), facts[path.stem]
        now["epsilon"] = {name: value for name, value in now["epsilon"].items() if name in then["epsilon"]}
        if not equal(now, then):
            yield f"the ledger {path.name} is {now}, and was {then}"


def other_weights(chosen: Sequence[Scenario], outcomes: Outcomes, revision: str | None, say: Say) -> Iterator[str]:
    """Say which runs have other weights than those of an earlier revision, trained by its own tools here."""
    revision = revision or base()
    if not has_history():
        say("weights are not compared: this is no git checkout, or its history is cut off")
        return
    try:
        then = json.loads(git("show", f"{revision}:{_NUMBERS}"))["RANDOM_NUMBERS"]
    except subprocess.CalledProcessError:
        yield f"{revision[:10]} is no revision with golden runs: {_SET_BASE}."
        return
    now = read("numbers.json")["RANDOM_NUMBERS"]
    if now != then:
        if git("status", "--porcelain", "--", _NUMBERS).strip():
            say(f"weights are not compared: RANDOM_NUMBERS is {now}, and was {then} at {revision[:10]}")
        else:
            yield f"RANDOM_NUMBERS is {now}, and was {then} at {revision[:10]}: {_SET_BASE}."
        return
    if _is_source_of(revision):
        say(f"weights are not compared: the source is that of {revision[:10]}")
        return
    say(f"training those of {revision[:10]}")
    before = weights_before(chosen, revision)
    wrong = list(wrong_weights(chosen, outcomes, before))
    count = len({scenario.name for scenario in chosen} & set(before)) - len(wrong)
    say(f"{count} of {len(chosen)} runs have the weights of {revision[:10]}, to the bit")
    if not count and not wrong:
        yield f"{revision[:10]} has none of these runs: compare with a later one, --base REVISION."
    if wrong:
        yield _RAISE
        yield from wrong


def weights_before(chosen: Sequence[Scenario], revision: str) -> Outcomes:
    """Train the golden runs that a revision has, with its own source."""
    with tempfile.TemporaryDirectory() as folder:
        place = _extract(revision, Path(folder))
        words = ["-c", "from tools.golden.scenarios import scenarios; print(*(one.name for one in scenarios()))"]
        environment = {**os.environ, "PYTHONPATH": f"{place / 'src'}{os.pathsep}{place}"}
        process = subprocess.run([sys.executable, *words], cwd=place, env=environment, capture_output=True, check=True)
        names = process.stdout.decode().split()
        return train([scenario for scenario in chosen if scenario.name in names], place)


def write() -> None:
    """Write the committed values again, and what new ledgers cost.

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
    for name in add_facts():
        print(f"new ledger: {name}")
    chosen = list(scenarios())
    print(f"training {len(chosen)} golden runs")
    outcomes = train(chosen)
    values = {scenario.name: values_of(outcomes[scenario.name]) for scenario in chosen}
    (FOLDER / "runs.json").write_text(lines_of(values), encoding="utf-8")


# ------------------------------------------------------------------------------------- training


def train(chosen: Sequence[Scenario], checkout: Path | None = None) -> Outcomes:
    """Train scenarios, in processes of their own.

    Args:
        chosen: What to train.
        checkout: The folder whose `src` and `tools.golden` train them; None: this one.

    Raises:
        subprocess.CalledProcessError: A run failed; its error was printed.
    """
    outcomes: Outcomes = {}
    for processes in ("1", "2"):
        part = [scenario for scenario in chosen if scenario.processes == processes]
        if part:
            with tempfile.TemporaryDirectory() as folder:
                outcomes |= _train_part(part, processes, Path(folder), checkout)
    return outcomes


def _train_part(chosen: Sequence[Scenario], processes: str, folder: Path, checkout: Path | None) -> Outcomes:
    names = folder / "names.json"
    names.write_text(json.dumps([scenario.name for scenario in chosen]), encoding="utf-8")
    root = checkout or ROOT
    path = [str(root / "src"), str(root)] if checkout is not None else [*sys.path, str(root)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    words = ["-m", "tools.golden.part", str(names), str(folder)]
    if processes == "2":
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    subprocess.run([sys.executable, *words], cwd=root, env=environment, check=True, timeout=_MOST_SECONDS)
    outcomes: Outcomes = json.loads((folder / "outcomes.json").read_text(encoding="utf-8"))
    return outcomes


# ------------------------------------------------------------------------------------- revisions


def git(*words: str) -> bytes:
    """What a git command prints.

    Raises:
        subprocess.CalledProcessError: It failed.
    """
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def base() -> str:
    """Commit whose weights the golden runs must have."""
    return (FOLDER / "base.txt").read_text(encoding="utf-8").strip()


def set_base() -> str:
    """Make the committed source the one that later revisions are compared with.

    Raises:
        SystemExit: The source or the golden values have changes that are not committed.
    """
    if git("status", "--porcelain", "--", "src", "conf", "tools/golden", _NUMBERS).strip():
        raise SystemExit("commit the source and the golden values first: the base is a commit.")
    commit = git("rev-parse", "HEAD").decode()
    (FOLDER / "base.txt").write_text(commit, encoding="utf-8")
    return commit.strip()


def has_history() -> bool:
    """Tell a git checkout with its whole history from an archive or a shallow clone."""
    try:
        return git("rev-parse", "--is-shallow-repository").strip() == b"false"
    except (OSError, subprocess.CalledProcessError):
        return False


def _is_source_of(revision: str) -> bool:
    """Whether the files are those of a revision, so that there is nothing to compare."""
    return not git("diff", "--name-only", revision, "--", "src").strip()


def _extract(revision: str, folder: Path) -> Path:
    """Put the files of a revision into a folder, without touching the checkout."""
    with tarfile.open(
        fileobj=BytesIO(git("archive", "--format=tar", revision, "src", "conf", "tools", _RUNS))
    ) as archive:
        archive.extractall(folder, filter="data")
    return folder
