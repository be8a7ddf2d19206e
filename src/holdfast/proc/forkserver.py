"""A process that has imported what others need, and forks them: a start costs milliseconds.

Starting Python and importing torch takes seconds of a processor, for every process anew. A
fork server does it once. Invariants:

- **A child is its parent's, never the fork server's.** It is forked twice, and adopted by whoever
  asked (a subreaper while it asks): the parent collects it, it dies with the parent, and that
  the fork server dies means nothing to it.
- **A fork server has one thread when it forks**, native ones counted; otherwise it ends.
- **A fork server is a help, never a need**: when it cannot, the caller gets None and starts the
  program the long way.
- A child runs nothing before its parent knows its pid and has told it what to be. A child that
  nobody tells ends.
- It is for Holdfast's own programs: `python -m MODULE …`, where the module has a `main`.

A process that came out of a fork server has everything imported, and can have one of its own by a
fork (`inherit`), as long as it has but one thread: at the very beginning.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast import faults, proc
from holdfast.errors import Unavailable
from holdfast.files import append_to, private_folder
from holdfast.timeouts import DEFAULTS

__all__ = ["ForkServer", "begin", "inherit", "turn_into"]

_PR_SET_CHILD_SUBREAPER = 36
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Set to 1 while importing: libraries that start threads when they are loaded do not then."""
_REVIVALS = 5
_HEAD = 4
_TITLE = "nursery"
"""What `ps` shows of a fork server."""
_READY = b"r"
_WANTED = b"w"

_warm = False
"""Whether this process came out of a fork server."""


class _Order(msgspec.Struct):
    """What a child is to be. `env` is its whole environment."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str


class ForkServer:
    """One fork server, from its parent's side. Use it from the main thread."""

    def __init__(
        self, preload: Sequence[str], forked: tuple[socket.socket, proc.Child] | None = None
    ) -> None:
        """One that imports these modules, or that was `forked`: of use once it is `ready`."""
        self._preload = preload
        self._is_ready = False
        self._revivals = 0
        self._line, self._child = forked or self._start()

    def _start(self) -> tuple[socket.socket, proc.Child]:
        ours, theirs = socket.socketpair()
        env = {faults.PLAN_VARIABLE: "", **dict.fromkeys(_ONE_THREAD, "1")}
        argv = [sys.executable, "-m", "holdfast.proc.forkserver", *self._preload]
        with theirs:
            try:
                return ours, proc.spawn(argv, name=_TITLE, env=env, stdin=theirs.fileno())
            except BaseException:
                ours.close()
                raise

    def tend(self) -> None:
        """Start it again if it has died; not for ever."""
        if not self.alive() and self._preload and self._revivals < _REVIVALS:
            self.close()
            self._revivals += 1
            self._is_ready = False
            self._line, self._child = self._start()

    def ready(self) -> bool:
        """Whether it can be asked."""
        if not self._is_ready and self._line.fileno() >= 0:
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self._is_ready = self._line.recv(1, socket.MSG_DONTWAIT) == _READY
        return self._is_ready

    def alive(self) -> bool:
        """Whether it is there, ready or importing."""
        return self._line.fileno() >= 0 and self._child.alive()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is ready; false if that will not be."""
        until = time.monotonic() + timeout_s
        while not self.ready():
            if not self.alive() or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def spawn(
        self,
        argv: Sequence[str],
        *,
        name: str = "",
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        line: socket.socket | None = None,
    ) -> proc.Child | None:
        """As `proc.spawn`, for `python -m MODULE …`; None: start it the long way.

        With `line`, the child calls what it became with this socket as its standard input.
        """
        if list(argv[:2]) != [sys.executable, "-m"] or not self.ready() or not self.alive():
            return None
        order = _Order(
            list(argv[2:]), {**os.environ, **(env or {})}, str(Path.cwd()), str(log or "")
        )
        if log is not None:
            private_folder(log.parent)
            os.close(append_to(log))  # a bad place is told here, where it can be heard
        ours, theirs = socket.socketpair()
        try:
            with ours, theirs, _adopting():
                socket.send_fds(self._line, [_WANTED], [theirs.fileno()])
                theirs.close()
                ours.settimeout(DEFAULTS.birth_s)
                pid = int.from_bytes(ours.makefile("rb").read(_HEAD), "big")
                if not pid:
                    raise Unavailable("the fork server has ended")
                _send(ours, order, [] if line is None else [line.fileno()])
        except (OSError, Unavailable):
            self.close()
            return None
        # Our end may be closed: what was sent is read all the same.
        return proc.Child(proc.Forked(pid), name or argv[2], log)

    def close(self) -> None:
        """End it. Its children do not notice."""
        self._line.close()
        self._child.kill_group()


def begin(preload: Sequence[str]) -> ForkServer:
    """A fork of this process if it came out of a fork server, else one that begins to import."""
    return inherit() or ForkServer(preload)


def turn_into(argv: Sequence[str]) -> NoReturn:
    """Become another program of ours: `python -m MODULE …`."""
    if not _warm:
        os.execv(argv[0], list(argv))  # noqa: S606 -- the same interpreter
    _main(argv[2:])
    sys.exit(0)


def inherit() -> ForkServer | None:
    """A fork of this process, if that came out of a fork server: call it first of all."""
    if not _warm or _threads() != 1:
        return None
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        proc.die_with_parent(parent)
        _name(_TITLE)
        _serve(theirs, parent)
    theirs.close()
    return ForkServer((), (ours, proc.Child(proc.Forked(pid), _TITLE)))


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Whoever loses its parent below us becomes our child meanwhile."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "this kernel knows no subreapers")
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


# What follows runs in the fork server, and in its children.


def _serve(line: socket.socket, parent: int) -> NoReturn:
    """Fork whenever the parent says so; end with it."""
    gc.collect()
    gc.freeze()  # what was imported stays, and its pages stay shared
    if _threads() != 1:
        sys.stderr.write("holdfast: the fork server has threads and cannot fork\n")
        os._exit(1)
    with contextlib.suppress(OSError):
        line.sendall(_READY)
        while True:
            word, fds, _, _ = socket.recv_fds(line, 1, 1)
            if not word:
                break
            between = os.fork()
            if between == 0:
                if os.fork():
                    os._exit(0)
                line.close()
                _become(socket.socket(fileno=fds[0]), parent)
            os.close(fds[0])
            os.waitpid(between, 0)
    os._exit(0)


def _become(line: socket.socket, parent: int) -> NoReturn:
    """Be adopted, hear what to be, and be it. Does not come back."""
    global _warm
    until = time.monotonic() + DEFAULTS.adoption_s
    while os.getppid() != parent:
        if time.monotonic() > until:
            os._exit(1)
        time.sleep(0.0005)
    os.setsid()
    proc.die_with_parent(parent)
    code = 1
    try:
        line.sendall(os.getpid().to_bytes(_HEAD, "big"))
        heard = _hear(line)
        line.close()
        if heard is None:
            os._exit(0)
        order, fds = heard
        _dress(order, fds)
        _warm = True
        _main(order.argv)
        code = 0
    except SystemExit as left:
        code = _exit_code(left)
    except BaseException:  # noqa: BLE001 -- as the interpreter does
        traceback.print_exc()
    finally:
        _leave(code)


def _hear(line: socket.socket) -> tuple[_Order, list[int]] | None:
    head, fds, _, _ = socket.recv_fds(line, _HEAD, 1)
    size = int.from_bytes(head, "big")
    data = line.makefile("rb").read(size)
    if not size or len(data) != size:
        return None  # whoever asked has left
    return msgspec.json.decode(data, type=_Order), list(fds)


def _dress(order: _Order, fds: Sequence[int]) -> None:
    """Take on folder, environment and files."""
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.env)
    stdin = fds[0] if fds else os.open(os.devnull, os.O_RDONLY)
    os.dup2(stdin, 0)
    os.close(stdin)
    if order.log:
        log = append_to(Path(order.log))
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faults.arm_from_environment()


def _main(argv: Sequence[str]) -> None:
    """Call the module's `main`, as `python -m MODULE …` would."""
    name = argv[0]
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        name = f"{name}.__main__"
    _name(" ".join(["python", "-m", *argv]))
    sys.orig_argv[:] = [sys.executable, "-m", *argv]
    sys.argv[:] = ["-m", *argv[1:]]
    module = importlib.import_module(name)
    sys.argv[0] = str(module.__file__)
    if name.endswith(".__main__"):
        del sys.modules[name]  # a process that is forked from this one may run it again
    module.main()


def _leave(code: int) -> NoReturn:
    """End as an interpreter does, without going back through the frames of whoever forked."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def _exit_code(left: SystemExit) -> int:
    if left.code is None or isinstance(left.code, int):
        return (left.code or 0) & 0xFF
    sys.stderr.write(f"{left.code}\n")
    return 1


def _name(title: str) -> None:
    """What `ps` shows. Without the library, that is the fork server's own command."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(title)


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _send(line: socket.socket, order: _Order, fds: Sequence[int]) -> None:
    data = msgspec.json.encode(order)
    socket.send_fds(line, [len(data).to_bytes(_HEAD, "big")], fds)
    line.sendall(data)


def main() -> None:
    """`python -m holdfast.proc.forkserver MODULE …`; the parent's socket is standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=os.dup(0))
    _name(_TITLE)
    for name in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _serve(line, os.getppid())


if __name__ == "__main__":
    # As a module of its own name: children look at what is imported there.
    importlib.import_module("holdfast.proc.forkserver").main()
