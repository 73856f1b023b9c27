"""Records, and the way from a batch to per-record gradients."""

from functools import partial

from dpbench.names import from_capability

__getattr__ = partial(from_capability, __name__)
