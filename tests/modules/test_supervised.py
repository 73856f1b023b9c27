"""Modules of sequences, tags and reconstructions: losses are means over records, metrics are as by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dpbench.errors import ConfigurationError, DataError
from dpbench.models import (
    MLP,
    MLPGAN,
    Autoencoder,
    CharLSTM,
    RegressionMLP,
    TagRegression,
    TextClassifier,
)
from dpbench.modules import ImageClassifier, NextToken, Reconstruction, Regression, TagPredictor
from dpbench.strategies import DPSGD
from tests.strategies.worlds import loader_of, trainer_for, weights_of

SGD = partial(torch.optim.SGD, lr=0.5)
PAD, TOKENS = 0, 8


class Given(nn.Module):
    """Outputs that a test has written down; its parameter is there to be trained."""

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self.outputs, self.shift = outputs, nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.outputs[: len(inputs)] + self.shift


def sequences(rows: int = 6) -> tuple[Tensor, Tensor]:
    """Rows of unlike length; the last holds nothing but padding."""
    both = torch.randint(1, TOKENS, (rows, 7))
    for row in range(rows):
        both[row, 7 - row :] = PAD
    both[-1] = PAD
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def texts(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.rand(rows, 9), (torch.rand(rows, 7) < 0.3).float()


def images(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.rand(rows, 1, 4, 4), torch.randint(3, (rows,))


def table(rows: int = 6) -> tuple[Tensor, Tensor]:
    return torch.rand(rows, 5), torch.rand(rows, 2)


def labeled_texts(rows: int = 6) -> tuple[Tensor, Tensor]:
    return sequences(rows)[0], torch.arange(rows) % 3


def test_recalls_of_classes(tmp_path: Path) -> None:
    """The third class is never found, the fourth has no images: 0 and 0."""
    logits = torch.eye(4)[[0, 0, 1, 1, 0, 1]] * 5
    module = ImageClassifier(Given(logits), SGD, 4, monitored="test", recalls=True)
    data = DataLoader(TensorDataset(torch.zeros(6, 1), torch.tensor([0, 0, 0, 1, 2, 2])), batch_size=6)
    trainer = pl.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path, enable_progress_bar=False)
    for found in (trainer.test(module, data)[0], trainer.validate(module, data)[0]):
        recalls = [found[f"test/recall/{label}"] for label in range(4)]
        assert recalls == pytest.approx([2 / 3, 1, 0, 0]) and found["test/accuracy"] == 0.5
    plain = ImageClassifier(Given(logits), SGD, 4, monitored="test")
    assert not any("recall" in name for name in trainer.test(plain, data)[0])


MODULES: dict[str, tuple[Callable[[], pl.LightningModule], Callable[..., tuple[Tensor, Tensor]]]] = {
    "next_token": (lambda: NextToken(CharLSTM(TOKENS, hidden=5), SGD, TOKENS), sequences),
    "tags": (lambda: TagPredictor(TagRegression(9, 7), SGD, 7), texts),
    "reconstruction": (lambda: Reconstruction(Autoencoder((1, 4, 4), [5, 2]), SGD), images),
    "texts": (lambda: ImageClassifier(TextClassifier(TOKENS, 3, 4, 5), SGD, 3), labeled_texts),
    "regression": (lambda: Regression(RegressionMLP((5,), 2, [4]), SGD, 2), table),
}


def stepping(module: pl.LightningModule) -> Any:
    """A module whose training step can be called by itself."""
    module.trainer = pl.Trainer(logger=False, enable_checkpointing=False, log_every_n_steps=10**9, accelerator="cpu")
    return module


@pytest.mark.parametrize("name", MODULES)
def test_the_loss_is_the_mean_of_the_losses_of_single_records(name: str) -> None:
    make, data = MODULES[name]
    torch.manual_seed(0)
    module, batch = stepping(make()), data()
    whole = module.training_step(batch, 0)
    single = [module.training_step((batch[0][i : i + 1], batch[1][i : i + 1]), 0) for i in range(len(batch[0]))]
    losses = torch.stack([one["loss"] for one in single])
    torch.testing.assert_close(whole["loss"], losses.mean())
    assert whole["record_metrics"].keys() == module.record_metrics.keys()
    for metric, size in module.record_metrics.items():
        values = whole["record_metrics"][metric]()
        assert values.shape == ((len(losses),) if size == 1 else (len(losses), size))
        alone = torch.cat([one["record_metrics"][metric]() for one in single])
        torch.testing.assert_close(values, alone)
    torch.testing.assert_close(whole["record_metrics"]["loss"](), losses)
    if name == "next_token":  # padding does not count
        longer = tuple(F.pad(x, (0, 4), value=PAD) for x in batch)
        torch.testing.assert_close(module.training_step(longer, 0)["record_metrics"]["loss"](), losses)


@pytest.mark.parametrize("name", ["next_token", "tags", "reconstruction", "regression"])
def test_trains_and_logs(name: str, tmp_path: Path) -> None:
    make, data = MODULES[name]
    torch.manual_seed(0)
    module, rows = make(), TensorDataset(*data(40))
    before = weights_of(module)
    strategy = DPSGD(noise_multiplier=1.0, delta=1e-3, seed=0)
    trainer = trainer_for(tmp_path, strategy, 4, log_every_n_steps=2)
    trainer.fit(module, loader_of(rows), DataLoader(rows, 10))
    assert (weights_of(module) != before).any()
    found = {key for key in trainer.callback_metrics if not key.startswith(("privacy/", "private/"))}
    assert found == {"nonprivate/train_loss", module.objective}
    (result,) = trainer.test(module, DataLoader(rows, 10), verbose=False)
    assert set(result) == {f"test/{module.objective.partition('/')[2]}"}


def test_a_batch_of_nothing_but_padding() -> None:
    module = stepping(NextToken(CharLSTM(TOKENS, hidden=5), SGD, TOKENS))
    empty = torch.zeros(3, 4, dtype=torch.long)
    result = module.training_step((empty, empty), 0)
    result["loss"].backward()
    assert float(result["loss"].detach()) == 0 and not result["record_metrics"]["accuracy"]().any()
    assert not any(p.grad is not None and p.grad.any() for p in module.parameters())
    module.measure(module.test_accuracy, (empty, empty))
    assert float(module.test_accuracy.compute()) == 0


def test_accuracy_of_tokens_by_hand() -> None:
    targets = torch.tensor([[1, 2, 3, 7], [4, 7, 0, 0], [0, 0, 0, 0]])
    said = torch.tensor([[1, 2, 5, 7], [4, 2, 0, 0], [1, 0, 2, 0]])
    batch = torch.ones_like(targets), targets
    every = stepping(NextToken(Given(F.one_hot(said, TOKENS).float()), SGD, TOKENS))
    rows = every.training_step(batch, 0)["record_metrics"]["accuracy"]()
    assert rows.tolist() == [3 / 4, 1 / 2, 0]
    metric = every.test_accuracy
    every.measure(metric, batch)
    assert float(metric.compute()) == pytest.approx(4 / 6)
    some = stepping(NextToken(Given(F.one_hot(said, TOKENS).float()), SGD, TOKENS, ignored=[7]))
    step = some.training_step(batch, 0)
    torch.testing.assert_close(step["record_metrics"]["accuracy"](), torch.tensor([2 / 3, 1, 0]))
    torch.testing.assert_close(step["loss"], every.training_step(batch, 0)["loss"])  # ignored in the accuracy only
    some.measure(some.test_accuracy, batch)
    assert float(some.test_accuracy.compute()) == pytest.approx(3 / 4)


def test_recall_of_tags_by_hand() -> None:
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3], [1.0, 2, 3, 4, 5, 6, 7], [9.0, 8, 7, 6, 5, 4, 3]])
    tags = torch.tensor([[1.0, 0, 0, 0, 1, 1, 0], [1.0, 1, 0, 0, 0, 0, 1], [0.0, 0, 0, 0, 0, 0, 0]])
    module = stepping(TagPredictor(Given(logits), SGD, 7))
    result = module.training_step((torch.zeros(3, 9), tags), 0)
    torch.testing.assert_close(result["record_metrics"]["recall_at_5"](), torch.tensor([2 / 3, 1 / 3, 0]))
    by_hand = (-tags * logits.sigmoid().log() - (1 - tags) * (-logits).sigmoid().log()).mean()
    torch.testing.assert_close(result["loss"], by_hand)
    metric = module.test_recall_at_5
    module.measure(metric, (torch.zeros(3, 9), tags))
    assert float(metric.compute()) == pytest.approx(3 / 6)  # of all tags together, as Keras' Recall(top_k=5)
    few = TagPredictor(Given(torch.tensor([[1.0, -1, 0]])), SGD, 3)  # fewer tags than five
    few.measure(few.test_recall_at_5, (torch.zeros(1, 2), torch.tensor([[0, 1, 0]])))
    assert float(few.test_recall_at_5.compute()) == 1


def test_squared_error_by_hand() -> None:
    x, labels = images(2)
    made = torch.full((2, 16), 0.25)
    for batch in ([x, labels], (x,), x):
        module = stepping(Reconstruction(Given(made), SGD))
        expected = float((x - 0.25).square().mean())
        assert float(module.training_step(batch, 0)["loss"].detach()) == pytest.approx(expected)
        module.measure(module.test_mean_squared_error, batch)
        assert float(module.test_mean_squared_error.compute()) == pytest.approx(expected)


def test_squared_error_of_targets_by_hand() -> None:
    """Of one target (N,) or (N, 1), and of whole numbers: nothing is broadcast over records."""
    amounts = torch.tensor([1, 2, 4])
    predicted = torch.tensor([[1.5], [2.0], [2.0]])
    batch = torch.zeros(3, 5), amounts
    for outputs, targets in ((predicted, amounts), (predicted[:, 0], amounts[:, None].float())):
        module = stepping(Regression(Given(outputs), SGD, 1))
        step = module.training_step((batch[0], targets), 0)
        torch.testing.assert_close(step["record_metrics"]["loss"](), torch.tensor([0.25, 0.0, 4.0]))
        assert module.losses((batch[0], targets)).tolist() == pytest.approx([0.25, 0, 4])
        module.measure(module.test_mean_squared_error, (batch[0], targets))
        assert float(module.test_mean_squared_error.compute()) == pytest.approx(4.25 / 3)
    empty = stepping(Regression(RegressionMLP((5,), 1), SGD, 1)).training_step((batch[0][:0], amounts[:0]), 0)
    assert empty["record_metrics"]["loss"]().shape == (0,)
    with pytest.raises(ConfigurationError, match="returns 3 numbers for 1 targets of a record: .*model=regression_mlp"):
        stepping(Regression(MLP((5,), 3), SGD, 1)).training_step(batch, 0)


def test_losses_of_a_batch_added_up() -> None:
    torch.manual_seed(0)
    model, batch = Autoencoder((1, 4, 4), [5, 2]), images()
    mean, total = (
        stepping(Reconstruction(model, SGD, loss_reduction=word)).training_step(batch, 0) for word in ("mean", "sum")
    )
    torch.testing.assert_close(total["loss"], 6 * mean["loss"])
    with pytest.raises(ValueError, match="module.loss_reduction must be mean or sum, not 'none'"):
        Reconstruction(model, SGD, loss_reduction="none")


ROW = torch.ones(2, 3, dtype=torch.long)


def test_sequences_that_do_not_fit() -> None:
    module = stepping(NextToken(CharLSTM(TOKENS, hidden=5), SGD, TOKENS))
    words = r"tokens are \(2, 3\) and targets \(2, 2\): both must be \(sequences, length\)"
    with pytest.raises(DataError, match=words):
        module.training_step((ROW, ROW[:, :2]), 0)
    with pytest.raises(DataError, match=r"tokens are \(3\) and targets \(3\)"):
        module.measure(module.val_accuracy, (ROW[0], ROW[0]))


def test_models_and_options_that_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"the model returns \(2, 3, 9\) for tokens \(2, 3\), not logits .* 8\)"):
        stepping(NextToken(CharLSTM(9, hidden=5), SGD, TOKENS)).training_step((ROW, ROW), 0)
    with pytest.raises(ConfigurationError, match="returns 3 numbers for images of 16 pixels: .*model=autoencoder"):
        stepping(Reconstruction(MLP((1, 4, 4), 3), SGD)).training_step(images(), 0)
    with pytest.raises(DataError, match=r"tags are \(6, 7\), but the model's logits \(6, 5\)"):
        stepping(TagPredictor(TagRegression(9, 5), SGD, 5)).training_step(texts(), 0)
    for options in ({"padding": 8}, {"ignored": [3, -1]}):
        with pytest.raises(ValueError, match=f"module.{next(iter(options))} must lie between 0 and 7"):
            NextToken(CharLSTM(TOKENS), SGD, TOKENS, **options)
    for module in (partial(ImageClassifier, num_classes=3), Reconstruction):
        with pytest.raises(ConfigurationError, match="add module=gan"):
            module(MLPGAN((1, 8, 8), 3), SGD)
