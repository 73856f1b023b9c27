"""The page of the zoo, written from the committed outcomes without training."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from dpbench.files import replacing
from dpbench.harness.reports.markdown import markdown_rows
from tools.zoo.architectures import ARCHITECTURES, Architecture
from tools.zoo.check import BROKEN, ENGINE, FAILED, PATHS, RECORD_BY_RECORD, REFUSED, TOLERANCE, WRONG, Outcome

OUTCOMES = Path(__file__).with_name("outcomes.jsonl")
"""Versions of the libraries, then an outcome for each network."""
_LIBRARIES = ("torch", "pytorch-lightning", "torchvision", "transformers", "peft", "timm", "torch_geometric")
_LONGEST_REASON = 170
_WHERE = re.compile(r"records are combined in (?:\S*/)?(\S+:\d+ )")
"""The start of most reasons, of which the page keeps file and line."""

Result = tuple[Architecture, Outcome]


def keep(results: Sequence[Result]) -> None:
    """Write the outcomes of all networks, and the versions of their libraries, to `OUTCOMES`."""
    lines: list[dict[str, object]] = [{"versions": _versions()}]
    lines += [{**_named(architecture), **outcome._asdict()} for architecture, outcome in results]
    with replacing(OUTCOMES) as new:
        new.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def page() -> str:
    """The page, from `OUTCOMES`.

    Raises:
        ValueError: The list of networks has changed since `make zoo`.
    """
    first, *lines = map(json.loads, OUTCOMES.read_text(encoding="utf-8").splitlines())
    results = []
    for architecture, line in zip(ARCHITECTURES, lines, strict=True):
        name = {key: line.pop(key) for key in _named(architecture)}
        if name != _named(architecture):
            raise ValueError(f"{OUTCOMES.name} has {name} in place of {architecture}: run make zoo.")
        results.append((architecture, Outcome(**line)))
    return page_of(results, first["versions"])


def page_of(results: Sequence[Result], versions: dict[str, str]) -> str:
    """The page: a summary, a collapsed table for each family, and the reasons."""
    reasons = list(dict.fromkeys(outcome.reason for _, outcome in results if outcome.reason))
    head = _HEAD.format(
        count=len(results),
        tolerance=f"{TOLERANCE:g}",
        versions=", ".join(f"{library} {version}" for library, version in versions.items()),
    )
    parts = [head, _totals(results), _families(results), "", "## Networks", "", _LEGEND]
    for family, members in groupby(results, key=lambda result: result[0].family):
        rows = [["network", "library", "step", "outcome", "error", "parameters"]]
        rows += [_row(architecture, outcome, reasons) for architecture, outcome in members]
        table = markdown_rows(rows, text=range(4))
        parts += [*_collapsed(f"{_title(family)} ({len(rows) - 1})", table), ""]
    rows = [["", "reason"], *([str(number), _escaped(reason)] for number, reason in enumerate(reasons, start=1))]
    table = markdown_rows(rows, text=[1])
    return "\n".join([*parts, "## Reasons", "", _WHY, *_collapsed("Why not the engine", table)])


def _named(architecture: Architecture) -> dict[str, object]:
    named = architecture._asdict()
    del named["private"]
    return named


def _totals(results: Sequence[Result]) -> str:
    private = [outcome for architecture, outcome in results if architecture.private]
    mixing = [outcome for architecture, outcome in results if not architecture.private]
    count = Counter(outcome.path for outcome in private)
    trained = count[ENGINE] + count[RECORD_BY_RECORD]
    errors = [outcome.error for outcome in private if outcome.error is not None and outcome.path != WRONG]
    return _TOTALS.format(
        trained=trained,
        private=len(private),
        share=trained / len(private),
        engine=count[ENGINE],
        alone=count[RECORD_BY_RECORD],
        refused=count[REFUSED],
        failed=count[FAILED],
        broken=count[BROKEN],
        wrong=count[WRONG],
        compared=len(errors),
        largest=max(errors),
        mixing=len(mixing),
        mixing_refused=sum(outcome.path == REFUSED for outcome in mixing),
    )


def _families(results: Sequence[Result]) -> str:
    counts = {family: Counter[str]() for family in dict.fromkeys(architecture.family for architecture, _ in results)}
    for architecture, outcome in results:
        counts[architecture.family][outcome.path] += 1
    columns = [path for path in PATHS if any(count[path] for count in counts.values())]
    rows = [["family", *columns]]
    rows += [[_title(family), *(str(count[path] or "") for path in columns)] for family, count in counts.items()]
    return markdown_rows(rows)


def _row(architecture: Architecture, outcome: Outcome, reasons: list[str]) -> list[str]:
    path = f"**{outcome.path}**" if outcome.path in (WRONG, FAILED, BROKEN) else outcome.path
    if outcome.reason:
        path += f" [{reasons.index(outcome.reason) + 1}]"
    if outcome.fixes:
        path += f", `fix`: {outcome.fixes}"
    error = "" if outcome.error is None else f"{outcome.error:.0e}"
    if outcome.error is not None and outcome.precision == 32:
        error += " (float32)"
    parameters = f"{outcome.parameters:,}" if outcome.parameters else ""
    return [architecture.name, architecture.library, architecture.step, path, error, parameters]


def _collapsed(summary: str, text: str) -> list[str]:
    return ["<details>", f"<summary>{summary}</summary>", "", text, "", "</details>"]


def _title(family: str) -> str:
    return f"{family[0].upper()}{family[1:]}"


def _escaped(reason: str) -> str:
    reason = _WHERE.sub(r"\1", reason)
    if len(reason) > _LONGEST_REASON:
        reason = reason[:_LONGEST_REASON].rsplit(" ", 1)[0] + " ..."
    for sign in ("\\", "|", "<", ">", "*", "_", "$", "[", "]"):
        reason = reason.replace(sign, f"\\{sign}")
    return reason


def _versions() -> dict[str, str]:
    versions = {}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


_HEAD = """\
# Zoo

`make zoo` trains {count} small networks with random weights for a few batches without noise (`ClipOnly`). The first
release must equal the mean of plain autograd's clipped per-record gradients, within {tolerance} of each parameter's
gradient. The [list](../tools/zoo/zoo.yaml) was committed before the first run.

Versions: {versions}.
"""

_TOTALS = """\
**{trained} of {private} networks train ({share:.0%})**: {engine} with the engine, {alone} record by record.
Refused: {refused}. Failed or timed out in another library: {failed}. Not trainable without dpbench: {broken}.
Different from autograd: {wrong}. Equal: {compared} (largest relative error {largest:.1e}).
Refused of {mixing} networks whose step mixes records: {mixing_refused}.
"""

_LEGEND = """\
* **outcome**: `[1]` refers to the [reasons](#reasons). `fix`: BatchNorm layers, which mix records, that
  `dpbench.fix(model)` replaced by GroupNorm.
* **error**: largest relative error of a parameter's gradient, in float64 where the network runs in it. Steps that draw
  random numbers have no reference and need only train; dropout and stochastic depth are off except in "With dropout".
"""

_WHY = """\
Reasons are cut after a line or two. At a named file and line, records are combined.
"""
