"""Pages, tables and pictures of this repository's results/, from the committed runs."""
