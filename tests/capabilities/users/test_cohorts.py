"""Records that are users: what every mechanism must show, and that lots, ledger, budget and resume are the same."""

from __future__ import annotations

import json
import math
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent
from dp_accounting.dp_event import DpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn
from torch.utils.data import Subset

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.loader import PrivateDataLoader
from dpbench.data.records import Rows
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records import LocalTraining
from dpbench.strategies import AdaptiveQuantileClipping, ClipOnly
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.recipes import EVERY
from tests.strategies.worlds import weights_of
from tests.support.checks import accepts_scale

STRATEGIES = EVERY
DOUBLE = {"precision": "64-true"}
BOUND = 0.3


@pytest.mark.parametrize("name", ["dpsgd", "groups", "quantile", "corrected"])
def test_fedsgd_of_one_example_each_is_dpsgd(tmp_path: Path, name: str) -> None:
    users = make_users([1] * 12)
    examples: Any = Subset(users.examples, [int(users.rows(user)[0]) for user in range(12)])
    examples.unit = "user"
    lots = PrivateBatchSampler(make_sampling("poisson", 12, 4, "user"), 0)
    loader = PrivateDataLoader(examples, lots, record_of_row=lambda batch: torch.arange(len(batch[0])))
    by_user, by_example = Toy(linear()), Toy(linear())
    options = {"steps": 3, "make": STRATEGIES[name], "noise_multiplier": 0.3}
    fit(tmp_path / "a", by_user, users, local=LocalTraining(lr=1.0, batch_size=None), **options)
    fit(tmp_path / "b", by_example, records=None, loader=loader, **options)
    torch.testing.assert_close(weights_of(by_user), weights_of(by_example), rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------------------- neighbors

KINDS = ("usual", "huge", "nan", "infinite", "many", "none")


def rows_of_kind(kind: str) -> Rows:
    inputs = torch.randn({"many": 1000, "none": 0}.get(kind, 6), WIDTH, generator=torch.Generator().manual_seed(8))
    inputs = inputs * {"huge": 1e30, "nan": math.nan, "infinite": math.inf}.get(kind, 1.0)
    return Rows(inputs, torch.full((len(inputs),), 5.0))


def everybody(*kinds: str) -> UserDataset:
    """Some usual users, and then one of each kind."""
    generator = torch.Generator().manual_seed(1)
    usual = {n: Rows(torch.randn(3, WIDTH, generator=generator), torch.ones(3)) for n in range(5)}
    return UserDataset.from_datasets({**usual, **{kind: rows_of_kind(kind) for kind in kinds}})


def clipped_sum(folder: Path, users: UserDataset, kind: str) -> Tensor:
    """Of a cohort of everybody."""
    module = Toy(linear())
    before = weights_of(module).double()
    local = LocalTraining(lr=1.0, batch_size=2, epochs=2, max_steps=40)
    loader = loader_of(users, len(users), kind)
    fit(folder, module, steps=1, local=local, make=ClipOnly, loader=loader, max_grad_norm=BOUND, trainer=DOUBLE)
    return (before - weights_of(module)) * len(users)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_one_user_moves_the_sum_by_at_most_the_bound(tmp_path: Path, kind: str) -> None:
    with_it = clipped_sum(tmp_path / "a", everybody(kind), "poisson")
    without = clipped_sum(tmp_path / "b", everybody(), "poisson")
    moved = float((with_it - without).norm())
    assert moved <= BOUND * (1 + 1e-12)
    if kind in ("usual", "many"):  # much longer than the bound
        assert moved == pytest.approx(BOUND, rel=1e-9)
    if kind in ("nan", "infinite", "none"):
        assert moved < 1e-12


@pytest.mark.parametrize("other", ["huge", "nan", "none"])
@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_one_user_in_the_place_of_another_moves_it_by_at_most_twice_the_bound(tmp_path: Path, other: str) -> None:
    one, two = (clipped_sum(tmp_path / kind, everybody(kind), "fixed_size") for kind in ("usual", other))
    assert float((one - two).norm()) <= 2 * BOUND * (1 + 1e-12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_bound_holds_in_every_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Norms in bfloat16 would let a user move the sum by 0.4 % more."""
    sums, own = [], ReleaseEngine.release

    def release(self: ReleaseEngine) -> list[Tensor]:
        sums.append(float(self.mechanism.total.double().norm()))
        return own(self)

    monkeypatch.setattr(ReleaseEngine, "release", release)
    users, module = make_users([5], torch.randn(5, WIDTH), 50 * torch.rand(5)), Toy(nn.Linear(WIDTH, 40))
    options = {"trainer": {"precision": precision}, "max_grad_norm": BOUND}
    fit(tmp_path, module, steps=3, make=ClipOnly, loader=loader_of(users, 1), **options)
    assert sums == pytest.approx([BOUND] * 3, rel=1e-5)


@pytest.mark.parametrize("kind", ["usual", "huge", "nan"])
@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_one_user_moves_the_quantile_count_by_at_most_half(tmp_path: Path, kind: str) -> None:
    """The same noise in both worlds: what differs in the next bound is the count."""
    make = partial(AdaptiveQuantileClipping, initial_max_grad_norm=BOUND, count_noise_std=1e-3, clip_learning_rate=0.2)
    bounds = []
    for other in (kind, "none"):  # the same population, for the same noise
        options = {"loader": loader_of(everybody(other), 6), "trainer": DOUBLE, "noise_multiplier": 1e-4, "seed": 7}
        strategy = fit(tmp_path / other, Toy(linear()), steps=1, make=make, **options)
        bounds.append(strategy.mechanism.plan.groups[0].max_grad_norm)
    assert abs(math.log(bounds[0] / bounds[1])) * 6 / 0.2 <= 2 * 0.5 + 1e-9  # from one user to another one
    queries = read_ledger(tmp_path / kind / "ledger.jsonl").releases[0][1].queries
    assert [query.sensitivity for query in queries if query.name.startswith("count")] == [0.5]


# ----------------------------------------------------------------------------------------- noise


class Wide(Toy):
    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(weights_of(self).double().clone())


@pytest.mark.parametrize("kind", ["poisson", "fixed_size"])
def test_the_noise_has_the_right_scale(tmp_path: Path, kind: str) -> None:
    module, local = Wide(nn.Linear(WIDTH, 500)), LocalTraining(lr=1e-40)  # by which no weight moves
    module.on_train_batch_end()
    loader = loader_of(make_users([1] * 40), 8, kind)
    options = {"noise_multiplier": 0.7, "max_grad_norm": 1.5}
    fit(tmp_path, module, steps=10, loader=loader, trainer=DOUBLE, local=local, **options)
    noise = torch.cat([(a - b) * 8 for a, b in pairwise(module.history)]).numpy()
    std = 0.7 * 1.5  # of z·C; that a replaced user moves 2C, the ledger says
    assert accepts_scale(noise, std)
    assert not accepts_scale(noise, std * 2 / 3) and not accepts_scale(noise, std * 3 / 2)
    assert abs(np.corrcoef(noise.reshape(10, -1)) - np.eye(10)).max() < 0.12  # fresh in each round


# ----------------------------------------------------------------------------------------- ledger and budget


def independent_epsilon(path: Path, delta: float) -> float:
    """RDP of what the ledger's lines say, with dp_accounting alone."""
    header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    relation = NeighboringRelation[header["neighboring_relation"].upper()]
    accountant = RdpAccountant(neighboring_relation=relation)
    for line in lines:
        z = sum((query["sensitivity"] / query["noise_std"]) ** 2 for query in line["queries"]) ** -0.5
        drawn = line["sampling"]
        assert drawn["unit"] == header["unit"] == "user"
        assert drawn["population"] == header["population"] == len(SIZES) != sum(SIZES)
        event: DpEvent = GaussianDpEvent(z)
        if drawn["kind"] == "poisson":
            event = PoissonSampledDpEvent(drawn["sample_rate"], event)
        else:
            event = SampledWithoutReplacementDpEvent(drawn["population"], drawn["batch_size"], event)
        accountant.compose(event)
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize(("name", "kind", "changes"), [("dpsgd", "poisson", 1), ("groups", "fixed_size", 2)])
def test_an_independent_accountant_gets_the_same_epsilon(tmp_path: Path, name: str, kind: str, changes: int) -> None:
    loader = loader_of(make_users(), 4, kind)
    strategy = fit(tmp_path, Toy(linear()), steps=4, make=STRATEGIES[name], loader=loader)
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert len(book.releases) == 4
    bounds = [group.max_grad_norm for group in strategy.mechanism.training_plan.groups]
    sensitivities = [query.sensitivity for query in book.releases[0][1].queries if "count" not in query.name]
    assert sensitivities == pytest.approx([changes * bound for bound in bounds])
    wanted = independent_epsilon(tmp_path / "ledger.jsonl", 1e-3)
    assert ledger_epsilon(book, 1e-3) == strategy.epsilon() == pytest.approx(wanted, rel=1e-6)
