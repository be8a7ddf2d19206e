"""Everything that a trainer and its agents import, sooner or later. For nurseries."""

import importlib

from holdfast.trainer.process import PRELOAD

__all__: list[str] = []

_LATER = ("holdfast.launch.commands", "holdfast.launch.forked_child", "holdfast.trainer.compute")
"""By name: the trainer does not know who launches it."""

for _name in (*PRELOAD, *_LATER):
    importlib.import_module(_name)
