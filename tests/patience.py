"""How long tests wait before they call something a hang."""

HANG_S = 60.0
"""Longer than anything takes here on a busy machine with few processors. It tells work from a
hang, and says nothing about speed: benchmarks do."""
