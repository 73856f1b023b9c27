"""A trained model for others: its weights, how to build it, and a card that says how private it is."""
