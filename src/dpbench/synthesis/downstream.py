"""How useful synthetic images are: classifiers that learn from them alone, tested on real images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_accuracy

from dpbench.models import MNISTCNN

EPOCHS, LEAST_STEPS, BATCH_SIZE, LEARNING_RATE = 5, 400, 128, 1e-3
_ROWS = 10_000  # for logistic regression
_SEED = 0


def train_cnn(images: Tensor, labels: Tensor, classes: int) -> nn.Module:
    """The MNIST CNN after five epochs (few images: 400 steps); nothing is chosen on any data.

    Args:
        images: (N, C, H, W), in [0, 1].
        labels: (N,).
        classes: Number of classes.
    """
    channels, height, width = images.shape[1:]
    with torch.random.fork_rng():
        torch.manual_seed(_SEED)
        model = MNISTCNN((channels, height, width), classes)
        optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        for _ in range(max(EPOCHS, -(-LEAST_STEPS * BATCH_SIZE // len(images)))):
            for rows in torch.split(torch.randperm(len(images)), BATCH_SIZE):
                optimizer.zero_grad()
                F.cross_entropy(model(images[rows] - 0.5), labels[rows]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return model.eval()


@torch.no_grad()
def _predict(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(part - 0.5).argmax(1) for part in torch.split(images, 1000)])


def accuracies(synthetic: tuple[Tensor, Tensor], real: tuple[Tensor, Tensor], classes: int) -> dict[str, float]:
    """Accuracy on real images of a CNN and of logistic regression that saw synthetic ones only.

    Args:
        synthetic: Images (N, C, H, W) in [0, 1], and labels (N,).
        real: The same, of test data.
        classes: Number of classes.
    """
    predicted = _predict(train_cnn(*synthetic, classes), real[0])
    regression = LogisticRegression(max_iter=200, tol=1e-2, random_state=_SEED)
    regression.fit(synthetic[0][:_ROWS].flatten(1).numpy(), synthetic[1][:_ROWS].numpy())
    linear = torch.from_numpy(regression.predict(real[0].flatten(1).numpy()))
    return {
        name: float(multiclass_accuracy(found, real[1], classes, average="micro"))
        for name, found in (("accuracy_cnn", predicted), ("accuracy_logistic_regression", linear))
    }
