"""Asks the control plane what state a job is in: the authority behind every doubted 404."""

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote

import httpx
import msgspec

from holdfast.client.meaning import as_error, words_of
from holdfast.client.tls import verify
from holdfast.errors import Corrupt, TimedOut, Unavailable

__all__ = ["ControlPlane"]

MAX_BODY_BYTES: Final = 1 << 20
_PREFIX = "JOB_STATE_"
_CHARS = 100


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Where a job's state is asked for, and as whom. Safe to share between event loops."""

    url: str
    account: str
    job: str
    api_key: str = field(default="", repr=False)
    timeout_s: float = 3.0
    tls: ssl.SSLContext | bool = True

    async def state(self) -> str:
        """The job's state without its prefix, or NOT_FOUND. Raises when there is no answer.

        Every question has a connection of its own: they are few, and an old connection may
        lead to a replica that has been taken out.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                status, body = await self._ask()
        except TimeoutError:
            raise TimedOut(f"the control plane was silent for {self.timeout_s:.3g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Unavailable(
                f"the control plane was not reached: {type(error).__name__}"
            ) from error
        if status == 404:
            return "NOT_FOUND"
        if status != 200:
            raise as_error(status, *words_of(body), "asking the control plane")
        try:
            said = msgspec.json.decode(body, type=_Job)
        except msgspec.MsgspecError:
            raise Corrupt("the control plane's answer has no state of a job") from None
        return said.state.removeprefix(_PREFIX)[:_CHARS]

    async def _ask(self) -> tuple[int, bytes]:
        account, job = quote(self.account, safe=""), quote(self.job, safe="")
        url = f"{self.url.rstrip('/')}/v1/accounts/{account}/rlorTrainerJobs/{job}"
        headers = {"accept": "application/json"}
        if self.api_key:
            headers["x-api-key"] = self.api_key
            headers["authorization"] = f"Bearer {self.api_key}"
        async with (
            httpx.AsyncClient(verify=verify(self.url, self.tls), timeout=self.timeout_s) as client,
            client.stream("GET", url, headers=headers) as response,
        ):
            body = bytearray()
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise Corrupt(f"the control plane's answer has over {MAX_BODY_BYTES} bytes")
            return response.status_code, bytes(body)


class _Job(msgspec.Struct):
    state: str
