"""What a table can show of its runs: names, units, and which values are better."""

from __future__ import annotations

import math
from dataclasses import dataclass

PER_CENT = 100.0


@dataclass(frozen=True)
class Measure:
    """A metric of the model after the last step.

    Attributes:
        title: What a page calls it.
        axis: What a picture calls it.
        percent: Whether it is a share, shown in percent; else it is shown as it is.
        lower_is_better: Of an error.
        signed: Whether it may be negative.
        needs: Key of a run's configuration without which it is not measured; "": none.
    """

    title: str
    axis: str
    percent: bool = True
    lower_is_better: bool = False
    signed: bool = False
    needs: str = ""

    @property
    def scale(self) -> float:
        """What a value is multiplied by to be shown."""
        return PER_CENT if self.percent else 1.0

    @property
    def heading(self) -> str:
        """The title with its unit."""
        return f"{self.title} in percent" if self.percent else self.title

    @property
    def label(self) -> str:
        """Of an axis."""
        notes = ["%"] * self.percent + ["lower is better"] * self.lower_is_better
        return f"{self.axis} ({', '.join(notes)})" if notes else self.axis

    @property
    def most(self) -> float:
        """The largest value that can be shown."""
        return PER_CENT if self.percent else float("inf")

    @property
    def least(self) -> float:
        """The smallest value that can be shown."""
        return -self.most if self.signed else 0.0

    def text(self, mean: float | None, spread: float | None = None, digits: int = 2, sign: str = "") -> str:
        """A mean and its spread as a cell of a table.

        Args:
            mean: As shown, see `scale`; None or not a number: a dash.
            spread: Of the mean, if known.
            digits: Behind the point, of percents; of others four digits in all are shown, and two of the spread.
            sign: "+" shows the sign of positive means, too.
        """
        if mean is None or math.isnan(mean):
            return "–"
        forms = (f"{sign}.{digits}f", f".{digits}f") if self.percent else (f"{sign}.4g", ".2g")
        return format(mean, forms[0]) + ("" if spread is None or math.isnan(spread) else f" ± {spread:{forms[1]}}")


_ON_REAL = "accuracy on real images"
_SEEN = "diagnostics.training_records"
_INSERTED = "data.inserted.records"
MEASURES = {
    "test/accuracy": Measure("Test accuracy", "test accuracy"),
    "val/accuracy": Measure("Validation accuracy", "validation accuracy"),
    "test/recall_at_5": Measure("Test recall@5", "test recall@5"),
    "val/recall_at_5": Measure("Validation recall@5", "validation recall@5"),
    "test/mean_squared_error": Measure("Test mean squared error", "test mean squared error", False, True),
    "val/mean_squared_error": Measure("Validation mean squared error", "validation mean squared error", False, True),
    "evaluation/accuracy_cnn": Measure("Accuracy on real images of a CNN that was trained on synthetic ones", _ON_REAL),
    "evaluation/accuracy_logistic_regression": Measure(
        "Accuracy on real images of logistic regression on synthetic ones", _ON_REAL
    ),
    "nonprivate/train_accuracy": Measure("Accuracy on training records", "accuracy on training records", needs=_SEEN),
    "nonprivate/exposure_mean": Measure(
        "Mean exposure of inserted records in bits", "mean exposure in bits", False, needs=_INSERTED
    ),
    "nonprivate/exposure_max": Measure(
        "Largest exposure of an inserted record in bits", "largest exposure in bits", False, needs=_INSERTED
    ),
    "nonprivate/accuracy_gap": Measure(
        "Training minus test accuracy", "training minus test accuracy", signed=True, needs=_SEEN
    ),
}
"""By the name under which a run logs it."""
