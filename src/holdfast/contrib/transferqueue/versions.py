"""Which versions of TransferQueue this back end has been tried with, call by call."""

from holdfast.errors import Mistake

__all__ = ["SUPPORTED", "check"]

SUPPORTED = ("0.1.8", "0.1.9", "0.1.10", "0.1.11")


def check(version: str) -> None:
    """Refuse a version that may differ in what it expects of a back end."""
    if version not in SUPPORTED:
        raise Mistake(
            f"TransferQueue {version} is installed, and Holdfast's back end knows "
            f"{SUPPORTED[0]} to {SUPPORTED[-1]}: pip install TransferQueue=={SUPPORTED[-1]}"
        )
