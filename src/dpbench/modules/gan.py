"""Generative adversarial networks: a discriminator that sees the data, and a generator that sees the discriminator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, Protocol, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from dpbench.errors import ConfigurationError
from dpbench.modules.image_generator import ImageGenerator
from dpbench.options import Positive, PositiveInt

Loss = Literal["standard", "wasserstein"]
Share = Annotated[float, Field(gt=0, lt=1), "a number between 0 and 1"]
# BatchNorm takes two rows or more.
Rows = Annotated[int, Field(ge=2), "a whole number of at least 2"]
_METRICS = ("gan/generator_loss", "gan/discriminator_accuracy")


class Pair(Protocol):
    """Generator and discriminator of a GAN: see `models.gan`."""

    generator: nn.Module
    discriminator: nn.Module


class GAN(ImageGenerator):
    """A GAN in manual optimization; knows nothing of privacy, and is private as soon as its discriminator is.

    A batch makes one step of the discriminator: row i of the batch and image i of the generator give one loss, so that
    both are clipped together, as one record. Only the discriminator sees records (`private_module`). The generator
    learns from its weights and noise alone, so the generator and its images are post-processing. Images for the
    discriminator's step come from the generator in evaluation mode: in training mode BatchNorm would make each of them
    depend on their number, which is that of the records, and private.

    Args:
        model: The pair. With `classes` > 0 both take labels: the discriminator those of the records (and of images made
            for them), the generator's own step uniform ones.
        optimizer: Called with the discriminator's parameters.
        num_classes: Number of classes.
        monitored: Name of the data that the validation loop sees.
        schedule: Must be None.
        generator_optimizer: Called with the generator's parameters.
        loss: "standard" (logistic; the generator's does not saturate, Goodfellow et al. 2014) or "wasserstein"
            (Arjovsky et al. 2017, with the weights of the discriminator clamped after each step).
        weight_bound: Bound of the clamped weights.
        discriminator_steps: Batches before a turn of the generator, at least.
        discriminator_accuracy: The generator also waits until the discriminator tells so many of fresh images of
            the generator apart (Bie et al. 2023: the strongest lever of private GANs); None: it does not wait.
        longest_wait: Batches after which it waits no longer.
        generator_steps: Steps of the generator in its turn. They cost no privacy; more help while the discriminator is
            far ahead.
        generator_batch_size: Images in a step of the generator.

    Raises:
        ConfigurationError: The model is no pair.
        ValueError: There is no such loss, options contradict each other, or an optimizer is missing.
    """

    private_module = "discriminator"
    same_randomness = True
    """All processes make the same step of the generator, so that it needs no communication."""

    steps_since_generator: Tensor
    last_metrics: Tensor

    def __init__(
        self,
        model: Pair,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        num_classes: int,
        monitored: str = "val",
        schedule: Any = None,
        *,
        generator_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        loss: Loss = "standard",
        weight_bound: Positive = 0.01,
        discriminator_steps: PositiveInt = 1,
        discriminator_accuracy: Share | None = None,
        longest_wait: PositiveInt = 200,
        generator_steps: PositiveInt = 1,
        generator_batch_size: Rows = 128,
    ) -> None:
        if not hasattr(model, "generator"):
            raise ConfigurationError("module=gan needs a generator and a discriminator: add model=mlp_gan or conv_gan.")
        if schedule is not None:
            raise ValueError("a GAN has two learning rates, and no schedule: leave schedule=constant.")
        if loss not in get_args(Loss):
            raise ValueError(f"loss must be {' or '.join(get_args(Loss))}, not {loss!r}.")
        if discriminator_accuracy is not None and loss == "wasserstein":
            raise ValueError("discriminator_accuracy needs loss=standard: a Wasserstein critic has no threshold.")
        if not callable(generator_optimizer):
            raise ValueError("set generator_optimizer, such as torch.optim.Adam with _partial_: true.")
        super().__init__(model.generator, num_classes)
        self.automatic_optimization = False
        self.discriminator = model.discriminator
        self._make_optimizers = optimizer, generator_optimizer
        self._loss = loss
        self._weight_bound = weight_bound
        self._steps = discriminator_steps
        self._accuracy = discriminator_accuracy
        self._longest = longest_wait
        self._generator_steps = generator_steps
        self._batch_size = generator_batch_size
        self._monitored = monitored
        self.register_buffer("steps_since_generator", torch.zeros((), dtype=torch.long))
        self.register_buffer("last_metrics", torch.full((2,), torch.nan))  # generator's loss, discriminator's accuracy
        self.val_real_rate = MeanMetric()
        self.test_real_rate = MeanMetric()

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """One step of the discriminator, and a turn of the generator if it is due."""
        records, labels = self._split(batch)
        discriminator_optimizer, generator_optimizer = self.optimizers()  # type: ignore[attr-defined]
        # Drawn before what depends on the number of records.
        turn = [self._draw(self._batch_size) for _ in range(self._generator_steps)]
        discriminator_optimizer.zero_grad()
        if len(records):
            fake = self._fake_images(len(records), labels)
            loss = self.discriminator_loss(self.discriminator(records, labels), self.discriminator(fake, labels))
            self.manual_backward(loss)
            self._log("nonprivate/discriminator_loss", loss)
        discriminator_optimizer.step()
        if self._loss == "wasserstein":
            with torch.no_grad():
                for parameter in self.discriminator.parameters():
                    parameter.clamp_(-self._weight_bound, self._weight_bound)
        self.steps_since_generator += 1
        if self._due(*turn[0]):
            for noise, classes in turn:
                self._train_generator(generator_optimizer, noise, classes)
            self.steps_since_generator.zero_()
        for name, value in zip(_METRICS, self.last_metrics.clone(), strict=True):
            if not value.isnan():
                self._log(name, value)

    def discriminator_loss(self, on_records: Tensor, on_fake: Tensor) -> Tensor:
        """Mean over records of the loss of a record and the image made for it.

        Args:
            on_records: Logits (R,).
            on_fake: Logits (R,).
        """
        if self._loss == "wasserstein":
            return (on_fake - on_records).mean()
        return (F.softplus(-on_records) + F.softplus(on_fake)).mean()

    def generator_loss(self, on_fake: Tensor) -> Tensor:
        """Mean over images; on logits (N,)."""
        return -on_fake.mean() if self._loss == "wasserstein" else F.softplus(-on_fake).mean()

    def _train_generator(
        self,
        optimizer: Any,
        noise: Tensor,
        labels: Tensor | None,
    ) -> None:
        """A step of the generator, which sees noise, uniform classes and the discriminator."""
        trained = self._trained_of_discriminator()
        for parameter in trained:
            parameter.requires_grad_(False)
        loss = self.generator_loss(self.discriminator(self.generator(noise, labels), labels))
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.optimizer.step()  # past Lightning, so that trainer.max_steps and global_step count lots
        for parameter in trained:
            parameter.requires_grad_(True)
        self.last_metrics[0] = loss.detach()

    def _due(self, noise: Tensor, labels: Tensor | None) -> bool:
        steps = int(self.steps_since_generator)
        if steps < self._steps or self._accuracy is None or steps >= self._longest:
            return steps >= self._steps
        with torch.no_grad():
            logits = self.discriminator(self._generate(noise, labels), labels)
        self.last_metrics[1] = (logits < 0).float().mean()
        return float(self.last_metrics[1]) >= self._accuracy

    def _log(self, name: str, value: Tensor) -> None:
        if (self.trainer.global_step + 1) % max(self.trainer.log_every_n_steps, 1) <= 1:  # type: ignore[attr-defined]
            self.log(name, value.detach(), batch_size=1)

    def _split(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Records, and their labels where the networks take them.

        Raises:
            ConfigurationError: They do, and there are none.
        """
        if self.classes and len(batch) < 2:
            raise ConfigurationError(
                "the GAN is conditional, but the data set has no labels: use one that has, or model.conditional=false."
            )
        return batch[0], batch[1] if self.classes else None

    def realness(self, batch: Sequence[Tensor]) -> Tensor:
        """Logit of the discriminator for each record, (R,): high for records that it takes for real."""
        records, labels = self._split(batch)
        logits: Tensor = self.discriminator(records, labels)
        return logits.flatten()

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Share of held-out images that the discriminator takes for real."""
        self.val_real_rate(self._called_real(batch))
        self.log(f"{self._monitored}/real_rate", self.val_real_rate, batch_size=len(batch[0]))

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        """Share of test images that the discriminator takes for real."""
        self.test_real_rate(self._called_real(batch))
        self.log("test/real_rate", self.test_real_rate, batch_size=len(batch[0]))

    def _called_real(self, batch: Sequence[Tensor]) -> Tensor:
        logits: Tensor = self.discriminator(*self._split(batch))
        return (logits > 0).float()

    def configure_optimizers(self) -> list[Optimizer]:
        """Optimizers of the discriminator and of the generator."""
        for_discriminator, for_generator = self._make_optimizers
        trained = self._trained_of_discriminator()
        return [for_discriminator(trained), for_generator(self.generator.parameters())]

    def _trained_of_discriminator(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.discriminator.parameters() if parameter.requires_grad]
