"""The convolutional network of the TensorFlow Privacy tutorial."""

from __future__ import annotations

from torch import nn

from dpbench.models.initialization import draw_as_keras, is_published
from dpbench.models.shapes import conv_output, require

_ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MNISTCNN(nn.Sequential):
    """Two convolutions and two fully connected layers; 26,010 parameters on MNIST.

    | layer | output on 1×28×28 |
    | --- | --- |
    | conv 8×8, 16 channels, stride 2, padding 3 ('same'), ReLU | 16×14×14 |
    | max-pool 2×2, stride 1 | 16×13×13 |
    | conv 4×4, 32 channels, stride 2, ReLU | 32×5×5 |
    | max-pool 2×2, stride 1 | 32×4×4 |
    | fully connected, ReLU | 32 |
    | fully connected | num_classes |

    Used for MNIST by Nasr et al. 2020 (gradient_compression_denoising_2020, Table 1).

    Args:
        input_shape: (channels, height, width) of an image; at least 14×14.
        num_classes: Number of classes.
        activation: "relu", as in the tutorial, or "tanh" in its place everywhere: bounded activations keep gradients
            small, so that clipping costs less (Papernot et al. 2021, "Tempered sigmoid activations").
        initialization: "torch" (PyTorch's own) or "published" (the tutorial's, which is Keras' own: Glorot uniform,
            zero biases).

    Raises:
        ValueError: The images are too small, or there is no such activation or initialization.

    Shape:
        (N, channels, height, width) → (N, num_classes).
    """

    def __init__(
        self,
        input_shape: tuple[int, int, int],
        num_classes: int,
        activation: str = "relu",
        initialization: str = "torch",
    ) -> None:
        channels, *sides = input_shape
        require(min(sides) >= 14, "mnist_cnn", input_shape, "images of at least 14×14 pixels")
        if activation not in _ACTIVATIONS:
            raise ValueError(f"model.activation must be relu or tanh, not {activation!r}.")
        act = _ACTIVATIONS[activation]
        for kernel, stride, padding in ((8, 2, 3), (2, 1, 0), (4, 2, 0), (2, 1, 0)):
            sides = [conv_output(side, kernel, stride, padding) for side in sides]
        super().__init__(
            nn.Conv2d(channels, 16, 8, stride=2, padding=3),
            act(),
            nn.MaxPool2d(2, stride=1),
            nn.Conv2d(16, 32, 4, stride=2),
            act(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(32 * sides[0] * sides[1], 32),
            act(),
            nn.Linear(32, num_classes),
        )
        if is_published(initialization):
            draw_as_keras(self)
