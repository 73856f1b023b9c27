"""Every strategy inside Lightning: updates, ledger, resume, lots in pieces, microbatches, metrics, optimizers."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.privacy.accounting.composition import epsilon, ledger_epsilon, microbatch_epsilon
from dpbench.privacy.accounting.ledger import Ledger, read_ledger
from dpbench.privacy.events import Event, SumQuery, effective_noise_multiplier
from dpbench.strategies import (
    DPSGD,
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClipOnly,
    DiscretizedDPSGD,
    NoiseOnly,
    VectorGroups,
)
from tests.strategies.recipes import PRIVATE, Make
from tests.strategies.worlds import Classifier, Crash, Known, fit, loader_of, pictures, trainer_for, weights_of

QUIET = 1e-9
STEPS = 6
GROUPS = partial(VectorGroups, groups={"conv": ["*.0.*", "*.1.*"], "dense": "*.5.*"})
QUANTILE = partial(AdaptiveQuantileClipping, count_noise_std=3.0)
STRATEGIES: dict[str, Make] = {
    **PRIVATE,
    "quantile_layers": partial(QUANTILE, clipping="per_layer", update="linear"),
    "groups": partial(GROUPS, split="dimension"),
    "joint": partial(GROUPS, split="joint", scales={"conv": 2, "dense": 1}),
    "metrics": partial(DPSGD, metrics={"accuracy": 1.0, "loss": 3.0}, metrics_share=0.1),
    "microbatches": partial(DPSGD, microbatch_size=4),
    "all": partial(
        QUANTILE,
        microbatch_size=4,
        discretization_threshold=0.01,
        correction_threshold=0.01,
        metrics={"accuracy": 1.0},
        max_physical_batch_size=5,
    ),
}


class Measured(Classifier):
    """A classifier that offers private metrics and noise, like the project's own."""

    record_metrics = {"accuracy": 1, "loss": 1}  # noqa: RUF012

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        losses = nn.functional.cross_entropy(logits, batch[1], reduction="none")
        correct = (logits.argmax(1) == batch[1]).float()
        return {"loss": losses.mean(), "record_metrics": {"accuracy": correct.detach(), "loss": losses.detach()}}

    def noise_batch(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(size, 1, 8, 8, generator=generator)
        return images, torch.randint(3, (size,), generator=generator)


def classifier(dropout: bool = True) -> Measured:
    torch.manual_seed(3)
    module = Measured()
    if not dropout:
        module.net[4] = nn.Identity()
    return module


def book(folder: Path) -> Ledger:
    return read_ledger(folder / "ledger.jsonl")


@cache
def epsilon_of_plain_noise(noise_multiplier: float, steps: int) -> float:
    """ε of releases of plain DP-SGD."""
    sampling = make_sampling("poisson", 60, 12)
    return epsilon({Event(sampling, (SumQuery("all", 1.0, noise_multiplier),)): steps}, 1e-3)


@pytest.mark.own_key
@pytest.mark.parametrize("name", ["dpsgd", "mean", "quantile_layers", "joint", "metrics", "all"])
def test_resume_is_bit_identical_and_the_ledger_states_what_was_asked_for(tmp_path: Path, name: str) -> None:
    def run(folder: str, *more: pl.Callback, start: Path | None = None) -> tuple[Any, Tensor]:
        module = classifier()
        place = tmp_path / folder
        place.mkdir(exist_ok=True)
        options = {"logger": [MetricsCSV(RunFolder(place))], "log_every_n_steps": 2, "more": list(more)}
        strategy = fit(place, module, STEPS, STRATEGIES[name], trainer=options, start=start, fingerprint="x")
        return strategy, weights_of(module)

    strategy, whole = run("whole")
    with pytest.raises(RuntimeError, match="crash"):
        run("crashed", Crash(tmp_path / "mid.ckpt", 3))
    assert torch.equal(run("crashed", start=tmp_path / "mid.ckpt")[1], whole)
    for file in ("ledger.jsonl", "metrics.csv"):  # means of private metrics and epsilons up to each step included
        assert (tmp_path / "crashed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    ledger = book(tmp_path / "whole")
    assert [release.number for _, release in ledger.releases] == list(range(STEPS))
    changes = 2 if ledger.header.microbatch_size > 1 else 1
    for _, release in ledger.releases:
        assert effective_noise_multiplier(release.queries) * changes == pytest.approx(1.0, rel=1e-9)
    plain = epsilon_of_plain_noise(1.0 / changes, STEPS)
    assert ledger_epsilon(ledger, 1e-3) == pytest.approx(plain, rel=1e-8)
    assert strategy.epsilon() == pytest.approx(plain, rel=1e-8)
    assert len(strategy._releases.budget.spent) == 1  # bounds that differ at every release cost the same


@pytest.mark.parametrize(
    ("name", "size"),
    [("discretized", 1), ("quantile_layers", 5), ("joint", 1000), ("metrics", 5), ("microbatches", 1)],
)
def test_lots_in_pieces_change_nothing(tmp_path: Path, name: str, size: int) -> None:
    ends = []
    for rows in (None, size):
        module = classifier(dropout=False)
        # Steps are few: a record at the edge of a threshold may fall on either side by rounding.
        fit(tmp_path / str(rows), module, 3, STRATEGIES[name], max_physical_batch_size=rows)
        ends.append(weights_of(module))
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)
    one, other = (book(tmp_path / str(rows)).releases for rows in (None, size))
    assert [release.sampling for _, release in one] == [release.sampling for _, release in other]


def known(folder: Path, make: Make) -> tuple[PrivateBatchSampler, Tensor, list[Tensor]]:
    """Lots, records, and what three releases without noise were."""
    data = torch.randn(60, 5)
    module = Known(5)
    fit(folder, module, 3, make, loader_of(TensorDataset(data), 12), noise_multiplier=QUIET)
    weights = torch.stack([torch.zeros(5), *module.history])
    return PrivateBatchSampler(make_sampling("poisson", 60, 12), 0), data, list(-weights.diff(dim=0))


def test_updates_of_automatic_clipping_by_hand(tmp_path: Path) -> None:
    lots, data, updates = known(tmp_path, partial(AutomaticClipping, stability=0.1, max_grad_norm=2.0))
    for step, moved in enumerate(updates):
        rows = data[lots.lot(step)]
        wanted = (2.0 * rows / (rows.norm(dim=1, keepdim=True) + 0.1)).sum(0) / 12
        torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-5)


def test_microbatches_by_hand(tmp_path: Path) -> None:
    lots, data, updates = known(tmp_path, STRATEGIES["microbatches"])
    lots.microbatches = 3
    for step, moved in enumerate(updates):
        positions, own = lots.share(step, 0, 1)
        assert own is not None
        means = torch.stack([data[positions[own == number]].sum(0) / 4 for number in range(3)])
        wanted = (means / means.norm(dim=1, keepdim=True).clamp(min=1)).mean(0)
        torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-5)
    ledger = book(tmp_path)
    assert ledger.header.unit == "example" and ledger.header.microbatch_size == 4
    assert ledger.releases[0][1].queries[0].sensitivity == 2.0


def test_epsilon_of_a_microbatch_counts_metrics_of_all_its_examples(tmp_path: Path) -> None:
    """A metric is a sum over examples: one moves it by B, a whole microbatch by 4B."""
    fit(tmp_path, classifier(), 2, noise_multiplier=2.0, microbatch_size=4, metrics={"accuracy": 1.0})
    ledger = book(tmp_path)
    gradient, metric = ledger.releases[0][1].queries
    assert (gradient.sensitivity, metric.sensitivity) == (2.0, 1.0)
    assert (gradient.unit, metric.unit) == ("microbatch", "")
    whole = effective_noise_multiplier([gradient._replace(sensitivity=1.0), metric._replace(sensitivity=4.0)])
    assert microbatch_epsilon(ledger, 1e-3) == pytest.approx(epsilon_of_plain_noise(whole, 2), rel=1e-6)


def test_microbatch_of_a_record_is_independent_of_the_others() -> None:
    """Leave a record out of a lot: nobody else moves. (Drawn in the order of the lot, sorted afterwards.)"""
    lots = PrivateBatchSampler(make_sampling("fixed_size", 1000, 64), 0)
    lots.microbatches = 16
    counts = np.zeros(16)
    pairs = 0
    for step in range(400):
        lot = lots.lot(step)
        positions, own = lots.share(step, 0, 1)
        assert sorted(positions) == sorted(lot)
        counts += np.bincount(own, minlength=16)
        pairs += own[positions == lot[0]] == own[positions == lot[1]]
    assert abs(counts / counts.sum() - 1 / 16).max() < 0.006
    assert abs(pairs / 400 - 1 / 16) < 4 * (1 / 16 / 400) ** 0.5
    for rank in (0, 1):
        assert set(lots.share(3, rank, 2)[1] % 2) == {rank}  # a microbatch lies on one rank as a whole


def test_mean_clipping_starts_from_noise_alone(tmp_path: Path) -> None:
    """The first bounds are the same whatever the data, and near the norms of noise."""
    first = []
    for factor in (1.0, 100.0):
        images, labels = pictures().tensors
        loader = loader_of(TensorDataset(images * factor, labels))
        strategy = fit(tmp_path / str(factor), classifier(), 2, STRATEGIES["mean"], loader)
        first.append([group.max_grad_norm for group in strategy.mechanism.training_plan.groups])
    assert first[0] == first[1]
    assert all(bound > 1e-3 for bound in first[0])


def test_mean_clipping_without_noise_data(tmp_path: Path) -> None:
    make = partial(AdaptiveMeanClipping, norm_noise_multiplier=9.0)
    with pytest.raises(ConfigurationError, match="noise_batch.*or set initial_max_grad_norm"):
        fit(tmp_path, Classifier(), make=make)
    assert not (tmp_path / "ledger.jsonl").exists()
    fit(tmp_path, Classifier(), make=make, initial_max_grad_norm=0.5)


def test_references_are_what_they_say(tmp_path: Path) -> None:
    """No noise at an enormous bound, and no clipping at no noise, are both plain SGD; and neither has a ledger."""
    lots = PrivateBatchSampler(make_sampling("poisson", 60, 12), 0)
    plain = classifier(dropout=False)
    optimizer = plain.configure_optimizers()
    for step in range(4):
        batch = pictures()[torch.from_numpy(lots.lot(step))]
        optimizer.zero_grad()
        (plain.loss(batch) * len(batch[1]) / 12).backward()
        optimizer.step()
    for make, options in ((ClipOnly, {"max_grad_norm": 1e6}), (NoiseOnly, {"noise_multiplier": QUIET})):
        module = classifier(dropout=False)
        strategy = fit(tmp_path, module, 4, make, **options)
        torch.testing.assert_close(weights_of(module), weights_of(plain), rtol=1e-4, atol=1e-5)
        assert strategy.epsilon() == float("inf")
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(ConfigurationError, match="ClipOnly is not private"):
        ClipOnly(target_epsilon=1.0)
    with pytest.raises(ConfigurationError, match="no private metrics"):
        NoiseOnly(noise_multiplier=1.0, metrics={"loss": 1.0})


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (DiscretizedDPSGD, {"priors": [0.5, 0.5, 0.5]}, "three probabilities .* that sum to 1"),
        (DPSGD, {"priors": [0.2, 0.6, 0.2]}, "set correction_threshold"),
        (DPSGD, {"metrics": {"loss": -1}}, "bound of metric loss"),
        (DPSGD, {"metrics": {}}, "metrics must map names to bounds"),
        (DPSGD, {"metrics": {"loss": 1}, "metrics_share": 1.0}, "metrics_share"),
        (AutomaticClipping, {"stability": -1}, "stability must be"),
        (AutomaticClipping, {"stability": 0}, "the paper uses 0.01.*rounding error"),
        (VectorGroups, {"split": "joint"}, "scales and split=joint belong together"),
        (VectorGroups, {"max_grad_norm": 1, "max_grad_norms": {"a": 1}}, "not both"),
    ],
    ids=["priors", "no correction", "bound", "no metrics", "share", "stability", "rounding", "joint", "both"],
)
def test_bad_options_are_refused_at_once(make: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(noise_multiplier=1, **options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(partial(DPSGD, microbatch_size=24), "does not fit batches of 12", id="microbatches"),
        pytest.param(partial(DPSGD, metrics={"f1": 1.0}), "no metric f1; it offers accuracy, loss", id="metric"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_training(tmp_path: Path, make: Make, words: str) -> None:
    module = classifier()
    before = weights_of(module).clone()
    with pytest.raises(ConfigurationError, match=words):
        fit(tmp_path, module, make=make)
    assert torch.equal(weights_of(module), before)
    assert not (tmp_path / "ledger.jsonl").exists()


@pytest.mark.parametrize("times", [0, 3])
def test_metrics_of_none_and_of_other_rows_than_records(tmp_path: Path, times: int) -> None:
    """Three values for a record would count three times."""

    class Other(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            metrics = {name: values.repeat(times) for name, values in output["record_metrics"].items()}
            return {"loss": output["loss"], **({"record_metrics": metrics} if times else {})}

    with pytest.raises(ConfigurationError, match="must return \"record_metrics\" with 'accuracy'"):
        fit(tmp_path, Other(), make=STRATEGIES["metrics"])


def test_empty_lots_with_metrics(tmp_path: Path) -> None:
    loader = loader_of(pictures(), expected=0.5)
    assert any(not len(loader.lots.lot(step)) for step in range(6))
    assert fit(tmp_path, classifier(), 6, STRATEGIES["metrics"], loader).releases == 6


def saved(folder: Path, make: Make) -> Path:
    """A checkpoint of four steps."""
    module = classifier()
    fit(folder, module, 4, make)
    module.trainer.save_checkpoint(folder / "last.ckpt")
    return folder / "last.ckpt"


def test_no_strategy_goes_on_from_a_past_that_it_does_not_know(tmp_path: Path) -> None:
    private = saved(tmp_path / "private", DPSGD)
    plain = tmp_path / "plain.ckpt"
    trainer = trainer_for(tmp_path / "plain", pl.Callback(), 4)
    trainer.fit(classifier(), DataLoader(pictures(), 12))
    trainer.save_checkpoint(plain)
    later = partial(fit, tmp_path / "later", steps=8)
    for start in (saved(tmp_path / "clip_only", ClipOnly), plain):
        with pytest.raises(ConfigurationError, match="not made by a private strategy"):
            later(classifier(), make=AutomaticClipping, start=start)
    with pytest.raises(ConfigurationError, match="would void its epsilon"):
        later(classifier(), make=NoiseOnly, start=private)
    # Another private strategy may go on, and counts what was released before.
    assert fit(tmp_path / "private", classifier(), 8, AutomaticClipping, start=private).releases == 8
    assert len(book(tmp_path / "private").releases) == 8
    with pytest.raises(LedgerError, match="has 4 releases"):
        later(classifier(), make=AutomaticClipping, start=private)


def test_a_resumed_run_takes_its_new_bound(tmp_path: Path) -> None:
    start = saved(tmp_path, DPSGD)
    strategy = fit(tmp_path, classifier(), 6, start=start, max_grad_norm=0.001)
    assert strategy.mechanism.plan.groups[0].max_grad_norm == 0.001


def test_manual_optimization(tmp_path: Path) -> None:
    for name in ("quantile", "microbatches"):
        assert fit(tmp_path / name, Classifier(manual=True), 2, STRATEGIES[name]).releases == 2
    with pytest.raises(ConfigurationError, match="metrics needs automatic optimization"):
        fit(tmp_path, Classifier(manual=True), make=STRATEGIES["metrics"])


def test_target_epsilon_with_every_kind_of_statistic(tmp_path: Path) -> None:
    strategy = fit(tmp_path, classifier(), 5, STRATEGIES["all"], noise_multiplier=None, target_epsilon=9.0)
    assert strategy.releases == 5
    assert 8.99 < strategy.epsilon() <= 9.0
