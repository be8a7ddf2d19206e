"""The run: a whole RL job that you can kill. See docs/RUN.md."""
