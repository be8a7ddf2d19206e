"""The old name of `holdfast.contrib.vllm.engine`."""

from holdfast.contrib.vllm.engine import *  # noqa: F403
