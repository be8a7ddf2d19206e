"""The node agent: starts, watches and replaces the workers of one node."""
