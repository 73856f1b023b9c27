"""A small table of our own, for the tests of tables."""

from __future__ import annotations

from pathlib import Path

TABLE = """
title: Digits
source: nowhere
metric: test/accuracy
seeds: 2
hours: 0.01
words: [data=digits, model=mlp, "model.hidden=[8]", data.expected_batch_size=64, engine.native=off]
rows:
  short: {label: 3 steps, words: [trainer.max_steps=3], epsilon: 1.5}
  long: {label: 6 steps, words: [trainer.max_steps=6]}
columns:
  private: {label: DP-SGD, words: [strategy=dpsgd]}
  plain: {label: not private, words: [strategy=none]}
difference: [private, plain]
paper:
  short: {private: [90.0, 0.1], plain: [95.0]}
notes: [a note]
"""


def edited(path: Path, old: str, new: str) -> str:
    """Write the table with one thing changed."""
    assert old in TABLE
    path.write_text(TABLE.replace(old, new))
    return str(path)
