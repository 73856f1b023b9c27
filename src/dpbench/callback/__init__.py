"""The Lightning callback that every private strategy is: from lots to private updates."""
