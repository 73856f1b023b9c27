"""A run's folder: its files, record, ledger and state."""
