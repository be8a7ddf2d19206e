"""What is imported beforehand, for each kind of program: the one place that lists it.

By name: this package knows none of them. A fork server (`forkserver`) imports for Holdfast's own
programs, and forks them, with one thread. Users' programs under `holdfast launch` get an
interpreter of their own that waits (`holdfast.launch.warm`): libraries that a user imports may
have threads, which a fork would lose.
"""

__all__ = ["AGENT", "HOST", "RANK", "RUN", "USER"]

USER = ("torch", "torch._dynamo")
"""A user's worker: the first optimizer imports torch._dynamo, which takes longer than torch."""

RANK = (
    *USER,
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "peft",
    "holdfast.trainer.live",
    "holdfast.trainer.orders",
)
"""A rank of Holdfast's own trainer: seconds that a replacement need not wait."""

AGENT = ("holdfast.launch.commands", "holdfast.launch.forked_child", "holdfast.trainer.compute")
"""An agent of ranks, and what a rank imports once it computes."""

HOST = ("holdfast.trainer.process", *RANK, *AGENT)
"""The fork server of a host that starts Holdfast's own trainers."""

RUN = (
    *HOST,
    "holdfast.gateway.process",
    "holdfast.jobs.host_process",
    "holdfast.rollout.process",
    "holdfast.rollout.own_sampler",
    "holdfast.run.orchestrator_process",
)
"""The fork server of a run: everything that a part of it will import."""
