"""Training operations, simulated."""
