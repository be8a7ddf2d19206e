"""The parser under the engine, or one clear sentence when it is not installed."""

from holdfast.errors import MissingPackage

try:
    import httptools
except ImportError as error:
    raise MissingPackage(
        "the gateway needs httptools: pip install 'holdfast-rl[gateway]'"
    ) from error

__all__ = ["httptools"]
