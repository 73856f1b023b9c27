"""Several seeds of a training in one process, their steps in one pass."""
