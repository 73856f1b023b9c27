"""Tests of privacy by user: data sets, local training, and trainings by user."""
