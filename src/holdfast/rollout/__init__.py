"""Rollouts: environments with rewards, and replicas that make samples. See docs/RUN.md."""
