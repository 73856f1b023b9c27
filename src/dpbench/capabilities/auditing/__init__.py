"""Lower bounds on ε, and checks of the declared mechanism, from the canaries of a run."""
