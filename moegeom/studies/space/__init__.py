"""What the data let a router use: reference laws, the mean input, reachable expert sets."""
