"""Features learned on images of random processes only: a prior from no data (Tang et al. 2023, DP-RandP)."""
