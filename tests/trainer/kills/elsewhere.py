"""Stands in a host's place for a trainer that runs elsewhere: `elsewhere.py FOLDER`.

Writes down who is to be started, and lives on as long as its host wants it to. The trainer
itself is started by whoever reads that: it does not die when this process is killed, like one
on a machine that can no longer be reached.
"""

import json
import os
import signal
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
names = [name for name in os.environ if name in ("HOST", "PORT") or name.startswith("HOLDFAST_")]
path = folder / f"{os.environ['HOLDFAST_EPOCH']}.json"
draft = path.with_suffix(".draft")
draft.write_text(json.dumps({name: os.environ[name] for name in names}))
draft.rename(path)
signal.pause()
