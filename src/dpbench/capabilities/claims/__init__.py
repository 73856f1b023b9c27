"""`dpbench reproduce claims`: every epsilon that the five papers print, computed again with each accountant."""

from dpbench.harness.reproduce.tables import ComputedTable

CLAIMS = ComputedTable(
    "every epsilon that the papers print (one minute)", "dpbench.capabilities.claims.table:reproduce_claims"
)
"""An entry point of `dpbench.computed_tables`."""
