"""Export of a trained model: weights, model card and ledger."""
