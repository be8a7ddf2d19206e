"""A whole run, simulated."""
