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
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SampledWithoutReplacementDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import DpEvent
from dp_accounting.privacy_accountant import NeighboringRelation
from dp_accounting.rdp import RdpAccountant
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpbench.capabilities.users.dataset import UserDataset
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.records import Rows
from dpbench.privacy.accounting.composition import ledger_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.releases import ReleaseEngine
from dpbench.records import LocalTraining
from dpbench.strategies import (
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    ClipOnly,
)
from tests.capabilities.users.worlds import SIZES, WIDTH, Toy, fit, linear, loader_of, make_users
from tests.strategies.recipes import EVERY
from tests.strategies.worlds import weights_of
from tests.support.checks import accepts_scale

STRATEGIES = {**EVERY, "mean": partial(AdaptiveMeanClipping, initial_max_grad_norm=0.3)}
DOUBLE = {"precision": "64-true"}


# ----------------------------------------------------------------------------------------- FedSGD is DP-SGD by user


class Groups(Dataset[Any]):
    """An item is all that a user has: what the example engine takes with `record_of_row`."""

    unit = "user"

    def __init__(self, users: UserDataset) -> None:
        examples = [users.examples[row] for row in range(len(users.examples))]
        self.items = [[examples[int(row)] for row in users.rows(user)] for user in range(len(users))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, user: int) -> list[Any]:
        return self.items[user]


def rows_of_users(items: list[list[Any]]) -> tuple[Tensor, Tensor, Tensor]:
    rows = [(x, y, number) for number, item in enumerate(items) for x, y in item]
    if not rows:
        return torch.zeros(0, WIDTH), torch.zeros(0), torch.zeros(0, dtype=torch.long)
    inputs, targets, numbers = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets), torch.tensor(numbers)


@pytest.mark.parametrize("name", STRATEGIES)
def test_fedsgd_is_the_example_engine_with_a_users_rows_as_one_record(tmp_path: Path, name: str) -> None:
    # To the example engine a record without a row is no record; a user without examples is one, of norm 0.
    sizes = [size for size in SIZES if size] if name == "quantile" else SIZES
    by_user, by_record, users = Toy(linear()), Toy(linear()), make_users(sizes)
    sampling = make_sampling("poisson", len(users), 4, "user")
    loader = LotLoader(Groups(users), Lots(sampling, 0), rows_of_users, record_of_row=lambda batch: batch[2])
    options = {"steps": 3, "make": STRATEGIES[name], "noise_multiplier": 0.3, "max_grad_norm": 0.4}
    if name in ("quantile", "mean"):
        options.pop("max_grad_norm")
    fit(tmp_path / "a", by_user, users, local=LocalTraining(lr=1.0, batch_size=None), **options)
    fit(tmp_path / "b", by_record, records=None, loader=loader, **options)
    assert (weights_of(by_user) - weights_of(linear())).norm() > 0.01
    torch.testing.assert_close(weights_of(by_user), weights_of(by_record), rtol=1e-5, atol=1e-5)
    if (tmp_path / "a/ledger.jsonl").exists():
        books = [read_ledger(tmp_path / folder / "ledger.jsonl").releases for folder in "ab"]
        assert [r.sampling for _, r in books[0]] == [r.sampling for _, r in books[1]]
        for (_, a), (_, b) in zip(*books, strict=True):
            assert [q.noise_std for q in a.queries] == pytest.approx([q.noise_std for q in b.queries], rel=1e-5)


# ----------------------------------------------------------------------------------------- neighbors

BOUND = 0.3
KINDS = ("usual", "huge", "nan", "infinite", "one", "many", "same", "small", "none")


def rows_of_kind(kind: str) -> Rows:
    count = {"one": 1, "many": 10_000, "none": 0}.get(kind, 6)
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(8))
    inputs = {"huge": inputs * 1e30, "nan": inputs * math.nan, "infinite": inputs / 0, "same": inputs[[0] * count],
              "small": inputs * 0}.get(kind, inputs)  # fmt: skip
    targets = torch.zeros(count) if kind == "small" else torch.full((count,), 5.0)
    return Rows(inputs, targets)


def everybody(kinds: list[str], others: int = 5) -> UserDataset:
    """Some usual users, and then one of each kind."""
    generator = torch.Generator().manual_seed(1)
    usual = {n: Rows(torch.randn(3, WIDTH, generator=generator), torch.ones(3)) for n in range(others)}
    return UserDataset.from_datasets({**usual, **{f"{kind}{n}": rows_of_kind(kind) for n, kind in enumerate(kinds)}})


def clipped_sum(folder: Path, users: UserDataset, local: LocalTraining, kind: str = "poisson") -> Tensor:
    """Of a cohort of everybody."""
    net = linear()
    net[-1].bias.data.zero_()
    module, before = Toy(net), weights_of(net).double()
    loader = loader_of(users, len(users), kind)
    fit(folder, module, steps=1, local=local, make=ClipOnly, loader=loader, max_grad_norm=BOUND, trainer=DOUBLE)
    return (before - weights_of(module)) * len(users)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_one_user_moves_the_sum_by_at_most_the_bound(tmp_path: Path, kind: str) -> None:
    local = LocalTraining(lr=1.0, batch_size=2, epochs=2, max_steps=40)
    with_it = clipped_sum(tmp_path / "a", everybody([kind]), local)
    without = clipped_sum(tmp_path / "b", everybody([]), local)
    moved = float((with_it - without).norm())
    assert moved <= BOUND * (1 + 1e-12)
    if kind in ("usual", "one", "many", "same"):  # much longer than the bound
        assert moved == pytest.approx(BOUND, rel=1e-9)
    if kind in ("nan", "infinite", "none"):
        assert moved < 1e-12


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_one_user_in_the_place_of_another_moves_it_by_at_most_twice_the_bound(tmp_path: Path, other: str) -> None:
    local = LocalTraining(lr=1.0, batch_size=2)
    one = clipped_sum(tmp_path / "a", everybody(["usual"]), local, "fixed_size")
    two = clipped_sum(tmp_path / "b", everybody([other]), local, "fixed_size")
    assert float((one - two).norm()) <= 2 * BOUND * (1 + 1e-12)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_bound_holds_in_every_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Norms in bfloat16 would let a user move the sum by 0.4 % more."""
    sums, own = [], ReleaseEngine.release

    def release(self: ReleaseEngine) -> list[Tensor]:
        sums.append(float(self.mechanism.total.double().norm()))
        return own(self)

    monkeypatch.setattr(ReleaseEngine, "release", release)
    for seed in range(5):
        torch.manual_seed(seed)
        users, module = make_users([5], torch.randn(5, WIDTH), 50 * torch.rand(5)), Toy(nn.Linear(WIDTH, 40))
        loader, options = loader_of(users, 1), {"trainer": {"precision": precision}, "max_grad_norm": BOUND}
        fit(tmp_path / str(seed), module, steps=1, make=ClipOnly, loader=loader, **options)
    assert sums == pytest.approx([BOUND] * 5, rel=1e-5)


def test_replace_one_is_in_the_ledger(tmp_path: Path) -> None:
    fit(tmp_path, Toy(linear()), loader=loader_of(make_users(), 4, "fixed_size"), max_grad_norm=BOUND)
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert book.header.neighboring_relation == "replace_one" and book.header.unit == "user"
    assert [query.sensitivity for _, release in book.releases for query in release.queries] == [2 * BOUND] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:updates of some users are not finite")
def test_one_user_moves_the_quantile_count_by_at_most_half(tmp_path: Path, kind: str) -> None:
    """The same noise in both worlds: what differs in the next bound is the count."""
    bounds = []
    for folder, kinds in (("a", [kind]), ("b", ["none"])):  # the same population, for the same noise
        options = {
            "initial_max_grad_norm": BOUND,
            "count_noise_std": 1e-3,
            "clip_learning_rate": 0.2,
            "noise_multiplier": 1e-4,
        }
        strategy = fit(
            tmp_path / folder, Toy(linear()), steps=1, make=AdaptiveQuantileClipping, trainer=DOUBLE, seed=7,
            loader=loader_of(everybody(kinds), 6), **options,
        )  # fmt: skip
        bounds.append(strategy.mechanism.plan.groups[0].max_grad_norm)
    assert abs(math.log(bounds[0] / bounds[1])) * 6 / 0.2 <= 2 * 0.5 + 1e-9  # from one user to another one
    queries = read_ledger(tmp_path / "a/ledger.jsonl").releases[0][1].queries
    assert [query.sensitivity for query in queries if query.name.startswith("count")] == [0.5]


# ----------------------------------------------------------------------------------------- noise


class Wide(Toy):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 500))

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(weights_of(self).double().clone())


@pytest.mark.parametrize("kind", ["poisson", "fixed_size"])
def test_the_noise_has_the_right_scale(tmp_path: Path, kind: str) -> None:
    module, users = Wide(), make_users([1] * 40)
    start = weights_of(module).double().clone()
    fit(
        tmp_path, module, steps=10, loader=loader_of(users, 8, kind), noise_multiplier=0.7, max_grad_norm=1.5,
        trainer=DOUBLE, local=LocalTraining(lr=1e-40),
    )  # fmt: skip  # no weight moves by so little: what is released is noise
    places = [start, *module.history]
    noise = torch.cat([(a - b) * 8 for a, b in pairwise(places)]).numpy()
    std = 0.7 * 1.5  # of z·C; that a replaced user moves 2C, the ledger says
    assert accepts_scale(noise, std)
    assert not accepts_scale(noise, std * 2 / 3) and not accepts_scale(noise, std * 3 / 2)
    halves = noise.reshape(10, -1)
    assert abs(np.corrcoef(halves) - np.eye(10)).max() < 0.12  # fresh in each round


# ----------------------------------------------------------------------------------------- ledger and budget


def independent_epsilon(path: Path, delta: float) -> float:
    """RDP of what the ledger's lines say, with dp_accounting alone."""
    header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    relations = {
        "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace_one": NeighboringRelation.REPLACE_ONE
    }  # fmt: skip
    accountant = RdpAccountant(neighboring_relation=relations[header["neighboring_relation"]])
    for line in lines:
        z = sum((query["sensitivity"] / query["noise_std"]) ** 2 for query in line["queries"]) ** -0.5
        drawn = line["sampling"]
        assert drawn["unit"] == header["unit"] == "user" and drawn["population"] == header["population"]
        event: DpEvent = GaussianDpEvent(z)
        if drawn["kind"] == "poisson":
            event = PoissonSampledDpEvent(drawn["sample_rate"], event)
        else:
            size = drawn["batch_size"]
            event = SampledWithoutReplacementDpEvent(drawn["population"], size, event)
        accountant.compose(SelfComposedDpEvent(event, 1))
    return float(accountant.get_epsilon(delta))


@pytest.mark.parametrize("kind", ["poisson", "fixed_size"])
@pytest.mark.parametrize("name", ["dpsgd", "layers", "quantile", "mean", "groups", "automatic"])
def test_an_independent_accountant_gets_the_same_epsilon(tmp_path: Path, name: str, kind: str) -> None:
    strategy = fit(tmp_path, Toy(linear()), steps=4, make=STRATEGIES[name], loader=loader_of(make_users(), 4, kind))
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert book.header.unit == "user" and book.header.population == len(SIZES) != sum(SIZES)
    assert len(book.releases) == 4 and book.header.microbatch_size == 1
    wanted = independent_epsilon(tmp_path / "ledger.jsonl", 1e-3)
    assert ledger_epsilon(book, 1e-3) == strategy.epsilon() == pytest.approx(wanted, rel=1e-6)


def test_a_target_is_met_and_a_budget_stops(tmp_path: Path) -> None:
    met = fit(tmp_path / "a", Toy(linear()), steps=6, noise_multiplier=None, target_epsilon=3.0)
    assert met.releases == 6 and 2.9 < met.epsilon() <= 3.0
    stopped = fit(tmp_path / "b", Toy(linear()), steps=60, target_epsilon=6.0)
    assert 1 <= stopped.releases < 60 and stopped.epsilon() <= 6.0
