"""Holdfast keeps distributed RL post-training running while parts of it die."""

__version__ = "0.1.0"
