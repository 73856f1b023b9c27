"""Canaries of an audited training: made-up vectors in its lots, sums of what is seen of them, and their file."""
