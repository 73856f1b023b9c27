"""What a record is, and how a lot becomes per-record gradients."""

from functools import partial

from dpbench.names import from_capability

__getattr__ = partial(from_capability, __name__)
