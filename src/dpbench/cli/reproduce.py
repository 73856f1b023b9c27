"""`dpbench reproduce`: a paper's table, or its claims."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbench.cli.arguments import Commands, add_command, folder
from dpbench.errors import ConfigurationError

if TYPE_CHECKING:
    from dpbench.reproduce.run_table import Held, Part

_USAGE = (
    "dpbench reproduce TABLE [seeds=N] [rows=NAME,...] [columns=NAME,...] [trainer=NAME] [launcher=NAME] [--status]"
)
_EPILOG = """\
Runs are kept (--runs) by the hash of their configuration and code: called again, the command runs only what is missing,
continues what was interrupted, and tries again what failed.

examples:
  dpbench reproduce list                                      what there is
  dpbench reproduce claims                                    every printed epsilon, recomputed (one minute)
  dpbench reproduce gradient_compression/table1 --status      what is finished, and the table so far
  dpbench reproduce gradient_compression/table1 rows=sigma_1.1 seeds=1
  dpbench reproduce gradient_compression/table1 launcher=joblib hydra.launcher.n_jobs=2    two runs at a time
  dpbench reproduce gradient_compression/table1 seeds=20 --keep    more seeds to a table that another machine began
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    help = "run a paper's table, or recompute its claims"
    parser = add_command(commands, "reproduce", help, _EPILOG, usage=_USAGE)
    add = parser.add_argument
    add("table", metavar="TABLE", help="list, claims, a name from the list, or a definition of your own (FILE.yaml)")
    words = "seeds=3 (or seeds=0,4), rows=, columns=, trainer=, launcher="
    add("words", nargs="*", default=[], metavar="KEY=VALUE", help=words)
    add("--status", action="store_true", help="run nothing; show what is finished")
    held = parser.add_mutually_exclusive_group().add_argument
    held("--replace", action="store_true", help="overwrite results that other code has made")
    held("--keep", action="store_true", help="count runs that --out holds as done, whatever code made them")
    add("--out", type=folder, default=Path("results"), metavar="FOLDER", help="for tables (default: results)")
    runs = Path("runs") / "tables"
    add("--runs", type=folder, default=runs, metavar="FOLDER", help="for the runs themselves (default: runs/tables)")


def run(options: argparse.Namespace) -> int:
    """Print the list, the claims or the table; 1 where a run of the table failed."""
    from dpbench.reproduce.tables import COMPUTED_TABLES, listing

    alone = not (options.words or options.status or options.replace or options.keep)
    if options.table == "list":
        if not alone:
            raise ConfigurationError("list takes no further words: dpbench reproduce list.")
        print(listing())
        return 0
    if options.table in COMPUTED_TABLES:
        if not alone:
            raise ConfigurationError(f"{options.table} takes no runs: only --out goes with it.")
        out = options.out / options.table.replace("/", "_")
        out.mkdir(parents=True, exist_ok=True)  # find out now, not after a minute
        print(COMPUTED_TABLES[options.table].write(out))
        return 0
    if options.status and options.replace:
        raise ConfigurationError("--status writes nothing that --replace could overwrite: leave one of them out.")
    from dpbench.reproduce.run_table import reproduce_table  # not for a listing, which need not wait

    part = part_of(options.words)
    held: Held = "replace" if options.replace else "keep" if options.keep else "stays"
    text, good = reproduce_table(options.table, part, options.out, options.runs, options.status, held)
    print(text)
    return 0 if good else 1


def _names(value: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in value.strip("[]").split(",") if name.strip())


def _seeds(value: str) -> tuple[int, ...] | int | None:
    seeds = _names(value)
    if not seeds or not all(seed.isdecimal() and len(seed) < 7 for seed in seeds):
        return None
    listed = "," in value or "[" in value
    return tuple(map(int, seeds)) if listed else int(seeds[0])


_MOST_SEEDS = 1000
_READERS: dict[str, Callable[[str], Any]] = {
    "rows": lambda value: _names(value) or None,
    "columns": lambda value: _names(value) or None,
    "seeds": _seeds,
    "trainer": lambda value: (f"trainer={value}",) if value else None,
}
"""From what follows a key's = to the value of the part's field; None for something else."""


def part_of(words: Sequence[str]) -> Part:
    """Read rows=A,B columns=A seeds=3 (or seeds=0,1,) trainer=NAME launcher=NAME hydra.launcher.KEY=VALUE.

    Raises:
        ConfigurationError: A word is something else.
    """
    from dpbench.reproduce.run_table import Part

    values: dict[str, Any] = {}
    sweep = []
    for word in words:
        key, _, value = word.partition("=")
        if key in values:
            remedy = "choose one" if key == "trainer" else f"write {key}=A,B"
            raise ConfigurationError(f"{key}= is given twice: {remedy}.")
        if word == "hydra.launcher.n_jobs=0":
            raise ConfigurationError("hydra.launcher.n_jobs=0 runs nothing: 2 runs two at a time, -1 one on each core.")
        if key in _READERS and (read := _READERS[key](value)) is not None:
            values[key] = read
        elif value and (key == "launcher" or key.startswith("hydra.launcher.")):
            sweep.append(word)
        else:
            raise ConfigurationError(
                f"{word!r} is none of rows=NAME,NAME columns=NAME,NAME seeds=NUMBER (how many, or with commas which) "
                "trainer=NAME launcher=NAME hydra.launcher.KEY=VALUE."
            )
    seeds = values.get("seeds")
    if seeds == 0:
        raise ConfigurationError("seeds=0 leaves nothing to run; seeds=0, (with a comma) is seed 0 alone.")
    if isinstance(seeds, int) and seeds > _MOST_SEEDS:
        raise ConfigurationError(f"seeds={seeds} asks for more runs of each cell than {_MOST_SEEDS:,}.")
    for key, several in values.items():
        if isinstance(several, tuple) and len(set(several)) < len(several):
            raise ConfigurationError(f"{key}={','.join(map(str, several))} names one of them twice.")
    return Part(**values, sweep=tuple(sweep))
