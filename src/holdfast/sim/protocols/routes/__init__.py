"""Jobs, gateways and callers, simulated."""
