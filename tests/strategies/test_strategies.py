"""Every strategy inside Lightning: updates, ledger, resume, lots in pieces, microbatches, metrics, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from dpbench.data.lots import Lots, make_sampling
from dpbench.errors import ConfigurationError, LedgerError
from dpbench.harness.runs.folder import RunFolder
from dpbench.harness.runs.metrics_log import MetricsCSV
from dpbench.privacy.accounting.composition import ledger_epsilon, microbatch_epsilon
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.privacy.events import effective_noise_multiplier
from dpbench.strategies import (
    DPSGD,
    AdaptiveMeanClipping,
    AdaptiveQuantileClipping,
    AutomaticClipping,
    ClipOnly,
    DiscretizedDPSGD,
    NoiseOnly,
    PrivateStrategy,
    VectorGroups,
)
from tests.strategies.recipes import PRIVATE, Make
from tests.strategies.worlds import Classifier, Known, loader_of, pictures, trainer_for, update, weights_of
from tools.combinations import OPTIMIZERS

QUIET = 1e-9
STRATEGIES: dict[str, Make] = {
    **PRIVATE,
    "quantile_layers": partial(AdaptiveQuantileClipping, clipping="per_layer", count_noise_std=3.0, update="linear"),
    "groups": partial(VectorGroups, groups={"conv": ["*.0.*", "*.1.*"], "dense": "*.5.*"}, split="dimension"),
    "joint": partial(
        VectorGroups,
        groups={"conv": ["*.0.*", "*.1.*"], "dense": "*.5.*"},
        split="joint",
        scales={"conv": 2, "dense": 1},
    ),
    "metrics": partial(DPSGD, metrics={"accuracy": 1.0, "loss": 3.0}, metrics_share=0.1),
    "microbatches": partial(DPSGD, microbatch_size=4),
    "all": partial(
        AdaptiveQuantileClipping,
        count_noise_std=3.0,
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


def classifier() -> Measured:
    torch.manual_seed(3)
    return Measured()


def fit(folder: Path, make: Make, module: pl.LightningModule, steps: int = 6, **options: Any) -> PrivateStrategy:
    given = {"trainer": {}, "loader": None, "ckpt_path": None} | options
    trainer_options, loader, start = (given.pop(key) for key in ("trainer", "loader", "ckpt_path"))
    strategy = make(**{"noise_multiplier": 1.0, "seed": 0, "delta": 1e-3, **given})
    trainer = trainer_for(folder, strategy, steps, **trainer_options)
    trainer.fit(module, loader or loader_of(pictures()), ckpt_path=start, weights_only=False)
    return strategy


@cache
def epsilon_of_plain_noise(noise_multiplier: float) -> float:
    """ε of nine releases of plain DP-SGD."""
    with TemporaryDirectory() as folder:
        fit(Path(folder), DPSGD, classifier(), steps=9, noise_multiplier=noise_multiplier)
        return ledger_epsilon(read_ledger(Path(folder) / "ledger.jsonl"), 1e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_ledger_states_what_was_asked_for(tmp_path: Path, name: str) -> None:
    strategy = fit(tmp_path, STRATEGIES[name], classifier(), steps=9)
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert [release.number for _, release in book.releases] == list(range(9))
    size = book.header.microbatch_size
    changes = 2 if size > 1 else 1
    for _, release in book.releases:
        assert effective_noise_multiplier(release.queries) * changes == pytest.approx(1.0, rel=1e-9)
    plain = epsilon_of_plain_noise(1.0 / changes)
    assert ledger_epsilon(book, 1e-3) == pytest.approx(plain, rel=1e-8)
    assert strategy.epsilon() == pytest.approx(plain, rel=1e-8)
    assert ledger_epsilon(book, 1e-3, "pld") <= plain
    assert len(strategy._releases.budget.spent) == 1  # bounds that differ at every release cost the same


@pytest.mark.own_key
@pytest.mark.parametrize("name", STRATEGIES)
def test_resume_is_bit_identical(tmp_path: Path, name: str) -> None:
    class Stop(pl.Callback):
        observes_only = True

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                trainer.save_checkpoint(tmp_path / "mid.ckpt")
            if trainer.global_step == 9:  # two releases after the checkpoint: a crash
                raise RuntimeError("crash")

    def run(folder: str, *more: pl.Callback, start: Path | None = None) -> Tensor:
        module, place = classifier(), tmp_path / folder
        options = {"logger": [MetricsCSV(RunFolder(place))], "log_every_n_steps": 4, "more": list(more)}
        place.mkdir(exist_ok=True)
        fit(place, STRATEGIES[name], module, 13, fingerprint="x", trainer=options, ckpt_path=start)
        return weights_of(module)

    whole = run("whole")
    with pytest.raises(RuntimeError, match="crash"):
        run("crashed", Stop())
    assert torch.equal(run("crashed", start=tmp_path / "mid.ckpt"), whole)
    for file in ("ledger.jsonl", "metrics.csv"):  # means of private metrics and epsilons up to each step included
        assert (tmp_path / "crashed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("name", ["discretized", "quantile_layers", "joint", "metrics", "microbatches"])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_lots_in_pieces_change_nothing(tmp_path: Path, name: str, size: int) -> None:
    whole, pieces = classifier(), classifier()
    whole.net[4] = pieces.net[4] = nn.Identity()
    # Steps are few: a record at the edge of a threshold may fall on either side by rounding.
    fit(tmp_path / "a", STRATEGIES[name], whole, 3)
    fit(tmp_path / "b", STRATEGIES[name], pieces, 3, max_physical_batch_size=size)
    torch.testing.assert_close(weights_of(pieces), weights_of(whole), rtol=1e-3, atol=1e-4)


def test_updates_of_automatic_clipping_by_hand(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(60, 5))
    module = Known(5)
    fit(
        tmp_path,
        partial(AutomaticClipping, stability=0.1, max_grad_norm=2.0),
        module,
        3,
        loader=loader_of(data, 12),
        noise_multiplier=QUIET,
    )
    lots, weights = Lots(make_sampling("poisson", 60, 12), 0), torch.zeros(5)
    for step in range(3):
        rows = data.tensors[0][lots.lot(step)]
        weights = weights - (2.0 * rows / (rows.norm(dim=1, keepdim=True) + 0.1)).sum(0) / 12
        torch.testing.assert_close(module.history[step], weights, rtol=1e-4, atol=1e-5)


def test_microbatches_by_hand(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(60, 5))
    module = Known(5)
    fit(tmp_path, partial(DPSGD, microbatch_size=4), module, 3, loader=loader_of(data, 12), noise_multiplier=QUIET)
    lots, weights = Lots(make_sampling("poisson", 60, 12), 0), torch.zeros(5)
    lots.microbatches = 3
    for step in range(3):
        positions, own = lots.share(step, 0, 1)
        assert own is not None
        total = torch.zeros(5)
        for number in range(3):
            mean = data.tensors[0][positions[own == number]].sum(0) / 4
            total += mean * min(1.0, 1 / max(float(mean.norm()), 1e-9))
        weights = weights - total / 3
        torch.testing.assert_close(module.history[step], weights, rtol=1e-4, atol=1e-5)
    book = read_ledger(tmp_path / "ledger.jsonl")
    assert book.header.unit == "example" and book.header.microbatch_size == 4
    assert book.releases[0][1].queries[0].sensitivity == 2.0


def test_both_epsilons_of_microbatches(tmp_path: Path) -> None:
    """Per example: twice the sensitivity. For a fixed microbatch: the paper's figure."""
    fit(tmp_path / "a", DPSGD, classifier(), microbatch_size=4, noise_multiplier=2.0)
    fit(tmp_path / "b", DPSGD, classifier(), noise_multiplier=1.0)
    fit(tmp_path / "c", DPSGD, classifier(), noise_multiplier=2.0)
    books = {name: read_ledger(tmp_path / name / "ledger.jsonl") for name in "abc"}
    assert ledger_epsilon(books["a"], 1e-3) == pytest.approx(ledger_epsilon(books["b"], 1e-3))
    assert microbatch_epsilon(books["a"], 1e-3) == pytest.approx(ledger_epsilon(books["c"], 1e-3))
    assert microbatch_epsilon(books["c"], 1e-3) == ledger_epsilon(books["c"], 1e-3)
    # A metric is a sum over examples: one moves it by B, a whole microbatch by 4B.
    options = {"microbatch_size": 4, "metrics": {"accuracy": 1.0}}
    fit(tmp_path / "d", partial(DPSGD, **options), classifier(), noise_multiplier=2.0)
    book = read_ledger(tmp_path / "d/ledger.jsonl")
    gradient, metric = book.releases[0][1].queries
    assert (gradient.sensitivity, metric.sensitivity) == (2.0, 1.0)
    assert (gradient.unit, metric.unit) == ("microbatch", "")
    whole = effective_noise_multiplier([gradient._replace(sensitivity=1.0), metric._replace(sensitivity=4.0)])
    fit(tmp_path / "e", DPSGD, classifier(), noise_multiplier=whole)
    same = ledger_epsilon(read_ledger(tmp_path / "e/ledger.jsonl"), 1e-3)
    assert microbatch_epsilon(book, 1e-3) == pytest.approx(same, rel=1e-6)


def test_microbatch_of_a_record_is_independent_of_the_others() -> None:
    """Leave a record out of a lot: nobody else moves. (Drawn in the order of the lot, sorted afterwards.)"""
    lots = Lots(make_sampling("fixed_size", 1000, 64), 0)
    lots.microbatches = 16
    counts = torch.zeros(16)
    pairs = 0
    for step in range(400):
        positions, own = lots.share(step, 0, 1)
        assert sorted(positions.tolist()) == sorted(lots.lot(step).tolist())
        assert own is not None
        counts += torch.bincount(torch.from_numpy(own), minlength=16)
        first, second = lots.lot(step)[:2]
        where = dict(zip(positions.tolist(), own.tolist(), strict=True))
        pairs += where[int(first)] == where[int(second)]
    assert float((counts / counts.sum() - 1 / 16).abs().max()) < 0.006
    assert abs(pairs / 400 - 1 / 16) < 4 * (1 / 16 / 400) ** 0.5
    halves = [lots.share(3, rank, 2) for rank in (0, 1)]
    for rank, (_, own) in enumerate(halves):
        assert own is not None and set(own % 2) == {rank}  # a microbatch lies on one rank as a whole


def test_private_metrics_are_released_with_noise(tmp_path: Path) -> None:
    strategy = fit(tmp_path, STRATEGIES["metrics"], classifier(), steps=4)
    assert set(strategy.mechanism.metrics) == {"private/accuracy", "private/loss"}
    queries = {query.name: query for query in read_ledger(tmp_path / "ledger.jsonl").releases[0][1].queries}
    z = (2 / 0.1) ** 0.5
    assert queries["metric/loss"].noise_std == pytest.approx(3 * z)
    quiet = fit(tmp_path / "q", STRATEGIES["metrics"], classifier(), steps=1, noise_multiplier=QUIET)
    module, lots = classifier(), Lots(make_sampling("poisson", 60, 12), 0)
    images, labels = pictures()[torch.from_numpy(lots.lot(0))]
    module.eval()
    share = float((module.net(images).argmax(1) == labels).float().sum()) / 12
    assert quiet.mechanism.metrics["private/accuracy"] == pytest.approx(share, abs=0.26)  # dropout


def test_mean_clipping_starts_from_noise_alone(tmp_path: Path) -> None:
    """The first bounds are the same whatever the data, and near the norms of noise."""
    first = []
    for factor in (1.0, 100.0):
        data = torch.utils.data.TensorDataset(pictures().tensors[0] * factor, pictures().tensors[1])
        strategy = fit(tmp_path / str(factor), STRATEGIES["mean"], classifier(), 2, loader=loader_of(data))
        first.append([group.max_grad_norm for group in strategy.mechanism.training_plan.groups])
    assert first[0] == first[1]
    assert all(bound > 1e-3 for bound in first[0])


def test_mean_clipping_without_noise_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="noise_batch.*or set initial_max_grad_norm"):
        fit(tmp_path, AdaptiveMeanClipping, Classifier(), norm_noise_multiplier=9.0)
    assert not (tmp_path / "ledger.jsonl").exists()
    fit(tmp_path, AdaptiveMeanClipping, Classifier(), norm_noise_multiplier=9.0, initial_max_grad_norm=0.5)


def test_references_are_what_they_say(tmp_path: Path) -> None:
    """No noise at an enormous bound, and no clipping at no noise, are both plain SGD; and neither has a ledger."""
    data, lots = pictures(), Lots(make_sampling("poisson", 60, 12), 0)
    plain = classifier()
    plain.net[4] = nn.Identity()
    optimizer = SGD(plain.parameters(), lr=0.5, momentum=0.9)
    for step in range(4):
        batch = data[torch.from_numpy(lots.lot(step))]
        optimizer.zero_grad()
        (plain.loss(batch) * len(batch[1]) / 12).backward()
        optimizer.step()
    for make, options in ((ClipOnly, {"max_grad_norm": 1e6}), (NoiseOnly, {"noise_multiplier": QUIET})):
        module = classifier()
        module.net[4] = nn.Identity()
        strategy = fit(tmp_path / make.__name__, make, module, 4, **options)
        torch.testing.assert_close(weights_of(module), weights_of(plain), rtol=1e-4, atol=1e-5)
        assert strategy.epsilon() == float("inf")
        assert not (tmp_path / make.__name__ / "ledger.jsonl").exists()
    with pytest.raises(ConfigurationError, match="ClipOnly is not private"):
        ClipOnly(target_epsilon=1.0)
    with pytest.raises(ConfigurationError, match="no private metrics"):
        NoiseOnly(noise_multiplier=1.0, metrics={"loss": 1.0})


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_private_optimizers_equal_plain_ones_fed_with_the_released_gradients(
    tmp_path: Path, name: str, scheduled: bool
) -> None:
    class Recording(Measured):
        def configure_optimizers(self) -> Any:
            self.released: list[list[Tensor]] = []
            optimizer = OPTIMIZERS[name](self.parameters())
            if not scheduled:
                return optimizer
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_before_optimizer_step(self, _: Any) -> None:
            self.released.append([p.grad.clone() for p in self.parameters() if p.grad is not None])

    torch.manual_seed(3)
    module = Recording()
    plain = copy.deepcopy(module)
    fit(tmp_path, STRATEGIES["quantile"], module)
    configured = plain.configure_optimizers()
    optimizer, schedule = (configured[0][0], configured[1][0]["scheduler"]) if scheduled else (configured, None)
    for grads in module.released:
        for p, grad in zip(plain.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()
        if schedule is not None:
            schedule.step()
    assert torch.equal(weights_of(plain), weights_of(module))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: AdaptiveQuantileClipping(quantile=1.2, noise_multiplier=1), "quantile must lie strictly between"),
        (lambda: DiscretizedDPSGD(discretization_threshold=-1, noise_multiplier=1), "discretization_threshold must be"),
        (lambda: DiscretizedDPSGD(correction_threshold=-1, noise_multiplier=1), "correction_threshold must be"),
        (lambda: DiscretizedDPSGD(priors=[0.5, 0.5, 0.5], noise_multiplier=1), "three probabilities .* that sum to 1"),
        (lambda: DPSGD(priors=[0.2, 0.6, 0.2], noise_multiplier=1), "set correction_threshold"),
        (lambda: DPSGD(microbatch_size=0, noise_multiplier=1), "microbatch_size must be a whole number"),
        (lambda: DPSGD(metrics={"loss": -1}, noise_multiplier=1), "bound of metric loss"),
        (lambda: DPSGD(metrics={}, noise_multiplier=1), "metrics must be names with a bound each"),
        (lambda: DPSGD(metrics={"loss": 1}, metrics_share=1.0, noise_multiplier=1), "metrics_share"),
        (lambda: AutomaticClipping(stability=-1, noise_multiplier=1), "stability must be"),
        (lambda: AutomaticClipping(stability=0, noise_multiplier=1), "AUTO-V has 0.*rounding error"),
        (lambda: VectorGroups(split="joint", noise_multiplier=1), "scales and split=joint belong together"),
        (lambda: VectorGroups(split="odd", noise_multiplier=1), "split must be equal, dimension or joint, not 'odd'"),  # type: ignore[arg-type]
        (lambda: VectorGroups(max_grad_norm=1, max_grad_norms={"a": 1}, noise_multiplier=1), "not both"),
        (lambda: AdaptiveQuantileClipping(initial_max_grad_norm=0, noise_multiplier=1), "initial_max_grad_norm"),
        (
            lambda: AdaptiveMeanClipping(clipping="odd", noise_multiplier=1),
            "clipping must be flat, .* or by_dimension, not",
        ),  # type: ignore
    ],
)
def test_bad_options_are_refused_at_once(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(DPSGD, microbatch_size=5), "microbatch_size=5 does not fit batches of 12 records"),
        (partial(DPSGD, microbatch_size=24), "does not fit batches of 12"),
        (partial(AdaptiveQuantileClipping, count_noise_std=0.4), "Theorem 1 has no solution"),
        (partial(VectorGroups, groups={"a": "net.0*"}), "no group takes net.1.weight, net.1.bias, net.5.weight"),
        (partial(VectorGroups, groups={"a": "*", "b": "net.0.*"}), r"groups overlap: net.0.weight \(a and b\)"),
        (
            partial(VectorGroups, split="joint", scales={"net.0": 1, "net.1": 1, "net.5": 1}, max_grad_norm=2),
            "S of joint",
        ),
        (partial(DPSGD, metrics={"f1": 1.0}), "the module offers no metric f1; it offers accuracy, loss"),
        (partial(DPSGD, allocation="odd"), "allocation"),
    ],
)
def test_what_does_not_fit_the_run_is_refused_before_training(tmp_path: Path, make: Make, words: str) -> None:
    module = classifier()
    before = weights_of(module).clone()
    with pytest.raises((ConfigurationError, TypeError), match=words):
        fit(tmp_path, make, module)
    assert torch.equal(weights_of(module), before)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_metrics_that_training_step_does_not_give(tmp_path: Path) -> None:
    class Silent(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch)

    with pytest.raises(ConfigurationError, match="must return \"record_metrics\" with 'accuracy'"):
        fit(tmp_path, STRATEGIES["metrics"], Silent())


def test_metrics_with_other_rows_than_records(tmp_path: Path) -> None:
    """Three values for a record would count three times."""

    class Positions(Measured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            output["record_metrics"] = {k: v.repeat(3) for k, v in output["record_metrics"].items()}
            return output

    torch.manual_seed(3)
    with pytest.raises(ConfigurationError, match='must return "record_metrics"'):
        fit(tmp_path, STRATEGIES["metrics"], Positions())


def test_empty_lots_with_metrics(tmp_path: Path) -> None:
    loader = loader_of(pictures(), expected=0.5)
    assert any(not len(loader.lots.lot(step)) for step in range(12))
    strategy = fit(tmp_path, STRATEGIES["metrics"], classifier(), 12, loader=loader)
    assert strategy.releases == 12


class Save(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_no_strategy_goes_on_from_a_past_that_it_does_not_know(tmp_path: Path) -> None:
    checkpoints = {}
    for name, make in (("private", DPSGD), ("clip_only", ClipOnly)):
        checkpoints[name] = tmp_path / f"{name}.ckpt"
        options = {"trainer": {"more": [Save(checkpoints[name])]}}
        fit(tmp_path / name, make, classifier(), 4, **options)
    plain = tmp_path / "plain.ckpt"
    trainer = trainer_for(tmp_path / "plain", Save(plain), 4)
    trainer.fit(classifier(), DataLoader(pictures(), 12))
    for start in (checkpoints["clip_only"], plain):
        with pytest.raises(ConfigurationError, match="not made by a private strategy"):
            fit(tmp_path / "later", AutomaticClipping, classifier(), 8, ckpt_path=start)
    with pytest.raises(ConfigurationError, match="would void its epsilon"):
        fit(tmp_path / "later", NoiseOnly, classifier(), 8, ckpt_path=checkpoints["private"])
    # Another private strategy may go on, and counts what was released before.
    resumed = fit(tmp_path / "private", AutomaticClipping, classifier(), 8, ckpt_path=checkpoints["private"])
    assert resumed.releases == 8
    assert len(read_ledger(tmp_path / "private/ledger.jsonl").releases) == 8
    with pytest.raises(LedgerError, match="had made 4 releases"):
        fit(tmp_path / "elsewhere", AutomaticClipping, classifier(), 8, ckpt_path=checkpoints["private"])


def test_a_resumed_run_takes_its_new_bound(tmp_path: Path) -> None:
    fit(tmp_path, DPSGD, classifier(), 4, trainer={"more": [Save(tmp_path / "a.ckpt")]})
    strategy = fit(tmp_path, DPSGD, classifier(), 8, max_grad_norm=0.001, ckpt_path=tmp_path / "a.ckpt")
    assert strategy.mechanism.plan.groups[0].max_grad_norm == 0.001
    wider = partial(AdaptiveQuantileClipping, count_noise_std=3.0)
    fit(tmp_path / "q", wider, classifier(), 4, trainer={"more": [Save(tmp_path / "q.ckpt")]})
    layers = fit(tmp_path / "q", partial(wider, clipping="per_layer"), classifier(), 8, ckpt_path=tmp_path / "q.ckpt")
    assert len(layers.mechanism.plan.groups) == 3


@pytest.mark.parametrize("options", [{}, {"max_physical_batch_size": 1}], ids=["whole", "pieces"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_mixed_precision_clips_in_float32(tmp_path: Path, options: dict[str, Any], manual: bool) -> None:
    """Positions that nearly cancel: with norms in bfloat16 records would pass at more than the bound."""
    if manual and options:
        return

    class Positions(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 32, bias=False)
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            outputs = self.layer(batch[0])
            loss = (outputs * batch[1]).sum((1, 2)).mean()
            return update(self, loss)

        def configure_optimizers(self) -> Any:
            return SGD(self.parameters(), lr=0.0)

    torch.manual_seed(1)
    first, large = torch.randn(40, 1, 32), 10 * torch.randn(40, 1, 32)
    inputs = torch.cat([first, 0.9 * first + 0.1 * torch.randn(40, 1, 32)], 1)
    data = torch.utils.data.TensorDataset(inputs, torch.cat([large, -large], 1))
    sizes: list[float] = []

    class Watch(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, _: Any) -> None:
            sizes.append(float(module.layer.weight.grad.norm()))  # type: ignore

    fit(
        tmp_path,
        DPSGD,
        Positions(),
        30,
        loader=loader_of(data, 3),
        noise_multiplier=QUIET,
        trainer={"precision": "bf16-mixed", "more": [Watch()]},
        **options,
    )
    lots = Lots(make_sampling("poisson", 40, 3), 0)
    counts = [len(lots.lot(step)) for step in range(30)]
    worst = max(3 * size / count for size, count in zip(sizes, counts, strict=True) if count)
    assert worst <= 1 + 1e-4


def test_manual_optimization(tmp_path: Path) -> None:
    for name in ("quantile", "discretized", "joint", "microbatches"):
        torch.manual_seed(3)
        strategy = fit(tmp_path / name, STRATEGIES[name], Classifier(manual=True))
        assert strategy.releases == 6
    with pytest.raises(ConfigurationError, match="metrics needs automatic optimization"):
        fit(tmp_path, STRATEGIES["metrics"], Classifier(manual=True))


def test_target_epsilon_with_every_kind_of_statistic(tmp_path: Path) -> None:
    for name in ("quantile", "all"):
        strategy = fit(tmp_path / name, STRATEGIES[name], classifier(), 20, noise_multiplier=None, target_epsilon=9.0)
        assert strategy.releases == 20
        assert 8.99 < strategy.epsilon() <= 9.0
