"""The real `tinker.ServiceClient`, with verified retry below it.

    target = Target.of("https://gateway", account="acme", job="one", api_key="tml-...")
    service = connect(target)
    training = service.create_lora_training_client(base_model=...)

The library opens pools of HTTP clients; each takes an `http_client` of ours. It is handed in
where the library makes a pool (`InternalClientHolder._create_client_connection_pool`), and
the service client makes holders of that kind (`_get_session_holder`, `_get_rest_holder`).
A version of the library without these is refused. Two pools are beyond our reach and need
not be within it: the one that exchanges an API key for a token, and those of sampling clients
that were sent to another process. Tested with the version `TESTED`.
"""

import functools
import inspect
from typing import Any, Final

import httpx

from holdfast.client.sdks import connector, no_seam, sdk
from holdfast.client.target import Target

__all__ = ["connect", "service_client"]

_PACKAGE = "tinker"
TESTED: Final = "0.36.0"
_POOL = "_create_client_connection_pool"
_HOLDERS = ("_get_session_holder", "_get_rest_holder")
_FIELDS = (
    "_api_key",
    "_base_url",
    "_closed",
    "_default_headers_overrides",
    "_display_name",
    "_lifecycle_lock",
    "_project_id",
    "_rest_holder",
    "_session_holder",
    "_user_metadata",
)


def service_client(target: Target, **options: Any) -> Any:
    """A `tinker.ServiceClient` whose requests are verified."""
    return _service_class()(target, **options)


@functools.cache
def _service_class() -> Any:
    """Our kind of the library's service client. Raises when it lacks what that relies on."""
    tinker = sdk("tinker", _PACKAGE)
    internal = sdk("tinker.lib.internal_client_holder", _PACKAGE)
    holder_class = getattr(internal, "InternalClientHolder", None)
    http_class = getattr(internal, "AsyncTinker", None)
    if holder_class is None or http_class is None:
        no_seam(_PACKAGE, TESTED, "InternalClientHolder with AsyncTinker")
    if "http_client" not in inspect.signature(http_class).parameters:
        no_seam(_PACKAGE, TESTED, "http_client in AsyncTinker")
    if not hasattr(holder_class, _POOL):
        no_seam(_PACKAGE, TESTED, f"InternalClientHolder.{_POOL}")
    for name in _HOLDERS:
        if not hasattr(tinker.ServiceClient, name):
            no_seam(_PACKAGE, TESTED, f"ServiceClient.{name}")

    class Holder(holder_class):  # type: ignore[misc, valid-type]  # the library's, untyped here
        """Gives every pool an HTTP client of ours."""

        def __init__(self, target: Target, **options: Any) -> None:
            self._holdfast_target = target  # first: the rest of it opens pools
            super().__init__(**options)

        def _create_client_connection_pool(self, *args: Any, **options: Any) -> Any:
            pool = super()._create_client_connection_pool(*args, **options)
            given = getattr(pool, "_constructor_kwargs", None)
            if type(given) is not dict:
                no_seam(_PACKAGE, TESTED, "ClientConnectionPool._constructor_kwargs")
            given["http_client"] = httpx.AsyncClient(
                transport=self._holdfast_target.transport(), follow_redirects=True
            )
            return pool

    class ServiceClient(tinker.ServiceClient):  # type: ignore[misc, name-defined]  # as above
        """`tinker.ServiceClient` with verified retry."""

        def __init__(self, target: Target, **options: Any) -> None:
            super().__init__(base_url=target.base_url, api_key=target.api_key, **options)
            for name in _FIELDS:
                if not hasattr(self, name):
                    no_seam(_PACKAGE, TESTED, f"ServiceClient.{name}")
            self._holdfast_target = target

        def _get_session_holder(self) -> Any:
            self._hold(
                "_session_holder",
                user_metadata=self._user_metadata,
                project_id=self._project_id,
                display_name=self._display_name,
            )
            return super()._get_session_holder()

        def _get_rest_holder(self) -> Any:
            self._hold("_rest_holder", _skip_session=True)
            return super()._get_rest_holder()

        def _hold(self, field: str, **options: Any) -> None:
            """Make a holder of ours where the library would make its own.

            Behind the same lock, so that close() waits for what is being made, and closes it.
            """
            if getattr(self, field) is not None:
                return
            with self._lifecycle_lock:
                if getattr(self, field) is None and not self._closed:
                    holder = Holder(
                        self._holdfast_target,
                        base_url=self._base_url,
                        api_key=self._api_key,
                        default_headers_overrides=self._default_headers_overrides,
                        **options,
                    )
                    setattr(self, field, holder)

    return ServiceClient


connect = connector(_service_class, service_client)
