"""The command, an entry point of `dpbench.commands`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dpbench.cli.arguments import (
    Answer,
    Commands,
    add_command,
    add_config_dir,
    add_json,
    add_trust,
    folder,
    integer,
    own_code,
)
from dpbench.errors import ConfigurationError

_ATTACK = """\
Each record is a member of each run with probability 1/2 (data.membership=half), so that the members are known.
With --train, all words are overrides of `dpbench train`, including sweeps; the same command continues where it stopped.

examples:
  dpbench attack --train 16                                    digits, DP-SGD: train 16 runs, and attack them
  dpbench attack --train 16 strategy=none,dpsgd trainer.max_steps=300
  dpbench attack attacks/members                               runs that are there
  dpbench train -m seed=0,1,2,3 data.membership=half           such runs by hand

exit status: 0 consistent, 3 an attack is above what a ledger allows.
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    summary = "Attack membership, and compare with what epsilon allows."
    parser = add_command(commands, "attack", summary, _attack, epilog=_ATTACK)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN_OR_SWEEP",
        help="folders of runs with data.membership=half; with --train: overrides of Hydra",
    )
    parser.add_argument(
        "--train",
        type=integer,
        metavar="N",
        help="train N runs of each setting first, with seeds from 0 on",
    )
    parser.add_argument(
        "--signal",
        default="loss",
        metavar="NAME",
        help="what the attacker sees: loss (default), samples (of a GAN), or both; the first one tests the claim",
    )
    parser.add_argument(
        "--out",
        type=folder,
        metavar="FOLDER",
        help="folder of the runs (--train) and of attack.png, attack.md, attack.json (default: that of the sweep)",
    )
    add_json(parser)
    add_config_dir(parser)
    add_trust(parser)


def _attack(options: argparse.Namespace) -> Answer:
    """Train if asked to, attack, and write the results; status 3 where a ledger is refuted."""
    from dpbench.capabilities.attack.attack import attack_runs, write_results
    from dpbench.capabilities.attack.results import text_of

    if options.train is not None:
        from dpbench.capabilities.attack.experiment import train_runs

        sources = [train_runs(options.train, options.words, options.out, options.config_dir)]
    elif options.words:
        sources = [Path(word) for word in options.words]
    else:
        raise ConfigurationError("name the sweep to attack, or train one: dpbench attack --train 16.")
    signals = [word.strip() for word in options.signal.split(",")]
    with own_code(options, sources[0]):
        settings = attack_runs(sources, signals, options.trust)
    summaries = [setting.summary for setting in settings]
    picture = write_results(options.out or sources[0], summaries)
    text = f"{text_of(summaries)}\n\n  picture   {picture}"
    is_refuted = any(summary.refuted for summary in summaries)
    return Answer(text, [summary.to_dict() for summary in summaries], 3 if is_refuted else 0)
