"""An extension of griffe: what the pages of the API leave out of a class."""

from typing import Any

from griffe import Class, Extension

_PYDANTIC = "model_config"


class Quiet(Extension):
    """Magic methods, and settings that are meant for pydantic, are not part of an API."""

    def on_class_members(self, *, cls: Class, **_: Any) -> None:
        """Called when a class and all its members have been read."""
        for name in [*cls.members]:
            magic = name.startswith("__") and name != "__init__"
            if magic or name == _PYDANTIC:
                del cls.members[name]
