"""Commands that train or try a training: `dpbench train`, `check`, `resume`, `priors` and `reproduce`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dpbench.cli import check, train
from dpbench.cli.arguments import (
    Answer,
    Commands,
    add_command,
    add_config_dir,
    add_overrides,
    add_trust,
    folder,
    own_code,
    place,
)
from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    from dpbench.harness.reproduce.reproduction import Part

_RESUME = """\
Nothing in the folder is imported or unpickled. Its config.yaml determines which classes are instantiated (of installed
packages, and with --config-dir your own) and where data are read from: inspect it before you resume a run of
another person.

examples:
  dpbench resume runs/long                                         after Ctrl-C, a crash, a full disk
  dpbench resume runs/long trainer.max_steps=9000                  more steps for a finished run
"""

_PRIORS = """\
usage: dpbench priors GROUP=NAME ... [KEY=VALUE ...]

Train without noise on PUBLIC data, and estimate how often gradients fall under each hypothesis of the error correction.
Accepts the arguments of `dpbench train`, with strategy=discretized (or strategy=dpsgd and a correction_threshold).

example:
  dpbench priors data=fashion_mnist strategy=discretized trainer.max_steps=200
"""

_REPRODUCE = """\
Runs are stored (--runs) by the hash of their configuration and code: repeating the command runs only what is missing,
continues what was interrupted, and retries what failed.

examples:
  dpbench reproduce list                                      all tables
  dpbench reproduce gradient_compression/table1 --status      what is finished, and the table so far
  dpbench reproduce gradient_compression/table1 launcher=joblib hydra.launcher.n_jobs=2    two runs at a time
  dpbench reproduce gradient_compression/table1 seeds=20 --keep    more seeds for a table begun on another machine
"""


def add_parsers(commands: Commands) -> None:
    """Add the commands."""
    train.add_parser(commands)
    check.add_parser(commands)
    _add_resume(commands)
    _add_priors(commands)
    _add_reproduce(commands)


def _add_resume(commands: Commands) -> None:
    parser = add_command(
        commands,
        "resume",
        "Continue an interrupted run, or a finished one with more steps.",
        _resume,
        epilog=_RESUME,
        usage="dpbench resume RUN [KEY=VALUE ...] [--config-dir FOLDER] [--trust]",
    )
    parser.add_argument("folder", type=place, metavar="RUN", help="the run's folder")
    add_overrides(parser, "such as trainer.max_steps=2000")
    add_config_dir(parser)
    add_trust(parser)


def _resume(options: argparse.Namespace) -> Answer:
    from dpbench.harness.run.jobs import resume

    job = partial(train.train_and_report, trust=options.trust)
    with own_code(options, options.folder):
        resume(options.folder, options.words, job)
    return Answer()


def _add_priors(commands: Commands) -> None:
    summary = "Estimate priors of the error correction on public data."
    add_overrides(add_command(commands, "priors", summary, add_help=False), "as for dpbench train")


def priors(options: argparse.Namespace) -> int:
    """Train on public data and print the priors, or show help; Hydra reads the words."""
    if not options.words or "-h" in options.words or "--help" in options.words:
        print(_PRIORS)
        return 0
    from dpbench.harness.run.jobs import launch
    from dpbench.harness.run.priors import priors_job

    with TemporaryDirectory() as folder:
        words = [*options.words, f"hydra.run.dir={folder}/run", "hydra/job_logging=none"]
        launch(words, priors_job)
    return 0


def add_output(parser: argparse.ArgumentParser, runs: Path) -> None:
    """Add options of where runs and results lie."""
    add = parser.add_argument
    add("--status", action="store_true", help="run nothing; show what is finished")
    add(
        "--out", type=folder, default=Path("results"), metavar="FOLDER", help="folder of the results (default: results)"
    )
    add("--runs", type=folder, default=runs, metavar="FOLDER", help=f"folder of the runs (default: {runs})")


def refuse_idle_replacement(status: bool, replace: bool) -> None:
    """Raise ConfigurationError for --status with --replace."""
    if status and replace:
        raise ConfigurationError("--status writes nothing that --replace could overwrite: leave one of them out.")


def _add_reproduce(commands: Commands) -> None:
    parser = add_command(
        commands,
        "reproduce",
        "Run a paper's table.",
        _reproduce,
        epilog=_REPRODUCE,
        usage="dpbench reproduce TABLE [seeds=N] [rows=NAME,...] [columns=NAME,...] [trainer=NAME] [launcher=NAME] "
        "[--config-dir FOLDER] [--status]",
    )
    add = parser.add_argument
    add("table", metavar="TABLE", help="list, a table's name, or your own definition (FILE.yaml)")
    add(
        "words",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="seeds=3 (or seeds=0,4), rows=, columns=, trainer=, launcher=",
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--replace",
        dest="existing",
        action="store_const",
        const="replace",
        default="refuse",
        help="overwrite results made by other code",
    )
    existing.add_argument(
        "--keep",
        dest="existing",
        action="store_const",
        const="keep",
        help="count runs in --out as done, whatever code made them",
    )
    add_output(parser, Path("runs") / "tables")
    add(
        "--config-dir",
        type=place,
        metavar="FOLDER",
        help="folder with your own configuration and tables, next to your classes (as for train)",
    )
    add("--json", action="store_true", help="with list: print JSON")


def _reproduce(options: argparse.Namespace) -> Answer:
    """List, compute or run tables; status 1 if a run failed."""
    from dpbench.harness.reproduce.tables import computed_tables, listed_tables, listing
    from dpbench.harness.run.search_path import code_folder

    if options.config_dir is not None:
        code_folder(options.config_dir)  # names the folder that was meant
    alone = not options.words and not options.status and options.existing == "refuse"
    if options.table == "list":
        if not alone:
            raise ConfigurationError("list takes no further arguments: dpbench reproduce list.")
        listed = listed_tables(options.config_dir)
        return Answer(listing(listed), listed)
    if options.json:
        raise ConfigurationError("--json is only for list: a table writes its data to files.")
    computed = computed_tables().get(options.table)
    if computed is not None:
        if not alone or options.config_dir is not None:
            raise ConfigurationError(f"{options.table} is computed without runs and accepts only --out.")
        out = options.out / options.table.replace("/", "_")
        out.mkdir(parents=True, exist_ok=True)  # find out now, not after a minute
        return Answer(computed.load()(out))
    refuse_idle_replacement(options.status, options.existing == "replace")
    from dpbench.harness.reproduce.reproduction import (
        reproduce_table,  # slow to import, which a listing need not wait for
    )

    part = part_of(options.words)
    text, good = reproduce_table(
        options.table,
        part,
        options.out,
        options.runs,
        options.status,
        options.existing,
        options.config_dir,
    )
    return Answer(text, status=0 if good else 1)


def part_of(words: Sequence[str]) -> Part:
    """Read rows=A,B columns=A seeds=3 (or seeds=0,1,) trainer=NAME launcher=NAME hydra.launcher.KEY=VALUE.

    Raises:
        ConfigurationError: A word is something else.
    """
    from dpbench.harness.reproduce.reproduction import Part

    values: dict[str, Any] = {}
    launcher = []
    for word in words:
        key, _, value = word.partition("=")
        if key in values:
            raise ConfigurationError(f"{key}= is given twice: write it once.")
        names = tuple(dict.fromkeys(name.strip() for name in value.strip("[]").split(",") if name.strip()))
        if key in ("rows", "columns") and names:
            values[key] = names
        elif key == "seeds" and names and all(name.isdecimal() and len(name) < 7 for name in names):
            seeds = tuple(map(int, names))
            values[key] = seeds if "," in value or "[" in value else seeds[0]
        elif key == "trainer" and value:
            values[key] = (word,)
        elif value and (key == "launcher" or key.startswith("hydra.launcher.")):
            launcher.append(word)
        else:
            raise ConfigurationError(
                f"unknown argument {word!r}: give rows=NAME,NAME, columns=NAME,NAME, seeds=NUMBER (how many; with "
                "commas: which), trainer=NAME, launcher=NAME or hydra.launcher.KEY=VALUE."
            )
    if values.get("seeds") == 0:
        raise ConfigurationError("seeds=0 leaves nothing to run; seeds=0, (with a comma) is seed 0 alone.")
    return Part(**values, sweep=tuple(launcher))
