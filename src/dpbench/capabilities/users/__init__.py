"""Privacy by user: data sets of users, and local training, by which each user is a record (DP-FedAvg)."""
