"""The rendezvous, simulated."""
