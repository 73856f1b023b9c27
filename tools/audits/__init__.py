"""Tables of claimed, sound and audited epsilons: every strategy, every kind of record, and broken mechanisms."""
