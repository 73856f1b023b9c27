"""LightningModules: training procedures that know nothing of privacy."""

from dpbench.modules.gan import GAN
from dpbench.modules.image_classifier import ImageClassifier

__all__ = ["GAN", "ImageClassifier"]
