"""Synthetic data: sampling from a trained GAN, and their evaluation."""
