"""`noise=banded`: noise that is correlated over a few steps, by banded matrix factorization."""
