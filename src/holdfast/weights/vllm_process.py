"""The old name of `holdfast.contrib.vllm.process`."""

from holdfast.contrib.vllm.process import *  # noqa: F403
