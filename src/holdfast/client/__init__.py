"""The client half: connect, warm up, verified retry; for our gateway and for others'.

    service = holdfast.client.connect(
        "https://gateway", account="acme", job="one", api_key="tml-...", sdk="tinker"
    )

Not in here: sequence numbers. The libraries take them, or the caller gives them (`native`);
nothing here ever takes a new one.
"""

import importlib.util
import ssl
from typing import Any, Literal

from holdfast.errors import MissingPackage, Mistake

if importlib.util.find_spec("httpx") is None:
    raise MissingPackage("holdfast.client needs httpx: pip install 'holdfast-rl[client]'")

from holdfast.client import fireworks, native, tinker
from holdfast.client.control import ControlPlane
from holdfast.client.happenings import Doubted, Probed, Ready, Retried
from holdfast.client.native import Client, Future
from holdfast.client.target import Target
from holdfast.client.transport import POLICY, VerifiedTransport
from holdfast.client.warmup import Probe, WarmUp
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = [
    "POLICY",
    "Client",
    "ControlPlane",
    "Doubted",
    "Future",
    "Probe",
    "Probed",
    "Ready",
    "Retried",
    "Target",
    "VerifiedTransport",
    "WarmUp",
    "connect",
]

Sdk = Literal["tinker", "fireworks", "native"]


def connect(
    gateway: str,
    *,
    api_key: str,
    account: str = "",
    job: str = "",
    control: str = "",
    sdk: Sdk = "native",
    warm_up_s: float | None = None,
    probe: Probe | None = None,
    policy: Policy | None = None,
    tls: ssl.SSLContext | None = None,
    timeouts: Timeouts = DEFAULTS,
    **options: Any,
) -> Any:
    """Warm up the data path of a job, and give a client of it.

    `sdk` says which: "tinker" a `tinker.ServiceClient`, "fireworks" a
    `FiretitanServiceClient` (both block while they warm up; `options` are theirs), "native" a
    `Client`, which warms up when it is entered. `Target.of` explains the addresses, `policy`
    (of the verified retry), `tls` (for certificates of one's own) and `timeouts`.
    """
    target = Target.of(
        gateway,
        api_key=api_key,
        account=account,
        job=job,
        control=control,
        policy=policy,
        tls=tls,
        timeouts=timeouts,
    )
    wrappers = {"tinker": tinker.connect, "fireworks": fireworks.connect, "native": native.connect}
    if sdk not in wrappers:
        raise Mistake(f"there is no wrapper for {sdk!r}: tinker, fireworks or native")
    return wrappers[sdk](target, warm_up_s=warm_up_s, probe=probe, **options)
