"""Language models and the Trainer of Hugging Face."""
