"""DP strategies as Lightning callbacks."""

from dpbench.strategies.base import PrivateStrategy
from dpbench.strategies.dpsgd import DPSGD
from dpbench.strategies.non_private import NonPrivate

__all__ = ["DPSGD", "NonPrivate", "PrivateStrategy"]
