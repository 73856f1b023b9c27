"""Networks: plain `torch.nn` modules that adapt to a data set's channels, size and classes."""

from dpbench.models.densenet import DenseNet
from dpbench.models.gan import MLPGAN, ConvGAN
from dpbench.models.mlp import MLP
from dpbench.models.mnist_cnn import MNISTCNN
from dpbench.models.small_alexnet import SmallAlexNet

__all__ = ["MLP", "MLPGAN", "MNISTCNN", "ConvGAN", "DenseNet", "SmallAlexNet"]
