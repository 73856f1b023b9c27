"""`dpbench tune`: the best of a random number of private trials, within one ε (Papernot & Steinke 2022)."""
