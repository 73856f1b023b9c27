"""What takes too long for the test suite: `make crash` and `make two-processes`."""
