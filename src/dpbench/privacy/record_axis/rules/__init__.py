"""Rules of ATen operators, by chapter."""

from dpbench.privacy.record_axis.rules import elements, indexing, layers, losses, products, reductions, shapes

__all__ = ["elements", "indexing", "layers", "losses", "products", "reductions", "shapes"]
