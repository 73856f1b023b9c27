"""LightningModules: training procedures that know nothing of privacy."""

from dpbench.modules.image_classifier import ImageClassifier

__all__ = ["ImageClassifier"]
