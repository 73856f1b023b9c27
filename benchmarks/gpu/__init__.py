"""What a GPU makes of private training: `python -m benchmarks gpu`, ten minutes; `--device cpu` tries it here."""
