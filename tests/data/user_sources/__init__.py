"""Tests of the data sets by users."""
