"""Drivers of a private session: the Lightning callback of all strategies, and the plain loop."""
