"""Attacks that were tried on earlier versions, and what becomes of them."""
