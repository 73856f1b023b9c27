"""`python -m tools.attacked_claims`: attacks the runs below attacks/claims, and adds what the papers measure of them.

The figures of results/attack/claims/README.md are those of claims.json, which it writes (`make claims-attacked`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpbench.capabilities.attack.attack import FEWEST_RUNS, AttackedSetting, attack_runs
from dpbench.capabilities.attack.results import text_of
from dpbench.capabilities.synthesis.memorization import memorization
from dpbench.capabilities.synthesis.sample import load_gan
from dpbench.capabilities.users.module import UserDataModule
from dpbench.data.images import ImageDataModule
from dpbench.errors import ConfigurationError
from dpbench.files import write_json
from dpbench.harness.run.samples import sample_images
from dpbench.harness.runs.folder import RunFolder

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "results" / "attack" / "claims"
FACTS = "claims.json"
SWEEPS = {
    "noise": ("noise", "noise-dpsgd", "noise-vector_groups", "noise-discretized"),
    "users": ("users", "users-dpsgd"),
    "gan": ("gan", "gan-dpsgd"),
}
"""Folders of sweeps below attacks/claims, by what is attacked in them."""
_SIGNALS = {"gan": ("loss", "samples")}
_SAMPLES = 2000  # images of a generator whose nearest neighbors are looked for
_PATTERN = 14  # side of the pattern in the upper left corner


def collect(runs: Path, out: Path) -> None:
    """Attack the runs that there are, write claims.json, and print the table of each family.

    Args:
        runs: attacks/claims.
        out: Folder of results.

    Raises:
        ConfigurationError: There are no runs, so that what is there would be lost.
    """
    if not runs.is_dir():
        raise ConfigurationError(f"{runs} holds no runs: make claims-attacked trains them.")
    facts: dict[str, list[dict[str, Any]]] = {}
    for family, sweeps in SWEEPS.items():
        there = [runs / name for name in sweeps if _finished(runs / name) >= FEWEST_RUNS]
        if not there:
            continue
        settings = attack_runs(there, _SIGNALS.get(family, ("loss",)))
        print(f"{family}: {text_of([setting.summary for setting in settings])}\n")
        facts[family] = [{**setting.summary.to_dict(), **_about(setting)} for setting in settings]
    write_json(out / FACTS, facts)


def _finished(sweep: Path) -> int:
    return len(list(sweep.glob("*/result.json")))


def _about(setting: AttackedSetting) -> dict[str, Any]:
    """What the papers measure of a setting: means of metrics, and what the pattern or the generator shows."""
    first = setting.rows[0].record
    strategy = first["config"]["strategy"]
    privacy = first["privacy"]
    about: dict[str, Any] = {
        "strategy": strategy["_target_"].rpartition(".")[2],
        "noise_multiplier": privacy.get("noise_multiplier"),
        "metrics": {
            name: float(np.mean([row.metrics[name] for row in setting.rows]))
            for name, value in setting.rows[0].metrics.items()
            if value is not None and not name.startswith("privacy/")
        },
    }
    data = setting.candidates
    if isinstance(data, UserDataModule):
        about["pattern"] = _pattern(setting, data)
    if setting.summary.attacks[-1].signal == "samples":
        assert isinstance(data, ImageDataModule)
        about["unusually_close"] = _unusually_close(setting, data)
    return about


def _pattern(setting: AttackedSetting, data: UserDataModule) -> dict[str, Any]:
    """Test accuracies (share of fresh patterns called 1) of runs with and without the user who has the pattern."""
    rows = torch.cat([images[:, 0] for images, _ in data.candidate_dataloader()])
    marked = rows[:, :_PATTERN, :_PATTERN].flatten(1).std(dim=1) == 0
    (user,) = np.unique(data.record_of_row[marked.numpy()])
    members = setting.members[:, user]
    accuracy = np.array([row.metrics["test/accuracy"] for row in setting.rows])
    return {
        "user": int(user),
        "accuracy_of_members": accuracy[members].tolist(),
        "accuracy_of_others": accuracy[~members].tolist(),
    }


def _unusually_close(setting: AttackedSetting, data: ImageDataModule) -> dict[str, float]:
    """Mean over the runs of what `dpbench evaluate` says of nearest neighbors, against the members of each run."""
    train = _unit(data.train_set.pixels)
    test = _unit(data.test_set.pixels)
    shares = []
    suspected = 0
    for row, members in zip(setting.rows, setting.members, strict=True):
        assert isinstance(row.folder, RunFolder)
        images, _ = sample_images(load_gan(row.folder).module, _SAMPLES, seed=0)
        figures = memorization(images.float() / 255, train[torch.from_numpy(members)], test)
        shares.append(float(figures["unusually_close"]))
        suspected += bool(figures["memorization_suspected"])
    return {"share": float(np.mean(shares)), "suspected": suspected}


def _unit(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels.permute(0, 3, 1, 2).contiguous() + 1) / 2


if __name__ == "__main__":
    collect(Path("attacks/claims"), FOLDER)  # as the runs are named in claims.json
