"""LightningModules: training procedures that know nothing of privacy."""

from dpbench.modules.gan import GAN
from dpbench.modules.image_classifier import ImageClassifier
from dpbench.modules.next_token import LanguageModel, NextToken
from dpbench.modules.reconstruction import Reconstruction
from dpbench.modules.regression import Regression
from dpbench.modules.tag_predictor import TagPredictor

__all__ = [
    "GAN",
    "ImageClassifier",
    "LanguageModel",
    "NextToken",
    "Reconstruction",
    "Regression",
    "TagPredictor",
]
