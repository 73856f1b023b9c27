"""A plug-in of dpbench, as small as one can be."""
