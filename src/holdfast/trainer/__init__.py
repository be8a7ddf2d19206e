"""The training service: Tinker's protocol, and operations that take effect exactly once."""
