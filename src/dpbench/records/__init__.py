"""What a record is, and how a lot becomes per-record gradients."""
