"""Seeded simulation of the protocols, and the checkers that judge what it records."""
