"""Lots, noise, sums and the model's own random numbers of a few keys, as every machine computes them.

While these numbers are the committed ones, the same key gives the same lots and the same noise. Where they change,
`RANDOM_NUMBERS` must: it is part of the key of the noise, so that no two versions add one noise to two sums.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpbench import PrivateLoop
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows
from dpbench.data.sampler import PrivateBatchSampler
from dpbench.privacy import native
from dpbench.privacy.randomness import RANDOM_NUMBERS
from dpbench.privacy.sampling import Sampling, ShuffledEpochs
from tools.golden import worlds
from tools.golden.runs import kernels_are_there
from tools.golden.scenarios import STEPS, Scenario, fixed_keys
from tools.golden.values import significant
from tools.trainers import trainer_for

KEYS = {"small": 36, "large": 2**127 + 36}
_WIDTH = 40
_SHOWN = (0, 1, 15, 16, 31, 32, 39)
"""Coordinates: PyTorch and the kernels draw up to sixteen numbers at once, and the rest one by one."""
_NOISE_DIGITS = 5
_TOLERANCE = 1.5 * 10.0**-_NOISE_DIGITS
_STEPS = 4

Numbers = dict[str, Any]


def numbers() -> Numbers:
    """All that this machine can compute; without kernels their noise is left out."""
    record: Numbers = {"RANDOM_NUMBERS": RANDOM_NUMBERS}
    for name, key in KEYS.items():
        record[f"lots of the {name} key"] = _lots(key)
        record[f"lots of groups of the {name} key"] = _lots_of_groups(key)
    with fixed_keys():
        for tier in ("torch", "kernels") if kernels_are_there() else ("torch",):
            for name, key in KEYS.items():
                record[f"noise of the {name} key by {tier}"] = _noise(key, tier)
        for name, scenario in _SUMS.items():
            record[f"weights without noise, {name}"] = _weights_without_noise(scenario)
        record["weights without noise, random masks"] = _weights_with_masks()
    return record


def unraised(now: Numbers, committed: Numbers) -> str | None:
    """One line where the same key gives other numbers under the same `RANDOM_NUMBERS`; else None."""
    if now["RANDOM_NUMBERS"] != committed["RANDOM_NUMBERS"]:
        return None
    changed = [name for name in now if name in committed and not _alike(now[name], committed[name])]
    if not changed:
        return None
    return (
        f"the same key gives other numbers than the committed ones ({', '.join(changed)}), so that a seeded run could "
        "add one noise to two sums: raise RANDOM_NUMBERS in privacy/randomness.py, then run "
        "`python -m tools.golden write`."
    )


def verdict(now: Numbers, committed: Numbers) -> str | None:
    """One line that says what is to be done; None if the numbers are the committed ones."""
    missing = [name for name in now if name not in committed]
    if now["RANDOM_NUMBERS"] != committed["RANDOM_NUMBERS"]:
        missing.append("RANDOM_NUMBERS")
    if missing:
        return f"tests/golden/numbers.json is older ({', '.join(missing)}): run `python -m tools.golden write`."
    return unraised(now, committed)


def _alike(now: Any, then: Any) -> bool:
    if isinstance(now, list) and isinstance(then, list):
        return len(now) == len(then) and all(map(_alike, now, then))
    if isinstance(now, float) and isinstance(then, float):
        return math.isclose(now, then, rel_tol=2e-6, abs_tol=_TOLERANCE)
    return bool(now == then)


def _lots(key: int) -> list[Any]:
    """Lots 0 and 7 of two phases by each sampling, and the microbatch of each record of a lot."""
    schemes = [scheme for scheme in _schemes() if scheme.cycle == 1]
    record = []
    for scheme in (*schemes, ShuffledEpochs(40, 8)):
        record += _lots_of(scheme, key)
    lots = PrivateBatchSampler(schemes[0], key)
    lots.start_at(0)
    lots.microbatches = 3
    for rank in (0, 1):
        share, microbatch = lots.share(1, rank, 2)
        assert microbatch is not None
        record.append(["microbatches", rank, share.tolist(), microbatch.tolist()])
    return record


def _lots_of_groups(key: int) -> list[Any]:
    """Lots 0 and 7 of two phases where groups of records take turns."""
    record = []
    for scheme in _schemes():
        if scheme.cycle > 1:
            record += _lots_of(scheme, key)
    return record


def _schemes() -> list[Sampling]:
    return [make(40, "example") for make in worlds.SAMPLINGS.values()]


def _lots_of(scheme: Sampling, key: int) -> list[Any]:
    record: list[Any] = []
    lots = PrivateBatchSampler(scheme, key)
    for phase in (0, 1):
        lots.start_at(0)
        lots.phase = phase
        record.append([scheme.kind, phase, *(lots.lot(step).tolist() for step in (0, 7))])
    return record


class _Dot(nn.Module):
    """⟨w, x⟩, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def _mean(model: Any, batch: Any) -> Tensor:
    outputs: Tensor = model(batch[0]).mean()
    return outputs


def _noise(key: int, tier: str) -> list[list[float]]:
    """The noise of the first releases of a training without gradients, in units of its standard deviation."""
    native.select("on" if tier == "kernels" else "off")
    model = _Dot()
    rows = [np.zeros(_WIDTH)]
    with tempfile.TemporaryDirectory() as folder:
        strategy = _plain.make_strategy(Path(folder) / "ledger.jsonl", key, max_grad_norm=0.5)
        loader = PrivateDataLoader(
            Rows(torch.zeros(8, _WIDTH)), PrivateBatchSampler(worlds.SAMPLINGS["full"](8, "example"), key)
        )
        for _ in PrivateLoop(model, torch.optim.SGD(model.parameters(), lr=1.0), loader, strategy, _mean, _STEPS):
            rows.append(model.w.detach().double().numpy().copy())
    updates = -np.diff(np.array(rows), axis=0)
    std = strategy.mechanism.plan.parameter_stds[0]
    return [[round(float(value) * 8 / std, _NOISE_DIGITS) for value in update[[*_SHOWN]]] for update in updates]


_plain = Scenario("dpsgd", "full", "examples", "dense", "loop", "1", "straight", "torch")
_SUMS = {
    "flat": Scenario("clip_only", "poisson", "examples", "dense", "automatic", "1", "straight", "torch"),
    "lots of a fixed size": Scenario(
        "clip_only", "fixed_size", "pieces", "dense", "automatic", "1", "straight", "torch"
    ),
    "microbatches": Scenario("clip_only", "poisson", "microbatches", "dense", "automatic", "1", "straight", "torch"),
    "users": Scenario("clip_only", "poisson", "users", "dense", "automatic", "1", "straight", "torch"),
}


def _weights_without_noise(scenario: Scenario) -> list[float]:
    """Some weights after twenty steps of clipped sums in double precision."""
    native.select("off")
    model = worlds.network(scenario.network).double()
    module = worlds.Classifier(model, False, 0.2)
    with tempfile.TemporaryDirectory() as folder:
        strategy = scenario.make_strategy(Path(folder) / "ledger.jsonl")
        loader = worlds.lots_of(scenario.sampling, scenario.records == "users", 36, torch.float64)
        trainer_for(Path(folder), (strategy,), STEPS).fit(module, loader)
    return _first_weights(model)


class _Masks(nn.Module):
    """Leaves out what random numbers say, which come from the model's own stream."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand_like(x) > 0.3)


def _weights_with_masks() -> list[float]:
    native.select("off")
    model = nn.Sequential(nn.Flatten(), _Masks(), nn.Linear(worlds.SIDE**2, worlds.CLASSES)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = worlds.optimizer_of(model, 0.2)
    with tempfile.TemporaryDirectory() as folder:
        strategy = _SUMS["flat"].make_strategy(Path(folder) / "ledger.jsonl", clipping="per_layer")
        loader = worlds.lots_of("poisson", False, 36, torch.float64)
        for _ in PrivateLoop(model, optimizer, loader, strategy, worlds.mean_loss, _STEPS):
            pass
    return _first_weights(model)


def _first_weights(model: nn.Module) -> list[float]:
    """Norm and first numbers of the weights, to six digits."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return [significant(float(value), 6) for value in (flat.norm(), *flat[:5])]
