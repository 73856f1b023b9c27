"""Running what the configuration describes."""
