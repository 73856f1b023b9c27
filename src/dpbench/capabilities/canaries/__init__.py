"""Canary gradients of an audited run, and the scores that an auditor sees."""
