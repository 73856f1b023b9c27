"""The mechanism and its accounting: pure functions on torch and dp_accounting."""
