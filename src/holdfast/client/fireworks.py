"""The real `fireworks.training.sdk.FiretitanServiceClient`, with verified retry below it.

    target = Target.of("https://gateway", account="acme", job="one", api_key="fw_...")
    service = connect(target)
    training = service.create_training_client(base_model=..., lora_rank=8)

The library passes what it does not know to its HTTP clients, and they take an `http_client`:
that is its documented way in. It is one client for all pools, with connections enough. Clients
that the library provisions itself (`from_firetitan_config`) do not come through here: let it
wait for the job, and connect to the endpoint. Tested with the version
`TESTED`.
"""

import inspect
from typing import Any, Final

import httpx

from holdfast.client.sdks import connector, no_seam, sdk
from holdfast.client.target import Target

__all__ = ["connect", "service_client"]

_PACKAGE = "fireworks-ai"
TESTED: Final = "1.2.30"
_CORE = "fireworks.training.sdk._core"


def service_client(target: Target, **options: Any) -> Any:
    """A `FiretitanServiceClient` whose requests are verified."""
    client_class = _seam()
    http_client = client_class(transport=target.transport(), follow_redirects=True)
    training = sdk("fireworks.training.sdk", _PACKAGE)
    return training.FiretitanServiceClient(
        base_url=target.base_url, api_key=target.api_key, http_client=http_client, **options
    )


def _seam() -> Any:
    """The class of HTTP client that the library uses. Raises when it takes none of ours."""
    sdk("fireworks.training.sdk", _PACKAGE)
    http_class = getattr(sdk(f"{_CORE}._client", _PACKAGE), "AsyncTrainingHTTPClient", None)
    if http_class is None or "http_client" not in inspect.signature(http_class).parameters:
        no_seam(_PACKAGE, TESTED, "http_client in AsyncTrainingHTTPClient")
    # Its own kind encodes some requests more tightly; any httpx client does.
    own = getattr(sdk(f"{_CORE}._base_client", _PACKAGE), "AsyncHttpxClientWrapper", None)
    is_client = isinstance(own, type) and issubclass(own, httpx.AsyncClient)
    return own if is_client else httpx.AsyncClient


connect = connector(_seam, service_client)
