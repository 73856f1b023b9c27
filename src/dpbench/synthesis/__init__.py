"""Synthetic data: sampled from a trained GAN, with a card that says what they may be used for, and judged."""
