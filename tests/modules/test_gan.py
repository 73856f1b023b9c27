"""GANs under private strategies: the discriminator is private, the generator as without privacy."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.data import TensorDataset, default_collate

from dpbench.data.loader import PrivateDataLoader
from dpbench.data.sampler import PrivateBatchSampler, make_sampling
from dpbench.errors import ConfigurationError, UnsupportedModuleError
from dpbench.harness.run._checkpoint import LastCheckpoint
from dpbench.harness.run.samples import SampleGrid
from dpbench.harness.runs.folder import RunFolder
from dpbench.models import MLPGAN, ConvGAN
from dpbench.modules import GAN
from dpbench.privacy.accounting.ledger import read_ledger
from dpbench.strategies import DPSGD, AdaptiveMeanClipping, ClipOnly, NonPrivate
from tests.strategies.worlds import clipped_sum, loader_of, trainer_for
from tests.support.gan import CLASSES, SHAPE, fit, flat, gan, images

TWO = {"devices": 2, "strategy": "ddp_fork"}
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def dpsgd() -> DPSGD:
    return DPSGD(noise_multiplier=1.0, seed=0, delta=1e-3)


class Watched(GAN):
    """Keeps what each network saw, and what came of it."""

    def setup(self, stage: str) -> None:
        self.lots: list[Any] = []
        self.turns: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.lots.append([batch, copy.deepcopy(self.discriminator), None, None])
        super().training_step(batch, batch_idx)

    def _fake_images(self, number: int, labels: Tensor | None) -> Tensor:
        self.lots[-1][2] = super()._fake_images(number, labels)
        return self.lots[-1][2]

    def _due(self, noise: Tensor, labels: Tensor | None) -> bool:
        self.lots[-1][3] = [parameter.grad.clone() for parameter in self.discriminator.parameters()]
        return super()._due(noise, labels)

    def _train_generator(self, optimizer: Any, noise: Tensor, labels: Tensor | None) -> None:
        before = copy.deepcopy((self.generator, self.discriminator, optimizer.optimizer.state_dict()))
        super()._train_generator(optimizer, noise, labels)
        self.turns.append((before, noise, labels, copy.deepcopy(self.generator.state_dict())))


@pytest.mark.parametrize(
    ("loss", "pair", "conditional"),
    [("standard", MLPGAN, False), ("wasserstein", ConvGAN, True)],
)
def test_a_record_and_its_fake_image_are_clipped_as_one(
    tmp_path: Path, loss: str, pair: type[nn.Module], conditional: bool
) -> None:
    """Against autograd of each record's whole GAN loss, in float64."""
    module, data = gan(Watched, pair, conditional, loss=loss), images()
    fit(tmp_path, module, ClipOnly(noise_multiplier=1.0, seed=0, delta=1e-3, max_grad_norm=0.01), steps=2)
    for (records, labels), network, made, released in module.lots:
        losses = []
        for record, label, image in zip(records, labels, made, strict=True):
            same = (data.tensors[0] == record).flatten(1).all(1)  # a batch is as it was after its lot
            assert same.sum() == 1 and data.tensors[1][same] == label
            classes = label[None] if conditional else None
            real, fake = (network.double()(x.double()[None], classes) for x in (record, image))
            value = (fake - real) if loss == "wasserstein" else F.softplus(-real) + F.softplus(fake)
            losses.append(value.sum())
        for ours, exact in zip(released, clipped_sum(losses, list(network.parameters()), 0.01), strict=True):
            torch.testing.assert_close(ours.double(), exact / 12, rtol=2e-3, atol=1e-7)


def test_precisions(tmp_path: Path) -> None:
    """The gradients are computed inside the step, where the precision is the default of new tensors."""
    module = gan(pair=ConvGAN, conditional=True)
    trainer_for(tmp_path, dpsgd(), 2, precision="bf16-true", more=[SampleGrid()]).fit(module, loader_of(images()))
    assert (tmp_path / "samples.png").exists() and flat(module).isfinite().all()


def test_the_generator_is_trained_as_without_privacy(tmp_path: Path) -> None:
    """Bit by bit the ordinary step of a generator that is given the released discriminator."""
    module = gan(Watched, ConvGAN, conditional=True)
    fit(tmp_path, module, steps=3)
    assert len(module.turns) == 3
    for (generator, discriminator, state), noise, labels, after in module.turns:
        optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        F.softplus(-discriminator(generator(noise, labels), labels)).mean().backward()
        optimizer.step()
        assert all(torch.equal(value, after[name]) for name, value in generator.state_dict().items())


def test_images_for_the_discriminator_do_not_depend_on_the_size_of_the_lot(tmp_path: Path) -> None:
    module = gan(pair=ConvGAN)
    fit(tmp_path, module, steps=2)
    noise = torch.randn(20, 6)
    few, many = module._generate(noise[:3], None), module._generate(noise, None)
    torch.testing.assert_close(few, many[:3], rtol=1e-5, atol=1e-6)
    assert module.generator.training
    made = []
    for number in (5, 9):
        torch.manual_seed(0)
        made.append(module._fake_images(number, None))
    torch.testing.assert_close(made[0], made[1][:5], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [AdaptiveMeanClipping(noise_multiplier=1.0, seed=0, delta=1e-3, initial_max_grad_norm=1.0), NonPrivate()],
    ids=["mean", "none"],
)
def test_strategies_train_both_networks_and_count_lots(tmp_path: Path, strategy: pl.Callback) -> None:
    module = gan(discriminator_steps=2)
    before = [flat(network) for network in (module.generator, module.discriminator)]
    trainer = fit(tmp_path, module, strategy, steps=3)
    assert trainer.global_step == 3  # lots, not steps of both optimizers
    for network, weights in zip((module.generator, module.discriminator), before, strict=True):
        assert not torch.equal(flat(network), weights) and flat(network).isfinite().all()
    assert int(module.steps_since_generator) == 1


@pytest.mark.filterwarnings(
    "ignore:It is recommended to use `self.log", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
@pytest.mark.slow
@pytest.mark.own_key
def test_two_processes_agree_with_one(tmp_path: Path) -> None:
    """Some lots are empty, and some on one process only."""
    ends = []
    for name, options in (("one", {}), ("two", TWO)):
        module = gan(pair=ConvGAN, conditional=True, discriminator_steps=2)
        trainer_for(tmp_path / name, dpsgd(), 8, **options).fit(module, loader_of(images(), 1))
        ends.append((flat(module.generator), flat(module.discriminator)))
        assert len(read_ledger(tmp_path / name / "ledger.jsonl").releases) == 8
    for one, two in zip(*ends, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-3)


def test_resumed_in_mid_epoch_is_bit_identical(tmp_path: Path) -> None:
    ends = []
    for run, start, steps in (
        ("whole", None, 4),
        ("parts", None, 2),
        ("parts", RunFolder(tmp_path / "parts").checkpoint, 4),
    ):
        module = gan(pair=ConvGAN, conditional=True, discriminator_steps=3)
        callbacks = [dpsgd(), LastCheckpoint(RunFolder(tmp_path / run), every_n_steps=100)]
        trainer = trainer_for(tmp_path / run, callbacks[0], steps, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(module, loader_of(images()), ckpt_path=start, weights_only=False)
        ends.append(flat(module))
    assert torch.equal(ends[0], ends[2]) and not torch.equal(ends[0], ends[1])


def test_the_generator_waits_for_the_discriminator(tmp_path: Path) -> None:
    module = gan(Watched, discriminator_accuracy=0.999, longest_wait=2)
    fit(tmp_path, module, ClipOnly(noise_multiplier=1.0, seed=0, delta=1e-3, max_grad_norm=1e-6), steps=5)
    # It learns nothing, so the longest wait decides.
    assert len(module.turns) == 2 and int(module.steps_since_generator) == 1
    module = gan(Watched, discriminator_accuracy=1e-9, discriminator_steps=2)
    with torch.no_grad():
        module.discriminator.layers[-1].bias.fill_(-100)  # type: ignore[union-attr, operator]
    fit(tmp_path / "b", module, steps=4)
    assert len(module.turns) == 2


def test_the_turns_of_a_generator_do_not_depend_on_the_size_of_the_lot(tmp_path: Path) -> None:
    drawn = []
    for size in (60, 30):
        module = gan(Watched, generator_steps=3)
        trainer_for(tmp_path / str(size), dpsgd(), 2).fit(module, loader_of(images(size)))
        drawn.append(torch.stack([noise for _, noise, *_ in module.turns]))
    assert torch.equal(*drawn) and len(drawn[0].flatten(1).unique(dim=0)) == 6


class ThroughLightning(GAN):
    """Its generator steps through Lightning's optimizer too, twice in every third batch, which Lightning counts."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        for _ in range(2 if batch_idx % 3 == 0 else 0):
            self.optimizers()[1].step()


def test_every_step_of_the_trainer_is_a_release(tmp_path: Path) -> None:
    strategy = DPSGD(target_epsilon=3.0, seed=0, delta=1e-3)
    checkpoint = tmp_path / "mid.ckpt"
    trainer = fit(tmp_path, gan(ThroughLightning), strategy, steps=5)
    trainer.save_checkpoint(checkpoint)
    assert trainer.global_step == strategy.releases == 5
    assert 2.99 < strategy.epsilon() <= 3.0
    longer = trainer_for(tmp_path, DPSGD(noise_multiplier=strategy.noise_multiplier, seed=0, delta=1e-3), 7)
    longer.fit(gan(ThroughLightning), loader_of(images()), ckpt_path=checkpoint, weights_only=False)
    assert longer.global_step == 7
    assert [release.number for _, release in read_ledger(tmp_path / "ledger.jsonl").releases] == list(range(7))


def test_without_privacy_as_many_batches_are_trained(tmp_path: Path) -> None:
    assert fit(tmp_path, gan(ThroughLightning), NonPrivate(), steps=5).fit_loop.epoch_loop.total_batch_idx == 4


# ------------------------------------------------------------------------------------- broken mutants


class OneOptimizer(GAN):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)]


class GeneratorFirst(GAN):
    """The generator steps between the private backward and the release."""

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        loss = super().discriminator_loss(on_records, on_fake)
        self.manual_backward(loss)
        self.optimizers()[1].step()
        return loss


class RawStep(GAN):
    """The discriminator is updated past Lightning, and so past the mechanism."""

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        self.optimizers()[0].optimizer.step()
        return super().discriminator_loss(on_records, on_fake)


class OwnOptimizer(GAN):
    """An optimizer that Lightning does not know steps."""

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        torch.optim.SGD(self.generator.parameters(), lr=0.1).step()
        return super().discriminator_loss(on_records, on_fake)


class Peeks(GAN):
    """The generator matches what this makes of private records."""

    def of_batch(self, records: Tensor, labels: Tensor) -> Any:
        return records.detach().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen = batch
        super().training_step(batch, batch_idx)

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        return super().generator_loss(on_fake) * self.of_batch(*self.seen)


class PeeksAtLabels(Peeks):
    def of_batch(self, records: Tensor, labels: Tensor) -> Any:
        return F.one_hot(labels, CLASSES).float().mean()


class PeeksAtSize(Peeks):
    def of_batch(self, records: Tensor, labels: Tensor) -> Any:
        return torch.ones(()) / records.size(0)


class MatchesFeatures(GAN):
    """The generator's loss is scaled by what the discriminator says of records."""

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        self.level: Any = self.level_of(on_records)
        return super().discriminator_loss(on_records, on_fake)

    def level_of(self, on_records: Tensor) -> Any:
        return on_records.detach().mean()

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        return super().generator_loss(on_fake) * self.level


class MatchesNumbers(MatchesFeatures):
    """The same by a number of Python's."""

    def level_of(self, on_records: Tensor) -> Any:
        return on_records.detach().mean().item()


class MatchesLater(MatchesFeatures):
    """The same by a number that is computed between the backward pass and the release."""

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        return GAN.discriminator_loss(self, on_records, on_fake)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        if not hasattr(self, "level"):
            self.level = 0.5 * float(loss.detach() * 2)


class MatchesInAHook(MatchesFeatures):
    """The same by a hook of the generator's gradients."""

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        on_fake.register_hook(lambda gradient: gradient * self.level)
        return GAN.generator_loss(self, on_fake)


class MatchesWhatIsLogged(MatchesFeatures):
    """A loss is logged after the release, and read again."""

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        self.log("nonprivate/shown", self.level)
        logged = self.trainer.callback_metrics.get("nonprivate/shown", torch.ones(()))
        return GAN.generator_loss(self, on_fake) * logged


class MatchesCounts(GAN):
    """The number of records of a class, by a mask."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.count = len(batch[0][batch[1] == 1])
        super().training_step(batch, batch_idx)

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        return super().generator_loss(on_fake) / (1 + self.count)


class LateStatistics(GAN):
    """A public BatchNorm sees records, without autograd, from the third lot on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.encoder = nn.Sequential(nn.BatchNorm2d(1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if int(self.trainer.global_step) > 1:
            with torch.no_grad():
                self.encoder(batch[0])
        super().training_step(batch, batch_idx)


class TrainModeGenerator(GAN):
    """BatchNorm of the generator counts the records."""

    @torch.no_grad()
    def _fake_images(self, number: int, labels: Tensor | None) -> Tensor:
        made: Tensor = self.generator(torch.randn(number, 6), None)
        return made


class Nested(GAN):
    """No mutant: its networks lie in one."""

    private_module = "pair.discriminator"

    def __init__(self, model: Any, *args: Any, **options: Any) -> None:
        super().__init__(model, *args, **options)
        self.pair = model
        del self.generator, self.discriminator

    generator = property(lambda self: self.pair.generator)
    discriminator = property(lambda self: self.pair.discriminator)


class AsInTutorials(Nested):
    """The generator learns by the images made for the records, as many and of their classes."""

    def _fake_images(self, number: int, labels: Tensor | None) -> Tensor:
        self.generator.eval()
        self.made = self.generator(torch.randn(number, 6), None)
        return self.made.detach()


class EarlyBackward(Nested):
    """The generator's gradients are computed from records before the release."""

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        loss = super().discriminator_loss(on_records, on_fake)
        if int(self.trainer.global_step) > 1:
            weight = next(self.generator.parameters())
            (weight.sum() * loss.detach()).backward()
        return loss


class BareEarlyBackward(GAN):
    """A parameter of the module itself learns from records."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bare = nn.Parameter(torch.ones(()))

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        (self.bare * on_records.detach().mean()).backward()
        return super().discriminator_loss(on_records, on_fake)


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        (type("NoNamedPart", (GAN,), {"private_module": None}), "has 2 optimizers.*private_module"),
        (type("OtherPart", (GAN,), {"private_module": "critic"}), "has no such submodule"),
        (OneOptimizer, "exactly one optimizer, which updates nothing else"),
        (GeneratorFirst, "before the release of the batch"),
        (RawStep, "before the release of the batch"),
        (OwnOptimizer, "before the release of the batch"),
        (PeeksAtLabels, "not finite.*hidden"),
        (PeeksAtSize, "not finite.*hidden"),
        (MatchesFeatures, "uses a value computed from private records after their release.*no feature matching"),
        (MatchesNumbers, "reads values of records before their release: .*test_gan.py.*self.log"),
        (MatchesLater, "reads values of records before their release"),
        (MatchesInAHook, "uses a value computed from private records after their release: .*test_gan.py"),
        (MatchesCounts, "reads values of records before their release: .*test_gan.py"),
        (MatchesWhatIsLogged, "uses a value computed from private records after their release"),
        (LateStatistics, "changes encoder"),
        (TrainModeGenerator, "record by record training_step fails"),
        (AsInTutorials, "ran with gradients before the release.*no_grad"),
        (EarlyBackward, "gradients of pair.generator.*before the release"),
        (BareEarlyBackward, "gradients of bare.*before the release"),
    ],
)
def test_records_are_out_of_reach_of_other_networks(tmp_path: Path, mutant: type[GAN], words: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedModuleError), match=words):
        fit(tmp_path, gan(mutant))
    assert not _get_current_function_mode_stack()


def test_the_first_step_of_the_generator_is_checked_whenever_it_comes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not finite.*hidden"):
        fit(tmp_path, gan(Peeks, discriminator_accuracy=0.99, longest_wait=4))


# ------------------------------------------------------------------------------------- what a module may do


class Logs(MatchesFeatures):
    """Its loss is logged after the release, as in tutorials."""

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        self.log("nonprivate/detached", self.level.detach())
        print(self.level)
        self.log_dict({"nonprivate/shown": self.level}, prog_bar=True)
        return GAN.generator_loss(self, on_fake)


def test_losses_may_be_logged_after_the_release(tmp_path: Path) -> None:
    trainer = fit(tmp_path, gan(Logs), steps=2)
    assert trainer.callback_metrics["nonprivate/shown"] != 0


def test_a_network_that_is_saved_in_mid_run_takes_no_record_with_it(tmp_path: Path) -> None:
    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = batch[0].clone()
            self.copied = copy.deepcopy(module.generator)
            torch.save(module.generator, tmp_path / "generator.pt")

    keeps, strategy = Keeps(), dpsgd()
    trainer_for(tmp_path, strategy, 2, callbacks=[keeps, strategy]).fit(gan(), loader_of(images()))
    assert len(keeps.seen) and keeps.seen.isfinite().all()  # other callbacks see the batch as it was
    assert not keeps.seen.requires_grad
    torch.save(keeps.copied, tmp_path / "copied.pt")
    most = 4 * sum(p.numel() for p in keeps.copied.parameters()) + 50_000
    for name in ("generator.pt", "copied.pt"):
        assert (tmp_path / name).stat().st_size < most
        loaded = torch.load(tmp_path / name, weights_only=False)
        assert loaded.eval()(torch.randn(2, 6)).shape == (2, *SHAPE)


def test_a_batch_with_more_than_tensors_is_refused(tmp_path: Path) -> None:
    lots = PrivateBatchSampler(make_sampling("poisson", len(images()), 12), 0)
    loader = PrivateDataLoader(images(), lots, lambda rows: [*default_collate(rows), 0.5])
    with pytest.raises(ConfigurationError, match="must consist of tensors .*, not a float"):
        trainer_for(tmp_path, dpsgd(), 2).fit(gan(), loader)


@pytest.mark.parametrize(
    "options", [{"loss": "hinge"}, {"discriminator_accuracy": 0.6, "loss": "wasserstein"}, {"schedule": 1}], ids=str
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        gan(**options)


def test_sampling_is_reproducible_and_knows_classes() -> None:
    module = gan(pair=ConvGAN, conditional=True)
    labels = torch.arange(CLASSES)
    one, two, other = (
        module.sample(classes, torch.Generator().manual_seed(5)) for classes in (labels, labels, labels.flip(0))
    )
    assert torch.equal(one, two) and one.shape == (CLASSES, *SHAPE) and one.min() >= 0 and one.max() <= 1
    assert not torch.equal(one, other)


def test_networks_may_lie_in_one(tmp_path: Path) -> None:
    """They do what they do side by side."""
    nested, plain = gan(Nested), gan()
    for module, name in ((nested, "a"), (plain, "b")):
        fit(tmp_path / name, module, steps=2)
    assert torch.equal(flat(nested.generator), flat(plain.generator))


def test_data_without_labels(tmp_path: Path) -> None:
    data, module = loader_of(TensorDataset(images().tensors[0])), gan()
    before = flat(module)
    trainer_for(tmp_path / "a", dpsgd(), 1).fit(module, data)
    assert (flat(module) != before).any() and flat(module).isfinite().all()
    with pytest.raises(ConfigurationError, match="the data set has no labels: .*model.conditional=false"):
        trainer_for(tmp_path / "b", dpsgd(), 1).fit(gan(conditional=True), data)
    assert not (tmp_path / "b" / "ledger.jsonl").exists() or not read_ledger(tmp_path / "b" / "ledger.jsonl").releases


def test_frozen_layers_of_a_discriminator_stay_as_they_are(tmp_path: Path) -> None:
    module = gan()
    frozen, *trained = module.discriminator.parameters()
    frozen.requires_grad_(False)
    before = [parameter.detach().clone() for parameter in (frozen, *trained)]
    fit(tmp_path, module, steps=1)
    assert (frozen == before[0]).all() and not frozen.requires_grad
    assert all((now != then).any() and now.requires_grad for now, then in zip(trained, before[1:], strict=True))


def test_without_privacy_only_in_one_process() -> None:
    trainer: Any = SimpleNamespace(world_size=2)
    with pytest.raises(ConfigurationError, match="GAN without privacy trains in one process: trainer.devices=1"):
        NonPrivate().setup(trainer, gan(), "fit")
    NonPrivate().setup(trainer, pl.LightningModule(), "fit")
