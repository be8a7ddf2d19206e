"""The old name of `holdfast.contrib.vllm.client`."""

from holdfast.contrib.vllm.client import *  # noqa: F403
