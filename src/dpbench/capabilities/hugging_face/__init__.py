"""`dpbench.PrivateTrainer`: Hugging Face's Trainer with private updates."""
