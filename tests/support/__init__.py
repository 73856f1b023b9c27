"""What several test files share: builders, fakes, and the slow truth to compare with."""
