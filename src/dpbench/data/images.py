"""Images in memory, normalized once and indexed by whole lots; and the LightningDataModule on top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pydantic import Field
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dpbench.data.held_out import Split as HeldOutBy
from dpbench.data.held_out import check_split, image_bytes, parted
from dpbench.data.inserted import Inserted, inserted_of
from dpbench.data.lots import LotLoader, Lots, make_sampling
from dpbench.data.records import Collated, Collation
from dpbench.data.scattering import PER_CHANNEL, color_scattering, mirrored_scattering, scattering
from dpbench.data.sources import NOISE, NOISE_TEST, NOISE_TRAIN, Images, Source, Split, data_root, noise_like, source
from dpbench.errors import ConfigurationError
from dpbench.privacy.sampling import Sampling

Batch = tuple[Tensor, Tensor]
Positive = Annotated[int, Field(ge=1), "a whole number from 1 on"]
Count = Annotated[int, Field(ge=0), "a whole number from 0 on"]
Side = Annotated[int, Field(ge=1, le=4096), "a whole number of pixels from 1 to 4096"]
Folder = Annotated[str, Field(min_length=1), "the path of a folder"]
Size = Annotated[int, Field(ge=1, le=10_000_000), "a whole number of records from 1 to 10,000,000"]


class InMemoryImages(Dataset[Batch]):
    """Normalized images and labels.

    Images lie in memory as (N, H, W, C), so that a lot is one indexed copy that convolutions read channels-last.

    Args:
        pixels: (N, H, W, C), float32, contiguous.
        labels: (N,), int64.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, position: int) -> Batch:
        """Image (C, H, W) and label ()."""
        return self.pixels[position].permute(2, 0, 1), self.labels[position]

    def __getitems__(self, positions: Sequence[int]) -> Collated:
        """Images (R, C, H, W), channels-last in memory, and labels (R,)."""
        index = torch.from_numpy(np.asarray(positions, dtype=np.int64))  # of a list, twice as fast as torch
        pixels = self.pixels.index_select(0, index)  # three times as fast as [index]
        return Collated((pixels.permute(0, 3, 1, 2), self.labels[index]))

    def __add__(self, other: InMemoryImages) -> InMemoryImages:  # type: ignore[override]
        """These images, and then the others."""
        return InMemoryImages(torch.cat([self.pixels, other.pixels]), torch.cat([self.labels, other.labels]))

    def subset(self, positions: Sequence[int]) -> InMemoryImages:
        """The records at some positions."""
        index = torch.as_tensor(positions, dtype=torch.long)
        return InMemoryImages(self.pixels[index], self.labels[index])


_NOTHING = Inserted()
SCALES = ("standard", "per_image", "symmetric", "unit")
FEATURES = {
    "scattering": scattering,
    "color_scattering": color_scattering,
    "mirrored_scattering": mirrored_scattering,
}


def normalize(
    images: Images,
    spec: Source,
    image_size: int | None,
    scale: str = "standard",
    features: str | None = None,
) -> InMemoryImages:
    """Scale to [0, 1], resize, and then as `scale` or `features` of `ImageDataModule` say: once."""
    pixels = images.pixels
    pixels = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels.clone()
    if image_size is not None and (image_size, image_size) != tuple(pixels.shape[1:3]):
        planes = pixels.permute(0, 3, 1, 2)
        planes = F.interpolate(
            planes,
            (image_size, image_size),
            mode="bilinear",
            align_corners=False,
            antialias=True,
        )
        pixels = planes.permute(0, 2, 3, 1).contiguous()
    return InMemoryImages(_prepared(pixels, spec, scale, features), images.labels)


def _prepared(
    pixels: Tensor,
    spec: Source,
    scale: str,
    features: str | None,
) -> Tensor:
    """Pixels in [0, 1] as networks see them; may work in place."""
    if features is not None:
        return FEATURES[features](pixels)
    if scale == "symmetric":
        return pixels.mul_(2).sub_(1)
    if scale == "unit":
        return pixels
    if scale == "per_image":
        return _standardized_per_image(pixels)
    return pixels.sub_(torch.tensor(spec.mean)).div_(torch.tensor(spec.std))


def _standardized_per_image(pixels: Tensor) -> Tensor:
    """Each image at its own mean 0 and deviation 1; may work in place.

    The deviation counts as 1/√(numbers of an image) at least, as in TensorFlow's `per_image_standardization`, which
    Zhang et al. 2017 (appendix A) use: an image of one color becomes zeros. An image's pixels depend on no other image.

    Args:
        pixels: (N, H, W, C).
    """
    rows = pixels.flatten(1)
    rows.sub_(rows.mean(1, keepdim=True))
    deviations = rows.square().mean(1, keepdim=True).sqrt()
    rows.div_(deviations.clamp(min=rows.shape[1] ** -0.5))
    return rows.view(pixels.shape)


def _split(
    images: Images,
    held: int,
    split: HeldOutBy = "hash",
) -> tuple[Images, Images]:
    """The records that are held out, the same for every run, and the rest; both in the order of the whole."""
    size = len(images.labels)
    first, rest = parted(split, lambda: image_bytes(images.pixels, images.labels), size, held)
    if held >= size or not len(rest):
        raise ConfigurationError(f"data.val_size={held} leaves nothing of {size} training records to train on.")
    if not len(first):
        raise ConfigurationError(
            f"data.val_size={held} holds none of {size} training records out: it is their expected number; raise it."
        )
    own, others = (Images(images.pixels[rows], images.labels[rows]) for rows in map(torch.from_numpy, (first, rest)))
    return own, others


def _noise(
    like: str | None,
    image_size: int | None,
    train_size: int | None,
    test_size: int | None,
) -> Source:
    spec = source(like or "cifar10")
    spec = spec if image_size is None else replace(spec, side=image_size)  # made so, since resizing would blur it
    return noise_like(spec, train_size or NOISE_TRAIN, test_size or NOISE_TEST)


def _check_preparation(
    name: str,
    like: str | None,
    scale: str,
    features: str | None,
) -> None:
    """Raise ConfigurationError where pixels cannot be prepared so, or are of no noise that is like another data set."""
    if like is not None and name != NOISE:
        raise ConfigurationError(f"data.like={like} is for data={NOISE}, whose images take any shape, not for {name}.")
    if features not in (None, *FEATURES):
        names = ", ".join(FEATURES)
        raise ConfigurationError(f"data.features must be null or one of {names}, not {features!r}.")
    if scale not in SCALES:
        raise ConfigurationError(f"data.scale must be {', '.join(SCALES[:-1])} or {SCALES[-1]}, not {scale!r}.")
    if features is not None and scale != "standard":
        raise ConfigurationError(
            f"data.features={features} takes pixels as they are: leave data.features=null, or leave out "
            f"data.scale={scale}."
        )


class ImageDataModule(pl.LightningDataModule):
    """Training lots, an optional validation split and the test set of an image data set.

    Args:
        name: A name in `dpbench.data.sources.SOURCES`.
        root: Folder of the data sets; None takes $DPBENCH_DATA, else a per-user cache folder.
        expected_batch_size: Mean number of records in a training lot.
        sampling: "poisson" (also None), "truncated_poisson", "fixed_size" or "shuffled".
        val_size: Records taken from the training data for validation, their expected number with split="hash"; 0 for
            the papers' tables. The population that the ledger states is what remains.
        eval_batch_size: Records in a validation or test batch.
        image_size: Side to which images are resized; None keeps the data set's own choice.
        download: Whether torchvision may download an absent data set.
        seed: Key of the lots; None takes the operating system's entropy.
        scale: "standard" (mean 0 and deviation 1 of the data set), "per_image" (of each image alone), "symmetric"
            ([−1, 1], for generators) or "unit" ([0, 1]).
        features: "scattering", "color_scattering" or "mirrored_scattering" replaces pixels by wavelet features that
            know no data, see `data.scattering`.
        train_size: Only the first so many training records; None takes all. Of "random_noise", how many there are.
        test_size: The same of the test records.
        like: Of "random_noise": the data set whose shape and classes the noise has; None is CIFAR-10.
        inserted: Images of noise with random labels that join the training data, see `data.inserted`.
        split: How the records of `val_size` are chosen. "hash": each by a hash of itself, so that one record more moves
            no other one. "permutation": exactly `val_size`, by their number, as in runs of before; one record more then
            exchanges most of them, and epsilon holds for a record of the training set alone.
        expected_batch_size_schedule: How it moves over the steps: "linear:E", "exponential:E" or "cosine:E" (to E times
            that size), "step:F@P/F@P", or a factor for each step; None: not.

    Raises:
        ConfigurationError: An option is unknown, out of range, or not for this data set.
    """

    def __init__(
        self,
        name: str,
        root: Folder | None = None,
        expected_batch_size: float = 256,
        sampling: str | None = None,
        val_size: Count = 0,
        eval_batch_size: Positive = 1000,
        image_size: Side | None = None,
        download: bool = True,
        seed: int | None = 0,
        scale: str = "standard",
        features: str | None = None,
        train_size: Size | None = None,
        test_size: Size | None = None,
        like: str | None = None,
        inserted: Inserted = _NOTHING,
        split: HeldOutBy = "hash",
        expected_batch_size_schedule: str | list[float] | None = None,
    ) -> None:
        super().__init__()
        check_split(split)
        self._held_out_by = split
        self.spec = source(name) if name != NOISE else _noise(like, image_size, train_size, test_size)
        self.name = name
        self.inserted = inserted_of(inserted)
        self._sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        self.root = data_root(root)
        self._expected_batch_size = expected_batch_size
        self._kind = "poisson" if sampling is None else sampling
        self._size_schedule = expected_batch_size_schedule
        self._val_size = val_size
        self._eval_batch_size = eval_batch_size
        self._image_size = image_size if image_size is not None else self.spec.side
        self._download = download
        self._seed = seed
        self._train: InMemoryImages | None = None
        self._val: InMemoryImages | None = None
        self._test: InMemoryImages | None = None
        self.scale = scale
        self.features = features
        _check_preparation(name, like, scale, features)
        if eval_batch_size < 1 or val_size < 0:
            raise ConfigurationError("data.eval_batch_size must be positive and data.val_size at least 0.")

    def _load(self, split: Split) -> Images:
        images = self.spec.load(self.root, split, self._download)
        size = self._sizes[split]
        if size is not None and size > len(images.labels):
            raise ConfigurationError(
                f"data.{split}_size={size} is more than the {len(images.labels)} {split} records of {self.name}."
            )
        return Images(images.pixels[:size], images.labels[:size])

    def _normalized(self, images: Images) -> InMemoryImages:
        return normalize(images, self.spec, self._image_size, self.scale, self.features)

    def setup(self, stage: str | None = None) -> None:
        """Load everything once.

        Raises:
            DataError: The data set is absent and cannot be downloaded, or damaged.
            ConfigurationError: The validation split leaves no training data, or there are fewer records than asked for.
        """
        if self._train is not None:
            return
        train = self._load("train")
        test = self._load("test")
        if self._val_size:  # split before features are made, which take a hundred times the memory of pixels
            held, train = _split(train, self._val_size, self._held_out_by)
            rank_zero_info(f"{self.name}: {len(held.labels)} records are held out, {len(train.labels)} train.")
            self._val = self._normalized(held)
        self._train = self._normalized(train)
        self._test = self._normalized(test)
        if self.inserted.records:
            positions = list(range(self.inserted.records)) * self.inserted.copies
            self._train = self._train + self._made_up()[0].subset(positions)

    @property
    def train_set(self) -> InMemoryImages:
        """The records that lots are drawn from; the population of the ledger."""
        self.setup()
        assert self._train is not None
        return self._train

    @property
    def val_set(self) -> InMemoryImages | None:
        """The records held out of the training data, if any were."""
        self.setup()
        return self._val

    @property
    def test_set(self) -> InMemoryImages:
        """The test records."""
        self.setup()
        assert self._test is not None
        return self._test

    def model_options(self) -> dict[str, Any]:
        """Options of a model that the data determine."""
        return {"input_shape": self.input_shape, "num_classes": self.num_classes}

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        height, width, channels = self.train_set.pixels.shape[1:]
        return channels, height, width

    @property
    def monitored(self) -> str:
        """Which data `val_dataloader` gives: "val" or "test"."""
        return "val" if self._val_size else "test"

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.spec.num_classes

    @property
    def sampling(self) -> Sampling:
        """How training lots are drawn."""
        return make_sampling(self._kind, len(self.train_set), self._expected_batch_size)

    def noise_batch(self, size: int, generator: torch.Generator) -> Batch:
        """Images of uniform noise with random labels, scaled as the data are: what needs no budget to look at."""
        channels, height, width = self.input_shape
        if self.features is not None:
            channels = channels // PER_CHANNEL
            height = self._image_size
            width = self._image_size
        pixels = torch.rand(size, height, width, channels, generator=generator)
        pixels = _prepared(pixels, self.spec, self.scale, self.features)
        return pixels.permute(0, 3, 1, 2), torch.randint(
            self.num_classes,
            (size,),
            generator=generator,
        )

    def _made_up(self) -> tuple[InMemoryImages, InMemoryImages]:
        """Records that are inserted, each once, and references; the former do not depend on the latter's number."""
        generator = torch.Generator().manual_seed(self.inserted.seed)
        sizes = self.inserted.records, self.inserted.references
        made = [self.noise_batch(size, generator) for size in sizes]
        inserted, references = (InMemoryImages(x.permute(0, 2, 3, 1).contiguous(), labels) for x, labels in made)
        return inserted, references

    def inserted_and_references(self) -> Iterator[tuple[DataLoader[Batch], DataLoader[Batch]]]:
        """For each label the inserted records that have it, and the references with that label in place of their own.

        A network may prefer one label for all noise; so only an image is compared with others, and no label.
        """
        inserted, references = self._made_up()
        for label in torch.as_tensor(np.unique(inserted.labels.numpy())):
            own = inserted.subset(torch.nonzero(inserted.labels == label).flatten().tolist())
            others = InMemoryImages(references.pixels, label.expand(len(references)))
            yield self._eval_loader(own), self._eval_loader(others)

    def train_dataloader(self) -> LotLoader:
        """Lots of one epoch after the other."""
        return LotLoader(self.train_set, Lots(self.sampling, self._seed, self._size_schedule))

    def _eval_loader(self, images: InMemoryImages | None) -> DataLoader[Batch]:
        assert images is not None
        return DataLoader(
            images,
            batch_size=self._eval_batch_size,
            collate_fn=Collation(images, None),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        """The validation split, or without one the test set, for learning curves on which nothing is chosen."""
        self.setup()
        return self._eval_loader(self._val if self._val_size else self._test)

    def seen_dataloader(self, most: int) -> DataLoader[Batch]:
        """The first training records, at most so many: what is measured on them is private."""
        return self._eval_loader(self.train_set.subset(range(min(most, len(self.train_set)))))

    def test_dataloader(self) -> DataLoader[Batch]:
        """The test set."""
        self.setup()
        return self._eval_loader(self._test)
