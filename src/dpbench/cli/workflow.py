"""`dpbench workflow`: calibrate the noise on noise, then train on the data (three_tools_2018, section 3)."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from dpbench.cli.arguments import Commands, add_command, folder
from dpbench.errors import ConfigurationError

_USAGE = "dpbench workflow model=NAME data=NAME [WORD ...] [launcher=NAME] [--z Z,Z] [--margin POINTS] [--status]"
_EPILOG = """\
The words are those of one private training (dpbench train), without its noise. In turn:

  0 lot      that of data.expected_batch_size, the largest that your time allows; scale optimizer.lr with it
  1 power    training without privacy on noise of the data's size and shape recalls more than 90 % of its random labels
  2 noise    for each z the same training with privacy: epsilon, labels recalled, fresh ones, an audit by labels
  3 chosen   the least noise at which training labels are recalled at most 10 points better than fresh ones, with
             95 % confidence, at all more noise too
  4 data     that z on the data themselves: constant bounds, adaptive ones, no privacy; epsilon claimed, sound, audited

Passing is no guarantee; epsilon is. Noise is public: choosing on it costs no privacy. Runs are kept (--runs) by the
hash of their configuration and code: called again, the command runs only what is missing, and continues what was
interrupted.

exit status: 0 done, 1 the power check fails, no z passes, or a run has failed.

examples:
  dpbench workflow model=mlp data=digits optimizer=momentum optimizer.lr=0.05 trainer.max_steps=400
  dpbench workflow model=mlp data=mnist data.train_size=2000 --z 1,2,3,4 --margin 10
  dpbench workflow model=small_alexnet data=cifar10 launcher=joblib hydra.launcher.n_jobs=2 --status
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    help = "calibrate the noise on noise, then train"
    add = add_command(commands, "workflow", help, _EPILOG, usage=_USAGE).add_argument
    add("words", nargs="*", default=[], metavar="KEY=VALUE", help="of a private training, and launcher=")
    add(
        "--z",
        metavar="Z,Z",
        help="noise multipliers to try (default: seven of equal ratio, for epsilon from 32 to 0.5)",
    )
    points = (
        "by how many points training labels may be recalled better (default: 10, which an MLP meets near epsilon 2)"
    )
    add("--margin", type=float, default=10.0, metavar="POINTS", help=points)
    add("--status", action="store_true", help="run nothing; show what is finished")
    add("--replace", action="store_true", help="overwrite results of other settings or of other code")
    add("--out", type=folder, default=Path("results"), metavar="FOLDER", help="for results (default: results)")
    runs = Path("runs") / "workflow"
    add("--runs", type=folder, default=runs, metavar="FOLDER", help="for the runs themselves (default: runs/workflow)")


def run(options: argparse.Namespace) -> int:
    """Carry out the workflow; 1 where it stops before its end."""
    from dpbench.reproduce.workflow import Settings, run_workflow

    names = [word.partition("=")[0] for word in options.words]
    if missing := [name for name in ("model", "data") if name not in names]:
        raise ConfigurationError(f"name the {missing[0]}: dpbench workflow model=mlp data=mnist, say.")
    if not 0 < options.margin < 100:
        raise ConfigurationError(f"--margin is a number of points between 0 and 100, not {options.margin:g}.")
    if options.status and options.replace:
        raise ConfigurationError("--status writes nothing that --replace could overwrite: leave one of them out.")
    launcher = tuple(w for w in options.words if w.startswith(("launcher=", "hydra.launcher.")))
    settings = Settings(
        options.margin / 100, _noise(options.z), launcher, options.out, options.runs, options.status, options.replace
    )
    words = [word for word in options.words if word not in launcher]
    return 0 if run_workflow(words, settings, lambda text: print(text, flush=True)) else 1


def _noise(text: str | None) -> tuple[float, ...] | None:
    """Noise multipliers, increasing."""
    if text is None:
        return None
    try:
        found = sorted({float(f"{float(word):g}") for word in text.split(",") if word.strip()})
    except ValueError:
        found = []
    if not found or not all(0 < z < math.inf for z in found):
        raise ConfigurationError(f"--z lists positive noise multipliers, such as 1,2,4, not {text!r}.")
    return tuple(found)
