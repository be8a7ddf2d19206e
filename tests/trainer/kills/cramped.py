"""A trainer in a process that may take only so much more memory than it has: `cramped.py MiB`."""

import importlib
import os
import resource
import sys
from pathlib import Path

from holdfast.engine.base import load_base
from holdfast.engine.tiny import make_tiny
from holdfast.trainer.process import main

bases = Path(os.environ["HOLDFAST_FOLDER"], "bases")
bases.mkdir(parents=True, exist_ok=True)
load_base("tiny", make_tiny(bases / "tiny"))
for name in ("live", "machine"):  # so that all libraries are there
    importlib.import_module(f"holdfast.trainer.{name}")
room_bytes = int(sys.argv.pop(1)) << 20
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + room_bytes
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
main()
