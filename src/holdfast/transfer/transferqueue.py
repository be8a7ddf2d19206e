"""The old name of `holdfast.contrib.transferqueue`: configurations and saved objects have it."""

from holdfast.contrib.transferqueue import *  # noqa: F403
from holdfast.contrib.transferqueue import __all__ as __all__
from holdfast.contrib.transferqueue import __path__ as __path__  # a pickle names its modules
