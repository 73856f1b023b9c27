"""Networks: plain `torch.nn` modules that take the sizes that the data set provides."""

from dpbench.models.densenet import DenseNet
from dpbench.models.encoders import TextEncoder, VisionTransformer
from dpbench.models.federated import EMNISTCNN, Autoencoder, CharLSTM, TagRegression, WordLSTM
from dpbench.models.gan import MLPGAN, ConvGAN
from dpbench.models.mlp import MLP, RegressionMLP
from dpbench.models.mnist_cnn import MNISTCNN
from dpbench.models.resnet18_gn import ResNet18GN
from dpbench.models.scattering_cnn import ScatteringCNN
from dpbench.models.small_alexnet import SmallAlexNet
from dpbench.models.text_classifier import TextClassifier
from dpbench.models.trainable import LoRA, merge_adapters, merged_state, train_only
from dpbench.models.wide_resnet import WideResNet

__all__ = [
    "EMNISTCNN",
    "MLP",
    "MLPGAN",
    "MNISTCNN",
    "Autoencoder",
    "CharLSTM",
    "ConvGAN",
    "DenseNet",
    "LoRA",
    "RegressionMLP",
    "ResNet18GN",
    "ScatteringCNN",
    "SmallAlexNet",
    "TagRegression",
    "TextClassifier",
    "TextEncoder",
    "VisionTransformer",
    "WideResNet",
    "WordLSTM",
    "merge_adapters",
    "merged_state",
    "train_only",
]
