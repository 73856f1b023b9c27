"""`dpbench reproduce claims`: every epsilon that the five papers print, computed again with each accountant."""
