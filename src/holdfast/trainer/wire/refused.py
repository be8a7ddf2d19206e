"""What the client libraries can ask for and is not offered here: one sentence each.

Pure. A request that is not in this table, nor served, is one that no library sends.
"""

import re

__all__ = ["NO_DEPLOYMENTS", "why_not"]

NO_DEPLOYMENTS = "there are no deployments here: sample with tinker's client, or with replicas"

_TAKING_OUT = (
    "weights cannot be taken out over the network: their safetensors lie below the --folder of "
    "the service"
)
_PROJECTS = "there are no projects here: weights belong to the job that saved them"
_MONEY = "this service keeps no bills and no audit log"

_REFUSED: tuple[tuple[str, str, str], ...] = (
    ("POST", r"save_weights_external", _TAKING_OUT),
    ("GET", r"training_runs/.+/(external_weights_urls|archive)", _TAKING_OUT),
    ("POST", r"copy_weights", f"{_PROJECTS}, and load_state reads them there"),
    ("PUT", r"sessions/.+/project", _PROJECTS),
    (
        "GET",
        r"sessions/.+/trace_export",
        "sessions leave no traces here: `holdfast jobs logs` shows what the trainer wrote",
    ),
    ("POST", r"sessions/search", "sessions cannot be searched: list_sessions lists all of them"),
    (
        "POST",
        r"create_custom_loss",
        "losses of your own run in your program: give forward_backward_custom a function",
    ),
    ("GET", r"audit", _MONEY),
    ("GET", r"billing/.+", _MONEY),
    ("POST", r"auth/token", "there are no tokens here: send the API key itself"),
    (
        "POST",
        r"weight_sync",
        "replicas subscribe to what publish_weights publishes, see docs/WEIGHTS.md",
    ),
    ("POST", r"create_sampling_route", NO_DEPLOYMENTS),
)
_COMPILED = tuple((method, re.compile(path), why) for method, path, why in _REFUSED)


def why_not(method: str, name: str) -> str:
    """Why this is not done: a sentence for whoever has asked for it."""
    for asked, path, why in _COMPILED:
        if asked == method and path.fullmatch(name):
            return f"{name[:80]} is not offered: {why}"
    return f"there is no {method} {name[:80]!r} here"
