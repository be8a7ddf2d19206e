"""Where a job's data path is, who may use it, and who knows the job's state."""

import importlib.util
import ssl
from dataclasses import dataclass, field, replace
from typing import Any, Self

import httpx

from holdfast.client.addresses import check_key, check_url, proxy_of, verify
from holdfast.client.control import ControlPlane
from holdfast.client.renewal import RenewingTransport
from holdfast.client.transport import POLICY, VerifiedTransport
from holdfast.client.warmup import WarmUp
from holdfast.errors import Mistake
from holdfast.jobs.records import check_name
from holdfast.retry import Policy
from holdfast.timeouts import DEFAULTS, Timeouts

__all__ = ["Target"]

_HTTP2 = importlib.util.find_spec("h2") is not None
_CONNECTIONS = httpx.Limits(max_connections=1000, max_keepalive_connections=100)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """One data path, and how it is used."""

    base_url: str
    """What comes before `/api/v1/...`."""
    api_key: str = field(default="", repr=False)
    control: ControlPlane | None = None
    """Who is asked about a 404. Without one, a 404 is given to the caller as it is."""
    policy: Policy | None = None
    """How a 404 is doubted; by default as `POLICY` says, for `timeouts.doubt_s`."""
    tls: ssl.SSLContext | None = None
    """Whose certificates are trusted, if not the usual ones. There is no TLS without."""
    timeouts: Timeouts = DEFAULTS

    def __post_init__(self) -> None:
        check_url(self.base_url)
        check_key(self.api_key)

    @classmethod
    def of(
        cls,
        gateway: str,
        *,
        api_key: str = "",
        account: str = "",
        job: str = "",
        control: str = "",
        policy: Policy | None = None,
        tls: ssl.SSLContext | None = None,
        timeouts: Timeouts = DEFAULTS,
    ) -> Self:
        """The target behind a gateway's URL.

        With `account` and `job`, the data path is theirs, and their state is asked for at
        `control` (the gateway's own host, if empty). Without, `gateway` is the data path, and
        nobody is asked. A URL has no password, no query and no fragment.
        """
        base = check_url(gateway)
        if bool(account) != bool(job):
            raise Mistake("give both account and job, or neither")
        if control and not job:
            raise Mistake("a control plane is asked about a job: give account and job")
        plane: ControlPlane | None = None
        if job:
            names = f"{check_name('account', account)}/{check_name('job', job)}"
            call_s = timeouts.control_call_s
            plane = ControlPlane(control or base, account, job, api_key, call_s, tls)
            base = f"{base}/training/v1/rlorTrainerJobs/{names}"
        return cls(
            base_url=base,
            api_key=api_key,
            control=plane,
            policy=policy,
            tls=tls,
            timeouts=timeouts,
        )

    def transport(self) -> VerifiedTransport:
        """A new transport with its own connections."""
        inner = RenewingTransport(self._connections)
        policy = self.policy or replace(POLICY, deadline_s=self.timeouts.doubt_s)
        return VerifiedTransport(inner, self.control, policy=policy)

    def _connections(self) -> httpx.AsyncBaseTransport:
        return httpx.AsyncHTTPTransport(
            verify=verify(self.tls),
            http2=_HTTP2,
            limits=_CONNECTIONS,
            proxy=proxy_of(self.base_url),
        )

    def warm_up(self, *, limit_s: float | None = None, **more: Any) -> WarmUp:
        """A warm-up of this data path; `await` its `run`. `more` are fields of `WarmUp`."""
        return WarmUp(
            base_url=self.base_url,
            api_key=self.api_key,
            control=self.control,
            tls=self.tls,
            limit_s=self.timeouts.warm_up_s if limit_s is None else limit_s,
            **{"probe_s": self.timeouts.probe_s, **more},
        )
