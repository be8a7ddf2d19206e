"""The old name of `holdfast.contrib.torchrun`: entry points of earlier installations have it."""

from holdfast.contrib.torchrun import *  # noqa: F403
from holdfast.contrib.torchrun import __all__ as __all__
