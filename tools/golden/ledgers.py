"""Ledgers of each schema: written once, kept for ever, so that they cost the same for every later reader.

Those without `plan` in their name were written under schema 1.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpbench.privacy.accounting.accountants import ACCOUNTANTS
from dpbench.privacy.accounting.composition import microbatch_epsilon
from dpbench.privacy.accounting.ledger import Header, Release, read_ledger
from dpbench.privacy.accounting.writer import LedgerWriter
from dpbench.privacy.events import SumQuery
from dpbench.privacy.sampling import ShuffledEpochs
from tools.golden import worlds
from tools.golden.runs import trainer_for
from tools.golden.scenarios import Scenario, fixed_keys
from tools.golden.values import epsilons, lines_of, significant

_FLAT = Scenario("dpsgd", "poisson", "examples", "dense", "automatic", "1", "straight", "torch")


def facts_of(path: Path) -> dict[str, Any]:
    """What every reader must make of a ledger: epsilons to ten digits by each accountant."""
    ledger = read_ledger(path)
    delta = ledger.header.delta
    facts: dict[str, Any] = {
        "phases": len(ledger.headers),
        "releases": len(ledger.releases),
        "unit": ledger.header.unit,
        "damage": ledger.damage and ledger.damage.partition(" (")[0],
        "secure": ledger.secure,
        "epsilon": epsilons(ledger, delta, ACCOUNTANTS),
    }
    if ledger.header.microbatch_size > 1:
        facts["epsilon of a fixed microbatch"] = significant(microbatch_epsilon(ledger, delta), 10)
    return facts


def write_missing(folder: Path) -> list[str]:
    """Make the ledgers that are not there; those that are stay as they are, and so do their epsilons.

    Returns:
        Names of the new ones.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts_path = folder / "facts.json"
    facts = json.loads(facts_path.read_text(encoding="utf-8")) if facts_path.exists() else {}
    new = [name for name in LEDGERS if not (folder / f"{name}.jsonl").exists()]
    for name in new:
        with tempfile.TemporaryDirectory() as place:
            ledger = Path(place) / "ledger.jsonl"
            with fixed_keys():
                LEDGERS[name](ledger)
            (folder / f"{name}.jsonl").write_bytes(ledger.read_bytes())
        facts[name] = facts_of(folder / f"{name}.jsonl")
    facts_path.write_text(lines_of(facts), encoding="utf-8")
    return new


def _trained(scenario: Scenario, root: int | None = 36, **options: Any) -> Callable[[Path], None]:
    def write(ledger: Path) -> None:
        _fit(scenario, ledger, root, **options)

    return write


def _fit(scenario: Scenario, ledger: Path, root: int | None, checkpoint: Path | None = None, **options: Any) -> Any:
    module = worlds.Classifier(worlds.network(scenario.network), scenario.way == "manual", 0.2)
    if root is None:
        options["fingerprint"] = None
    strategy = scenario.make_strategy(ledger, root, **options)
    loader = worlds.lots_of(scenario.sampling, scenario.records == "users", root)
    trainer = trainer_for(ledger.parent, (strategy,), 1)
    trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=False)
    return trainer


def _two_phases(ledger: Path) -> None:
    """A run that was resumed with more noise."""
    trainer = _fit(_FLAT, ledger, 36)
    trainer.save_checkpoint(ledger.parent / "saved.ckpt")
    checkpoint = ledger.parent / "saved.ckpt"
    module = worlds.Classifier(worlds.network("dense"), False, 0.2)
    strategy = _FLAT.make_strategy(ledger, noise_multiplier=2.0)
    longer = trainer_for(ledger.parent, (strategy,), 1, steps=30)
    longer.fit(module, worlds.lots_of("poisson", False, 36), ckpt_path=checkpoint, weights_only=False)


def _shuffled(ledger: Path) -> None:
    """Of lots that no training may draw privately."""
    sampling = ShuffledEpochs(60, 12)
    writer = LedgerWriter(ledger, Header("example", "none", 60, 1e-3))
    for number in range(20):
        writer.append(Release(number, sampling, (SumQuery("all", 1.0, 2.0),), "0x1p+0"))
    writer.close()


def _cut(ledger: Path) -> None:
    """Of a process that died while it wrote."""
    _fit(_FLAT, ledger, 36)
    ledger.write_bytes(ledger.read_bytes()[:-40])


def _damaged(ledger: Path) -> None:
    """With a line in the middle that is none."""
    _fit(_FLAT, ledger, 36)
    lines = ledger.read_bytes().splitlines(keepends=True)
    lines[8] = lines[8][:30] + b"\n"
    ledger.write_bytes(b"".join(lines))


def _late_checksums(ledger: Path) -> None:
    """Of an executor that knows each checksum one line later, and died before it knew the last one."""
    _fit(_FLAT, ledger, 36)
    original = read_ledger(ledger)
    ledger.unlink()
    writer = LedgerWriter(ledger, original.header)
    for _, release in original.releases:
        writer.append(replace(release, checksum=None))
        if release is not original.releases[-1][1] and release.checksum is not None:
            writer.add_checksum(release.number, release.checksum)
    writer.close()


def _from_schema_1(ledger: Path) -> None:
    """A run that was begun under schema 1, and resumed."""
    trainer = _fit(_FLAT, ledger, 36)
    trainer.save_checkpoint(ledger.parent / "saved.ckpt")
    original = read_ledger(ledger)
    ledger.unlink()
    writer = LedgerWriter(ledger, replace(original.header, plan=None))
    for _, release in original.releases:
        writer.append(release)
    writer.close()
    checkpoint = torch.load(ledger.parent / "saved.ckpt", weights_only=False)
    for state in checkpoint["callbacks"].values():
        if "ledger" in state:
            state["ledger"] = None  # the seal of a file that was another one
    torch.save(checkpoint, ledger.parent / "saved.ckpt")
    module = worlds.Classifier(worlds.network("dense"), False, 0.2)
    strategy = _FLAT.make_strategy(ledger)
    longer = trainer_for(ledger.parent, (strategy,), 1, steps=30)
    lots = worlds.lots_of("poisson", False, 36)
    longer.fit(module, lots, ckpt_path=ledger.parent / "saved.ckpt", weights_only=False)


LEDGERS: dict[str, Callable[[Path], None]] = {
    "poisson": _trained(_FLAT),
    "secure": _trained(_FLAT, root=None),
    "target": _trained(replace(_FLAT, strategy="dpsgd_target")),
    "per_layer": _trained(replace(_FLAT, strategy="dpsgd_per_layer")),
    "joint": _trained(replace(_FLAT, strategy="vector_groups_joint")),
    "metrics": _trained(replace(_FLAT, strategy="dpsgd_metrics")),
    "adaptive_quantile": _trained(replace(_FLAT, strategy="adaptive_quantile")),
    "adaptive_mean": _trained(replace(_FLAT, strategy="adaptive_mean")),
    "microbatches": _trained(replace(_FLAT, records="microbatches")),
    "users": _trained(replace(_FLAT, records="users")),
    "users_with_metrics": _trained(replace(_FLAT, strategy="dpsgd_metrics", records="users")),
    "fixed_size": _trained(replace(_FLAT, sampling="fixed_size")),
    "truncated_poisson": _trained(replace(_FLAT, sampling="truncated_poisson")),
    "full": _trained(replace(_FLAT, sampling="full")),
    "two_phases": _two_phases,
    "shuffled": _shuffled,
    "cut": _cut,
    "damaged": _damaged,
    "plan": _trained(_FLAT),
    "plan_secure": _trained(_FLAT, root=None),
    "plan_adaptive_mean": _trained(replace(_FLAT, strategy="adaptive_mean")),
    "plan_microbatches": _trained(replace(_FLAT, records="microbatches")),
    "plan_users_with_metrics": _trained(replace(_FLAT, strategy="dpsgd_metrics", records="users")),
    "plan_fixed_size": _trained(replace(_FLAT, sampling="fixed_size")),
    "plan_scheduled": _trained(_FLAT, noise_schedule="linear:0.5", max_grad_norm_schedule="cosine:0.1"),
    "plan_two_phases": _two_phases,
    "plan_late_checksums": _late_checksums,
    "plan_after_schema_1": _from_schema_1,
}
"""Name → writes the ledger to a path."""
