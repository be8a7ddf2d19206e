"""The old name of `holdfast.contrib.fleets.replica`."""

from holdfast.contrib.fleets.replica import *  # noqa: F403
