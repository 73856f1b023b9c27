"""The page of results/attack, from what `dpbench attack` wrote there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "results" / "attack"

_EPSILONS = """![Epsilon: claimed, audited by canaries, and shown by the membership attack](epsilon.png)

One run of each setting was trained with [canaries](../../docs/audit.md) and audited: what an adversary shows who sees
every step and whose gradients are made up, beside what the attack on real images shows.

"""
_PAGE = """# Attacked and allowed

Written by `make attacks`: {runs} networks (MNIST CNN) on the first {candidates:,} images of MNIST; in each of them
every image is a member with probability 1/2, so that about {half:,} train. 200 steps, batches of 256 candidates,
δ = 1e-5; the learning rate of each setting has the best accuracy on other images ([tuning.csv](tuning.csv)). Attacks by
the loss: threshold, LiRA and RMIA ([how](../../docs/attack.md)). Intervals: 95 %, runs and images resampled.

{table}

![Members recognized at a false positive rate of 1 %, by setting, and what the ledger allows](attack.png)

{epsilons}- The strongest attack is chosen by its result; the verdict rests on LiRA alone. {verdicts}
- Without privacy the strongest attack has an area under its curve of {auc_without:.3f}, and finds
  {tpr_without:.1f} % of the members at a false positive rate of 1 %. Of private runs the largest figures are
  {auc_private:.3f} and {tpr_private:.1f} %, where the ledgers allow up to {allowed:.0f} %.
- What ε allows is for the strongest attacker: one who knows all other images, and sees every step.
  [Canaries](../audit/README.md) come close to it; attacks on real images by final weights do not, and a weak
  attack is no proof of privacy.
- The networks without privacy overfit little: {without:.1f} % of test images are right. The same attacks have an area
  above 0.9 where labels are random (`tests/attack`), and of 0.8 on CIFAR-10 below.
- The learning rates were chosen with two seeds; some lie at an edge of what was tried.

![The images that are most exposed](exposed.png)

## CIFAR-10

The linear model of [the recipe](../recipes_cifar10/README.md), on features that see no data, with the first
{cifar_candidates:,} images as candidates and {cifar_seeds} runs of each setting; 100 steps, batches of 800
candidates.

{cifar_table}

![The same on CIFAR-10](cifar10/attack.png)
"""


def page() -> str:
    """The text of results/attack/README.md."""
    settings: list[dict[str, Any]] = json.loads((FOLDER / "attack.json").read_text(encoding="utf-8"))
    table = (FOLDER / "attack.md").read_text(encoding="utf-8").partition("\n\n")[2]
    cifar: list[dict[str, Any]] = json.loads((FOLDER / "cifar10" / "attack.json").read_text(encoding="utf-8"))
    cifar_table = (FOLDER / "cifar10" / "attack.md").read_text(encoding="utf-8").partition("\n\n")[2]
    private = [setting for setting in settings if setting["delta"] is not None]
    (without,) = (setting for setting in settings if setting["delta"] is None)
    violated = [setting["setting"] for setting in private if setting["verdict"] != "CONSISTENT"]
    verdicts = "No claim is refuted."
    if violated:
        verdicts = f"Refuted: {', '.join(violated)}."
    strongest = _strongest(without)
    of_private = [_strongest(setting) for setting in private]
    return _PAGE.format(
        runs=sum(len(setting["seeds"]) for setting in settings),
        without=100 * without["accuracy"],
        epsilons=_EPSILONS if (FOLDER / "epsilon.png").exists() else "",
        candidates=without["candidates"],
        half=without["candidates"] // 2,
        table=table.strip(),
        verdicts=verdicts,
        auc_without=strongest["auc"]["value"],
        tpr_without=100 * strongest["tpr"]["0.01"]["value"],
        auc_private=max(attack["auc"]["value"] for attack in of_private),
        tpr_private=100 * max(attack["tpr"]["0.01"]["value"] for attack in of_private),
        cifar_candidates=cifar[0]["candidates"],
        cifar_seeds=len(cifar[0]["seeds"]),
        cifar_table=cifar_table.strip(),
        allowed=100 * max(setting["allowed"]["tpr"]["0.01"] for setting in private),
    )


def _strongest(setting: dict[str, Any]) -> dict[str, Any]:
    attack: dict[str, Any] = max(setting["attacks"], key=lambda attack: attack["auc"]["value"])
    return attack
