"""`dpbench check`: a test of whether the training step keeps records apart."""

from __future__ import annotations

import argparse

from dpbench.cli.arguments import Commands, add_command, add_overrides

_HELP = """\
usage: dpbench check [GROUP=NAME ...] [KEY=VALUE ...]

Run the training step on some records of two batches, without training, and say if it keeps records apart.
Accepts the arguments of `dpbench train`. Nothing is written: no ledger, no run, no weights.

  separable   the engine computes all gradients of a batch together
  mixed       the line that mixes records; training takes them one by one
  reads       the line that reads values of records into Python; training takes records one by one
  kept        the line that uses records of an earlier batch; training is refused

The output says what the code does, and shows no record. But it is computed on private data, a verdict can depend on
values (such as how many targets of each record count), and no epsilon covers it: it is for you, not for publication.

exit status: 0 separable, mixed, reads or not checked; 1 kept, or an error.

examples:
  dpbench check experiment=demo model=mlp
  dpbench check data=mnist model=resnet18_gn
"""


def add_parser(commands: Commands) -> None:
    """List the command; Hydra reads its words."""
    summary = "Say if a training step keeps records apart, without training."
    parser = add_command(commands, "check", summary, add_help=False)
    add_overrides(parser, "as for dpbench train")


def run(options: argparse.Namespace) -> int:
    """Check and print the verdict, or show help."""
    if "-h" in options.words or "--help" in options.words:
        print(_HELP)
        return 0
    from dpbench.harness.run.check import check_step
    from dpbench.harness.run.jobs import with_one_run

    checked = with_one_run(options.words, check_step)
    print(checked)
    return 1 if checked.kind == "kept" else 0
