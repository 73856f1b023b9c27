"""`dpbench workflow`: noise chosen on random labels, then training on the data (three_tools_2018, section 3)."""
