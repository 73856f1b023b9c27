"""What a record is, and how a lot becomes per-record gradients."""

from dpbench.records.local_training import LocalTraining
from dpbench.records.users import Users

__all__ = ["LocalTraining", "Users"]
