"""Training of an extractor on random images: two views of one image alike, all images spread out.

The loss is alignment and uniformity (Wang and Isola 2020, "Understanding Contrastive Representation Learning through
Alignment and Uniformity on the Hypersphere"), as in DP-RandP. Images are drawn anew in each step, as a function of the
seed and the step: no image is seen twice.
"""

from __future__ import annotations

import math
from hashlib import blake2b
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from dpbench.capabilities.prior.extractor import Extractor, Prior, Settings, cells, load, save
from dpbench.capabilities.prior.processes import mixed_images
from dpbench.capabilities.prior.views import random_views
from dpbench.errors import ConfigurationError, Diverged
from dpbench.files import typed

_WORLD = 1.25  # side of an image that views are cut from, over that of a view
_WARMUP = 0.05  # of all steps
_WEIGHT_DECAY = 1e-4
_EMBEDDING = 128
_LOGGED_EVERY = 20  # steps
_STATISTICS_IMAGES = 4000
_PIECE = 200  # images at once


def pretrain(path: Path, settings: Settings, device: str = "cpu") -> tuple[Prior, str]:
    """Train an extractor and write it to a file.

    Args:
        path: File of the weights, not there yet. Its folder is made if it is not there.
        settings: Settings of the training.
        device: Device of torch; a GPU draws other images than a CPU.

    Returns:
        The trained prior, and facts of its training.

    Raises:
        ConfigurationError: The file is there or cannot be written, or there is no such device.
        Diverged: The loss is not finite.
    """
    if path.exists():
        raise ConfigurationError(f"{path} exists: choose another --out, or remove it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}. Choose another --out.") from error
    try:
        place = torch.device(device)
        torch.Generator(place)  # "meta" has tensors, but no random numbers
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device={device} is not available: use --device=cpu.") from error
    training = _Training(settings, place)
    alignment, uniformity = training.run()
    means, deviations = training.statistics()
    save(path, settings, training.network, means=means, deviations=deviations)
    prior = load(path)
    images = settings.steps * settings.batch_size
    return prior, (
        f"{path}: trained on {images:,} random images (seed {settings.seed}), alignment {alignment:.3f}, uniformity "
        f"{uniformity:.3f}, SHA-256 {prior.sha256}.\n"
        f"Use: dpbench train data=cifar10 data.features=random_prior data.prior={typed(path)} model=mlp model.hidden=[]"
    )


class _Training:
    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings = settings
        self.device = device
        width = 8 * settings.width
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.seed)
            self.network = Extractor(settings.width)
            self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _EMBEDDING))
        self.network.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head.to(device)
        self.optimizer = torch.optim.AdamW(
            [*self.network.parameters(), *self.head.parameters()],
            lr=settings.learning_rate,
            weight_decay=_WEIGHT_DECAY,
        )

    def run(self) -> tuple[float, float]:
        """Make all steps, and return the last alignment and uniformity."""
        bar = tqdm(range(self.settings.steps), desc="pretraining", disable=None)
        for step in bar:
            losses = self._step(step)
            if step % _LOGGED_EVERY == 0 or step == self.settings.steps - 1:
                alignment, uniformity = map(float, losses)
                if not math.isfinite(alignment + uniformity):
                    raise Diverged(
                        f"the loss of the pretraining is not finite at step {step + 1}: train with another --seed."
                    )
                bar.set_postfix_str(f"alignment {alignment:.3f}, uniformity {uniformity:.3f}")
        return alignment, uniformity

    def _generator(self, purpose: str, number: int) -> torch.Generator:
        key = blake2b(f"{purpose} {self.settings.seed} {number}".encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(key, "big") >> 1)

    def _step(self, step: int) -> tuple[Tensor, Tensor]:
        generator = self._generator("step", step)
        settings = self.settings
        world = 8 * round(_WORLD * settings.image_size / 8)
        images = mixed_images(settings.batch_size, world, generator)
        views = [random_views(images, settings.image_size, generator) for _ in range(2)]
        batch = torch.cat(views).contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, torch.bfloat16):
            embeddings = self.head(self.network(batch)[1].mean((2, 3)))
        alignment, uniformity = alignment_and_uniformity(*embeddings.float().chunk(2))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(step, settings.steps)
        self.optimizer.zero_grad()
        (alignment + uniformity).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return alignment.detach(), uniformity.detach()

    @torch.no_grad()
    def statistics(self) -> tuple[Tensor, Tensor]:
        """Means and deviations of features on random images that no step has seen."""
        pieces = []
        for number in range(_STATISTICS_IMAGES // _PIECE):
            images = mixed_images(_PIECE, self.settings.image_size, self._generator("statistics", number))
            pieces.append(cells(self.network, images.contiguous(memory_format=torch.channels_last)))
        features = torch.cat(pieces)
        return features.mean((0, 2, 3)).cpu(), features.std((0, 2, 3)).cpu()


def alignment_and_uniformity(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Mean squared distance of the two views of an image, and the log of the mean Gaussian kernel among images.

    Args:
        first: Embeddings of one view of each image, (N, D), N > 1.
        second: Those of the other view.

    Returns:
        Alignment, 0 where both views are one point; and uniformity, 0 where all images are one point and else less.
    """
    first = F.normalize(first, dim=1)
    second = F.normalize(second, dim=1)
    alignment = (first - second).square().sum(1).mean()
    kernels = [torch.pdist(views).square().mul(-2).exp().mean().log() for views in (first, second)]
    return alignment, (kernels[0] + kernels[1]) / 2


def _rate(step: int, steps: int) -> float:
    """Factor of the learning rate: a linear warmup, then half a cosine."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
