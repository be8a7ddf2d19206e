"""Environments: where prompts come from and what an answer is worth. See docs/ENVIRONMENTS.md.

- `base`: the interface, and what makes a score one.
- `digits`, `guess`: those that are shipped. `reward`, `tasks`: somebody's own reward function
  and own tasks. `verifiers`, `verifiers_v1`, `chat`: what was made for that library.
- `loading`: an environment by its name in the configuration.
- `judge`, `wire`, `child`: asking an environment without trusting it with this process.

Nothing here needs torch.
"""

from holdfast.rollout.environments.base import (
    Environment,
    Limits,
    Purpose,
    Score,
    Spoilt,
    Task,
    held_out,
)
from holdfast.rollout.environments.judge import Judge
from holdfast.rollout.environments.loading import load_environment

__all__ = [
    "Environment",
    "Judge",
    "Limits",
    "Purpose",
    "Score",
    "Spoilt",
    "Task",
    "held_out",
    "load_environment",
]
