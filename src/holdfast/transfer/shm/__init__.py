"""`shm://NAME` a store in shared memory: one machine, many processes, no server.

    shm://NAME[?budget=4G&segment=64M]

`budget`: all memory of the store, half of what /dev/shm has free if not said. `segment`: the
pieces that it is taken in, 64M if not said (less if the budget is small). The first opener
decides; another one who asks for something else is told so.

**What is promised.** A put is committed by one store of eight bytes: before it nothing was
put, after it every process can get all of it. Committed values live until they are deleted,
whoever dies at whatever point. The space of deleted, replaced and uncommitted values can be
used again, also when its owner lives and is idle, and when it is dead. All memory together is
at most the budget. A view sees its bytes unchanged until its block ends.

**How.** `layout.py` the bytes; `tables.py` the board, whose words are the commit words;
`segment.py`, `index.py`, `catalog.py` what a process reads; `writer.py` slots, adoption and
appending; `burial.py` deletes and replacements; `room.py`, `compaction.py` space; `session.py`
and `backend.py` put it together; `locks.py`, `folder.py` the files.

Put and get take no lock between processes. Delete, view, reuse and compaction lock the
segments that they are about.

**Choices.**
- The commit word stands on the board and not in the segment: so readers who look only at the
  board and readers who come fresh never disagree about a batch whose writer died.
- Dead-bytes lie together at the end of a segment: one sum tells how many values live.
- A batch is cut to the segments there are. Only one value that is larger than a segment gets
  a larger one; so memory is reused in equal pieces. Segments are a little larger than said, so
  that four values of 16M fit into 64M.
- Memory that one process does not use can be used by another: an empty segment of anybody,
  living or dead, may be given back to the system, under its lock.
- Empty memory is warm memory, and stays so while there is work. It is given back when a session
  ends (its own, and that of the dead), or when `trim` has found it empty and untouched twice.

**Where it ends.** Values are not written to disk: a reboot loses them. Whoever can write to the
folder can destroy it; it belongs to one user. A `get` that is overtaken by a reuse fails its
checksum and is tried again. If /dev/shm itself is full, reading a value while it is deleted and
its memory is given back can end in SIGBUS. Memory taken with a fork that Python does not see
(from C) keeps the locks of its parent alive.
"""

from urllib.parse import unquote, urlsplit

from holdfast.errors import Mistake
from holdfast.timeouts import DEFAULTS, Timeouts
from holdfast.transfer.backend import Backend
from holdfast.transfer.shm.backend import ShmBackend
from holdfast.transfer.shm.folder import Listed, parse_size, remove, stores
from holdfast.transfer.url import options

__all__ = ["Listed", "from_url", "remove", "store_name", "stores"]


def from_url(url: str, timeouts: Timeouts = DEFAULTS) -> Backend:
    """The back end of `shm://NAME[?budget=4G&segment=64M]`."""
    found = options(url, {"budget", "segment"})
    sizes = {what: parse_size(text, what) for what, text in found.items()}
    name, limit_s = store_name(url), timeouts.store_lock_s
    return ShmBackend(name, sizes.get("segment"), sizes.get("budget"), limit_s)


def store_name(url: str) -> str:
    """The NAME in `shm://NAME`."""
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.fragment:
        raise Mistake(f"{url!r}: use shm://NAME, without a path")
    return unquote(parts.netloc)
