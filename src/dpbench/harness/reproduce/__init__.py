"""Tables and figures of papers, reproduced."""
