"""Fleets: all replicas of a channel go from one version to the next together."""
