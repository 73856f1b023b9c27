"""The order of a private step, for every driver."""
