"""Images in memory, normalized once and indexed by whole batches; and the LightningDataModule on top."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import entry_points
from typing import Annotated, Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dpbench.data.collation import RecordOfRow
from dpbench.data.held_out import Split as HeldOutBy
from dpbench.data.held_out import image_bytes
from dpbench.data.inserted import Inserted, inserted_of, refuse_membership_of_inserted
from dpbench.data.module import Folder, Membership, PrivateDataModule, Splits
from dpbench.data.noise import Split, labeled_noise
from dpbench.data.records import Collated, InBatches
from dpbench.data.scattering import color_scattering, mirrored_scattering, scattering
from dpbench.data.sources import NOISE, Images, Source, noise_like, source
from dpbench.data.views import AugmentedImages, ImageOfView
from dpbench.errors import ConfigurationError
from dpbench.options import Count, PositiveInt

Batch = tuple[Tensor, Tensor]
Features = Callable[[Tensor], Tensor]
Side = Annotated[int, Field(ge=1, le=4096), "a whole number of pixels from 1 to 4096"]
FilePath = Annotated[str, Field(min_length=1), "the path of a file"]
Size = Annotated[int, Field(ge=1, le=10_000_000), "a whole number of records from 1 to 10,000,000"]

_NOTHING = Inserted()
SCALES = ("standard", "per_image", "symmetric", "unit")
FEATURES = {
    "scattering": scattering,
    "color_scattering": color_scattering,
    "mirrored_scattering": mirrored_scattering,
}
FeaturesName = Annotated[str, Field(pattern=f"^({'|'.join(FEATURES)})$"), f"one of {', '.join(FEATURES)}"]
_TRAINED = "dpbench.features"
"""Group of entry points: a name, and a function of `ImageDataModule`'s root, prior and prior_sha256 → features."""


class InMemoryImages(InBatches):
    """Normalized images and labels.

    Images lie in memory as (N, H, W, C), so that a batch is one indexed copy that convolutions read channels-last.

    Args:
        pixels: (N, H, W, C), float32, contiguous.
        labels: (N,), int64.
    """

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def batch_of(self, positions: Sequence[int]) -> Collated:
        """Return the batch of some records, a tuple of tensors."""
        """Images (R, C, H, W), channels-last in memory, and labels (R,)."""
        index = torch.from_numpy(np.asarray(positions, dtype=np.int64))  # of a list, twice as fast as torch
        pixels = self.pixels.index_select(0, index)  # three times as fast as [index]
        return Collated((pixels.permute(0, 3, 1, 2), self.labels[index]))

    def __add__(self, other: InMemoryImages) -> InMemoryImages:  # type: ignore[override]
        """These images, and then the others."""
        return InMemoryImages(torch.cat([self.pixels, other.pixels]), torch.cat([self.labels, other.labels]))

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width)."""
        height, width, channels = self.pixels.shape[1:]
        return channels, height, width

    def subset(self, positions: Sequence[int]) -> InMemoryImages:
        """The records at some positions."""
        index = torch.as_tensor(positions, dtype=torch.long)
        return InMemoryImages(self.pixels[index], self.labels[index])


def normalize(
    images: Images,
    spec: Source,
    image_size: int | None,
    scale: str = "standard",
    features: Features | None = None,
) -> InMemoryImages:
    """Scale to [0, 1], resize, and then scale as `ImageDataModule` says, or make features of them: once."""
    pixels = images.pixels
    pixels = pixels.float().div_(255) if pixels.dtype == torch.uint8 else pixels.clone()
    if image_size is not None and (image_size, image_size) != tuple(pixels.shape[1:3]):
        planes = F.interpolate(
            pixels.permute(0, 3, 1, 2),
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
    features: Features | None = None,
) -> Tensor:
    """Pixels in [0, 1] as networks see them; may work in place."""
    if features is not None:
        return features(pixels)
    if scale == "symmetric":
        return pixels.mul_(2).sub_(1)
    if scale == "unit":
        return pixels
    if scale == "per_image":
        return standardized(pixels)
    return pixels.sub_(torch.tensor(spec.mean)).div_(torch.tensor(spec.std))


def standardized(pixels: Tensor) -> Tensor:
    """Scale each image to mean 0 and deviation 1 by itself, over its pixels and channels; float32 in place.

    The deviation counts as 1/√(numbers of an image) at least, as in TensorFlow's `per_image_standardization`, which
    Zhang et al. 2017 (appendix A) use: an image of one color becomes zeros. An image's pixels depend on no other image.

    Args:
        pixels: (N, H, W, C), of any type.
    """
    rows = pixels.flatten(1).float()
    rows.sub_(rows.mean(1, keepdim=True))
    deviations = rows.square().mean(1, keepdim=True).sqrt()
    rows.div_(deviations.clamp(min=rows.shape[1] ** -0.5))
    return rows.view(pixels.shape)


def image_options(
    images: InMemoryImages,
    spec: Source,
    scale: str = "standard",
    features: Features | None = None,
    image_size: int | None = None,
) -> dict[str, Any]:
    """Return the facts of a data set that follow from its labeled images: `model_options`, `inputs`, `noise_batch`.

    Args:
        images: Images, normalized with the other arguments.
        spec: Their data set.
        scale: See `ImageDataModule`.
        features: Features, as for `normalize`.
        image_size: Side that images had before they became features; None: the data set's own.
    """
    channels, height, width = images.input_shape
    if features is not None:
        height = width = spec.side if image_size is None else image_size
        channels = len(spec.mean)
    return {
        "model_options": {"input_shape": images.input_shape, "num_classes": spec.num_classes},
        "inputs": _inputs(spec, scale, features),
        "noise_batch": partial(
            labeled_noise,
            shape=(height, width, channels),
            num_classes=spec.num_classes,
            prepare=partial(_prepared, spec=spec, scale=scale, features=features),
        ),
    }


def _inputs(spec: Source, scale: str, features: object) -> dict[str, Any]:
    """Describe how pixels are scaled; the constants of `scale=standard` are published ones."""
    if features is not None:
        return {}  # made of pixels in [0, 1]; `features` names them
    constants = {"mean": list(spec.mean), "std": list(spec.std)} if scale == "standard" else {}
    return {"scale": scale, **constants}


class ImageDataModule(PrivateDataModule[InMemoryImages]):
    """Training batches, an optional validation split and the test set of an image data set.

    Args:
        name: See `dpbench.data.sources.source`.
        root: Folder of the data sets; None takes $DPBENCH_DATA, else a per-user cache folder.
        expected_batch_size: Mean number of records in a training batch.
        sampling: "poisson" (also None), "truncated_poisson", "fixed_size" or "shuffled".
        val_size: Records taken from the training data for validation, their expected number with split="hash"; 0 for
            the papers' tables. The remaining records are the population of the ledger.
        eval_batch_size: Records in a validation or test batch.
        image_size: Side to which images are resized; None keeps the data set's own choice.
        download: True to let torchvision download an absent data set.
        seed: Key of the batches; None takes the operating system's entropy.
        scale: "standard" (mean 0 and deviation 1 of the data set), "per_image" (of each image alone), "symmetric"
            ([−1, 1], for generators) or "unit" ([0, 1]).
        features: "scattering", "color_scattering" or "mirrored_scattering" replaces pixels by wavelet features that
            know no data, see `data.scattering`. The names of entry points of `dpbench.features` are those of networks
            that were trained on public data.
        prior: File of such a network; a relative path is looked for in the working directory, and then in the folder of
            the data sets.
        prior_sha256: SHA-256 of that file; any other file is refused, and so is None. The command line fills it in, and
            a run goes on with no other file.
        train_size: Number of training records, the first ones (of "random_noise" all that are made); None takes all.
        test_size: The same of the test records.
        like: For "random_noise", the data set with the shape and classes of the noise; None is CIFAR-10.
        inserted: Images of noise with random labels that join the training data, see `data.inserted`.
        split: Choice of the records of `val_size`. "hash": each by a hash of its contents, so that an additional record
            does not affect others. "permutation": exactly `val_size`, by a permutation, as in older runs; an additional
            record then changes most of them, and epsilon holds only for a record of the training set.
        expected_batch_size_schedule: Schedule of it over the steps: "linear:E", "exponential:E" or "cosine:E" (to E
            times that size), "step:F@P/F@P", or a factor for each step; None: constant.
        membership: "half": each training record is trained on by a fair coin of its own, which is a function of the
            seed; for attacks on membership. None: every record is.
        augmentations: K, the augmentation multiplicity of De et al. 2022: a batch holds K random views of each of its
            images (crops, mirrored or not, see `data.views`), and the gradient of a record is the mean over them, which
            is clipped. None: images as they are.

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
        eval_batch_size: PositiveInt = 1000,
        image_size: Side | None = None,
        download: bool = True,
        seed: int | None = 0,
        scale: str = "standard",
        features: str | None = None,
        prior: FilePath | None = None,
        prior_sha256: str | None = None,
        train_size: Size | None = None,
        test_size: Size | None = None,
        like: str | None = None,
        inserted: Inserted = _NOTHING,
        split: HeldOutBy = "hash",
        expected_batch_size_schedule: str | list[float] | None = None,
        membership: Membership | None = None,
        augmentations: PositiveInt | None = None,
    ) -> None:
        super().__init__(
            root=root,
            expected_batch_size=expected_batch_size,
            sampling=sampling,
            val_count=val_size,
            eval_batch_size=eval_batch_size,
            download=download,
            seed=seed,
            split=split,
            expected_batch_size_schedule=expected_batch_size_schedule,
            membership=membership,
        )
        if like is not None and name != NOISE:
            raise ConfigurationError(
                f"data.like={like} is for data={NOISE}, whose images take any shape, not for {name}."
            )
        is_trained = features not in (None, *FEATURES)
        if is_trained and features not in entry_points(group=_TRAINED).names:
            names = ", ".join([*FEATURES, *sorted(entry_points(group=_TRAINED).names)])
            raise ConfigurationError(f"data.features must be null or one of {names}, not {features!r}.")
        if (prior is not None) != is_trained:
            raise ConfigurationError(
                "data.prior names the file of a trained network, and data.features its features: set both, or none "
                f"(data.features={'null' if features is None else features}, data.prior={prior or 'null'})."
            )
        if scale not in SCALES:
            raise ConfigurationError(f"data.scale must be {', '.join(SCALES[:-1])} or {SCALES[-1]}, not {scale!r}.")
        if features is not None and scale != "standard":
            raise ConfigurationError(
                f"data.features={features} takes pixels as they are: keep data.features=null, or remove "
                f"data.scale={scale}."
            )
        if features is not None and augmentations is not None:
            raise ConfigurationError(
                f"data.augmentations={augmentations} changes images in each batch, and data.features={features} are "
                "computed only once: remove one of the two."
            )
        self.name = name
        self.spec = source(like or name)
        if name == NOISE:
            shape = source(like or "cifar10")
            if image_size is not None:
                shape = replace(shape, side=image_size)  # resizing would blur noise
            self.spec = noise_like(shape, train_size, test_size)
        self.inserted = inserted_of(inserted, Inserted)
        refuse_membership_of_inserted(membership, self.inserted)
        self.scale = scale
        self.features = features
        self.prior = prior
        self.prior_sha256 = prior_sha256
        self.augmentations = augmentations
        self._sizes: dict[Split, int | None] = {"train": train_size, "test": test_size}
        self._image_size = self.spec.side if image_size is None else image_size

    def _load(self) -> Splits[InMemoryImages]:
        images = self._images("train")
        val = None
        if self._val_count:
            # Split before features are made, which take a hundred times the memory of pixels.
            pixels = images.pixels
            labels = images.labels
            held_out, train = self._hold_out(np.ones(len(labels), np.int64), lambda: image_bytes(pixels, labels))
            val = self._normalized(Images(pixels[held_out], labels[held_out]))
            images = Images(pixels[train], labels[train])
        members = self._choose_members(lambda: image_bytes(images.pixels, images.labels))
        training_set = self._normalized(images)
        test = self._normalized(self._images("test"))
        if self.inserted.records:
            positions = list(range(self.inserted.records)) * self.inserted.copies
            training_set += self._made_up()[0].subset(positions)
        return Splits(training_set, val, test, members)

    @property
    def _lot_set(self) -> Dataset[Any]:
        return self.train_set if self.augmentations is None else AugmentedImages(self.train_set, self.augmentations)

    @property
    def _record_of_lot_row(self) -> RecordOfRow | None:
        return None if self.augmentations is None else ImageOfView(self.augmentations)

    def _images(self, split: Split) -> Images:
        images = self.spec.load(self.root, split, self._download)
        size = self._sizes[split]
        if size is not None and size > len(images.labels):
            raise ConfigurationError(
                f"data.{split}_size={size} is more than the {len(images.labels)} {split} records of {self.name}."
            )
        return Images(images.pixels[:size], images.labels[:size])

    def _normalized(self, images: Images) -> InMemoryImages:
        return normalize(images, self.spec, self._image_size, self.scale, self._make_features())

    def _make_features(self) -> Features | None:
        if self.features is None:
            return None
        if self.features in FEATURES:
            return FEATURES[self.features]
        (entry,) = entry_points(group=_TRAINED, name=self.features)
        return cast(Features, entry.load()(self.root, self.prior, self.prior_sha256))

    def model_options(self) -> dict[str, Any]:
        """Options of a model that the data determine."""
        return {"input_shape": self.input_shape, "num_classes": self.num_classes}

    def describe_inputs(self) -> dict[str, Any]:
        """How an input is prepared, for users of an exported model: `scale=standard` has published constants."""
        return _inputs(self.spec, self.scale, self.features)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(channels, height, width); before anything is loaded, by preparing one image."""
        if self._splits is not None:
            return self.train_set.input_shape
        pixels = torch.zeros(1, self._image_size, self._image_size, len(self.spec.mean))
        return self._normalized(Images(pixels, torch.zeros(1, dtype=torch.long))).input_shape

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.spec.num_classes

    def noise_batch(self, size: int, generator: torch.Generator) -> Batch:
        """Images of uniform noise with random labels, scaled as the data are; they need no budget."""
        shape = (self._image_size, self._image_size, len(self.spec.mean))
        prepare = partial(_prepared, spec=self.spec, scale=self.scale, features=self._make_features())
        return labeled_noise(size, generator, shape, self.num_classes, prepare)

    def _made_up(self) -> tuple[InMemoryImages, InMemoryImages]:
        """Records that are inserted, each once, and references; the former do not depend on the latter's number."""
        generator = torch.Generator().manual_seed(self.inserted.seed)
        inserted = self.noise_batch(self.inserted.records, generator)
        references = self.noise_batch(self.inserted.references, generator)
        return _rows(*inserted), _rows(*references)

    def inserted_and_references(self) -> Iterator[tuple[DataLoader[Batch], DataLoader[Batch]]]:
        """For each label the inserted records that have it, and the references with that label in place of their own.

        A network may prefer one label for all noise; so only an image is compared with others, and no label.
        """
        inserted, references = self._made_up()
        for label in torch.as_tensor(np.unique(inserted.labels.numpy())):
            with_label = inserted.subset(torch.nonzero(inserted.labels == label).flatten().tolist())
            relabeled = InMemoryImages(references.pixels, label.expand(len(references)))
            yield self._eval_loader(with_label), self._eval_loader(relabeled)


def _rows(images: Tensor, labels: Tensor) -> InMemoryImages:
    """A batch (N, C, H, W) as a data set."""
    return InMemoryImages(images.permute(0, 2, 3, 1).contiguous(), labels)
