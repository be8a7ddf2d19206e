"""The control plane: trainer jobs, their states, epochs and addresses."""
