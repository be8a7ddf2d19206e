"""Mooncake as a place for values: `mooncake://` URLs import this when they are opened."""

from holdfast.contrib.mooncake.backend import MooncakeBackend, from_url

__all__ = ["MooncakeBackend", "from_url"]
