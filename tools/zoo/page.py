"""The page of the zoo."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from dpbench.harness.reports.markdown import markdown_rows
from tools.zoo.architectures import Architecture
from tools.zoo.check import BROKEN, ENGINE, FAILED, RECORD_BY_RECORD, REFUSED, TOLERANCE, WRONG, Outcome

_LIBRARIES = ("torch", "pytorch-lightning", "torchvision", "transformers", "peft", "timm", "torch_geometric")
_LONGEST_REASON = 240

Result = tuple[Architecture, Outcome]


def page_of(results: Sequence[Result]) -> str:
    """The page: what is checked, how many are what, and a table for each family."""
    parts = [_HEAD.format(count=len(results), tolerance=f"{TOLERANCE:g}"), _counts(results), "", _HOW, _versions()]
    for family, members in groupby(results, key=lambda result: result[0].family):
        rows = [["network", "library", "step", "outcome", "remarks", "error", "parameters"]]
        rows += [_row(architecture, outcome) for architecture, outcome in members]
        parts += ["", f"## {family[0].upper()}{family[1:]}", "", markdown_rows(rows, text=range(5))]
    return "\n".join(parts)


def _counts(results: Sequence[Result]) -> str:
    private = [outcome for architecture, outcome in results if architecture.private]
    mixing = [outcome for architecture, outcome in results if not architecture.private]
    count = Counter(outcome.path for outcome in private)
    trained = count[ENGINE] + count[RECORD_BY_RECORD]
    errors = [outcome.error for outcome in private if outcome.error is not None and outcome.path != WRONG]
    rows = [["", "networks"]]
    rows += [[_WORDS[path], str(count[path])] for path in _WORDS]
    rows += [
        ["trained", f"{trained} of {len(private)} ({trained / len(private):.0%})"],
        [
            "of the family that mixes records, refused",
            f"{sum(outcome.path == REFUSED for outcome in mixing)} of {len(mixing)}",
        ],
        ["compared with autograd, and equal", str(len(errors))],
        ["largest error of those", f"{max(errors):.1e}"],
    ]
    return markdown_rows(rows)


def _row(architecture: Architecture, outcome: Outcome) -> list[str]:
    has_numbers = outcome.path not in (BROKEN,)
    error = "" if outcome.error is None else f"{outcome.error:.0e}"
    if outcome.error is not None and outcome.precision == 32:
        error += " (float32)"
    return [
        architecture.name,
        architecture.library,
        architecture.step,
        f"**{outcome.path}**" if outcome.path in (WRONG, FAILED, BROKEN) else outcome.path,
        _remarks(outcome),
        error,
        f"{outcome.parameters:,}" if has_numbers and outcome.parameters else "",
    ]


def _remarks(outcome: Outcome) -> str:
    reason = outcome.reason
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON].rsplit(" ", 1)[0] + " ..."
    remarks = [f"`fix`: {len(outcome.fixes)} layers"] if outcome.fixes else []
    if reason:
        remarks.append(reason)
    text = "; ".join(remarks)
    for sign in ("\\", "|", "<", ">", "*", "_", "$", "[", "]"):
        text = text.replace(sign, f"\\{sign}")
    return text


def _versions() -> str:
    versions = []
    for library in _LIBRARIES:
        try:
            versions.append(f"{library} {importlib.metadata.version(library).partition('+')[0]}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Versions: {', '.join(versions)}."


_WORDS = {
    ENGINE: "engine",
    RECORD_BY_RECORD: "record by record",
    REFUSED: "refused",
    FAILED: "failed with an error of another library, or not done in time",
    WRONG: "trained, and not equal to autograd",
    BROKEN: "not trained without dpbench either",
}

_HEAD = """\
# Zoo

Written by `make zoo`, which builds {count} small networks with random weights from configurations of transformers,
torchvision, timm, PyTorch Geometric and peft, and in plain torch, and trains each for a few batches with
`ClipOnly(max_grad_norm=...)`, which releases the clipped sum without noise. The list (`tools/zoo/zoo.yaml`) was
committed before any of it was tried. A release has to be the mean of the clipped gradients of each record's loss
alone, by plain autograd, to {tolerance} of each parameter's gradient.
"""

_HOW = """\
* **outcome**: by the engine, in one backward pass; record by record, with the reason why the engine cannot be used
  (`gradients=auto` says it in one line); or refused, with the reason.
* **error**: largest relative error of a parameter's gradient, in float64, or in float32 where a network does not run
  in float64. Where there is none, the step draws random numbers, or keeps its dropout; such a network has to train.
* `fix`: BatchNorm mixes records; `dpbench.fix(model)` has first replaced this number of layers by GroupNorm.

Dropout and stochastic depth are set to 0 but in the family "With dropout". Reasons are cut after a few lines.
"""
