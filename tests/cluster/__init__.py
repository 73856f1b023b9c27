"""What a cluster makes of a sweep: `make test-cluster` runs these through a Slurm and a Ray of this machine."""
