"""Benchmarks: `make bench`. Figures and ratios, not tests; docs/BENCHMARKS.md keeps them."""
