"""Where a job's data path is, who may use it, and who knows the job's state."""

import importlib.util
import ssl
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

from holdfast.client.control import ControlPlane
from holdfast.client.tls import verify
from holdfast.client.transport import POLICY, VerifiedTransport
from holdfast.client.warmup import LIMIT_S, Probe, WarmUp
from holdfast.errors import Mistake
from holdfast.retry import Policy

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
    policy: Policy = POLICY
    tls: ssl.SSLContext | bool = True

    @classmethod
    def of(
        cls,
        gateway: str,
        *,
        api_key: str = "",
        account: str = "",
        job: str = "",
        control: str = "",
        policy: Policy = POLICY,
        tls: ssl.SSLContext | bool = True,
    ) -> Self:
        """The target behind a gateway's URL.

        With `account` and `job`, the data path is theirs, and their state is asked for at
        `control` (the gateway's own host, if empty). Without, `gateway` is the data path, and
        nobody is asked.
        """
        if urlsplit(gateway).scheme not in ("http", "https") or not urlsplit(gateway).netloc:
            raise Mistake(f"{gateway[:200]!r} is not the URL of a gateway (http:// or https://)")
        if bool(account) != bool(job):
            raise Mistake("give both account and job, or neither")
        if control and not job:
            raise Mistake("a control plane is asked about a job: give account and job")
        base = gateway.rstrip("/")
        if not job:
            return cls(base_url=base, api_key=api_key, policy=policy, tls=tls)
        names = f"{quote(account, safe='')}/{quote(job, safe='')}"
        return cls(
            base_url=f"{base}/training/v1/rlorTrainerJobs/{names}",
            api_key=api_key,
            control=ControlPlane(control or base, account, job, api_key, tls=tls),
            policy=policy,
            tls=tls,
        )

    def transport(self) -> VerifiedTransport:
        """A new transport with its own connections."""
        inner = httpx.AsyncHTTPTransport(
            verify=verify(self.base_url, self.tls),
            http2=_HTTP2,
            limits=_CONNECTIONS,
            proxy=_proxy(self.base_url),
        )
        return VerifiedTransport(inner, self.control, policy=self.policy)

    def warm_up(
        self,
        *,
        limit_s: float = LIMIT_S,
        probe: Probe | None = None,
        model_id: str = "",
        **more: Any,
    ) -> WarmUp:
        """A warm-up of this data path; `await` its `run`."""
        return WarmUp(
            base_url=self.base_url,
            api_key=self.api_key,
            control=self.control,
            limit_s=limit_s,
            probe=probe,
            model_id=model_id,
            tls=self.tls,
            **more,
        )


def _proxy(url: str) -> str | None:
    """The proxy that the environment names; httpx looks there only for transports of its own."""
    parts = urlsplit(url)
    return None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
