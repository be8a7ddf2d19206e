"""The old name of `holdfast.contrib.fleets.fleet`."""

from holdfast.contrib.fleets.fleet import *  # noqa: F403
