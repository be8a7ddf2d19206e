"""The program that every worker runs as: waits for one order, then becomes the user's code.

    python -u child.py FD [MODULE TO IMPORT BEFOREHAND ...]

Started by path, not with `-m`, and on Python's own modules only, so that it leaves no trace
in the interpreter: no folder on sys.path, no module of Holdfast, no flag.

Invariants: **the user's code runs as in a plain start** of `python -u` (`__main__`, sys.argv,
sys.orig_argv, sys.path, exit codes, tracebacks without a frame of ours, multiprocessing and
pickle of things in `__main__`). Different from a plain start: the frames of this file under
the user's (`traceback.print_stack`), what `ps` and /proc/PID/environ show, and sitecustomize,
which has run before the variables of `PER_SEAT` (spec.py) were there. No Python thread is
there when the user's code begins, and no native one but those that the modules which were
imported beforehand start by themselves (OpenBLAS does, if OMP_NUM_THREADS allows it). The order
of imports is another; what torch makes of that is put right (`_keep_process_group`).

SIGUSR2 writes the stacks of all threads to a file (faulthandler), from within the signal
handler, so that it works while the GIL is held. An exception that ends the worker is also
written to TORCHELASTIC_ERROR_FILE, unless torch's `record` has done so.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # our folder: nothing that is imported from here on may be found in it

import builtins
import contextlib
import errno
import faulthandler
import gc
import importlib
import importlib.machinery
import json
import os
import pkgutil
import signal
import time
import types
from typing import Any, NoReturn

_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


def main(fd: int, preload: list[str]) -> None:
    """Import, wait, and become what the order says."""
    os.set_inheritable(fd, False)
    # Already here, because what is imported now may remember it (multiprocessing does).
    sys.modules["__main__"] = types.ModuleType("__main__")
    vars(sys.modules["__main__"]).update(__annotations__={}, __builtins__=builtins)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until there is a file for the stacks
    began = time.monotonic()
    for name in preload:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    _keep_process_group()
    if preload:
        # What was imported stays: the collector need not look at it again, above all not at the
        # end, where it would take most of the time.
        gc.collect()
        gc.freeze()
    threads = sys.modules.get("threading")
    about = {
        "import_s": time.monotonic() - began,
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208 -- pathlib is not needed
        "python_threads": threads.active_count() if threads is not None else 1,
    }
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, json.dumps(about).encode())
    if (order := _read(fd)) is None:
        os._exit(0)
    _dress(order)
    if order["kind"] == "program":
        _exec(order)
    try:
        _run(order)
    except SystemExit:
        raise
    except BaseException as error:
        _told(error)
        raise


def _keep_process_group() -> None:
    """Let the first default process group live until the process ends, as in a plain start.

    torch.distributed.nn.functional holds the group of the moment when it is imported. In a plain
    start the first optimizer or DDP model imports it, through torch._dynamo and after
    `init_process_group`. Imported beforehand it holds none, and then the group ends with the DDP
    model: torch 2.13's ~Reducer waits, with the GIL, for a thread of gloo that waits for the GIL.
    """
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    update = getattr(c10d, "_update_default_pg", None)
    if update is None or "torch.distributed.nn.functional" not in sys.modules:
        return
    held: list[Any] = []

    def update_and_hold(group: Any) -> None:
        if group is not None and not held:
            held.append(group)
        update(group)

    c10d._update_default_pg = update_and_hold


def _read(fd: int) -> Any:
    """The order; None if whoever would have given one is gone."""
    with contextlib.suppress(ConnectionError), open(fd, "rb") as line:
        size = int.from_bytes(line.read(4), "big")
        data = line.read(size)
        if size and len(data) == size:
            return json.loads(data)
    return None


def _dress(order: Any) -> None:
    """Take on folder, environment and files. What is right already is not touched."""
    if os.getcwd() != order["cwd"]:  # noqa: PTH109
        os.chdir(order["cwd"])
    env = order["env"]
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    for target, path in ((1, order["stdout"]), (2, order["stderr"])):
        if path:
            fd = _append(path)
            os.dup2(fd, target)
            os.close(fd)
    if order["stacks"] and order["kind"] != "program":
        faulthandler.register(signal.SIGUSR2, file=_append(order["stacks"]), all_threads=True)


def _append(path: str) -> int:
    """Open a worker's file. Links are not followed: another user may have put one there."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o644)  # the umask decides: --log-dir may be a group's
    except OSError as error:
        if error.errno == errno.ELOOP:
            sys.exit(f"holdfast: {path} is a link, which logs do not follow: remove it")
        raise


def _exec(order: Any) -> NoReturn:
    """Become a program, with the signals as a shell would leave them."""
    for number in (signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    entry = order["entry"]
    try:
        os.execvpe(entry, [entry, *order["args"]], dict(os.environ))  # noqa: S606
    except OSError as error:
        _write_error_file(error)
        sys.stderr.write(f"holdfast: {entry} cannot be run: {error.strerror}\n")
        os._exit(_NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE)


def _run(order: Any) -> None:
    """Run a script or a module as `__main__`, as Modules/main.c does."""
    import runpy

    entry, args = order["entry"], list(order["args"])
    plain = ["-m", entry] if order["kind"] == "module" else [entry]
    sys.orig_argv[:] = [sys.executable, "-u", *plain, *args]
    main = vars(sys.modules["__main__"])
    if order["kind"] == "module":
        sys.argv[:] = ["-m", *args]
        _first_on_path(os.getcwd())  # noqa: PTH109
        runpy._run_module_as_main(entry)  # type: ignore[attr-defined]
        return
    sys.argv[:] = [entry, *args]
    path = os.path.abspath(entry)  # noqa: PTH100
    if pkgutil.get_importer(path) is not None:  # a folder or a zip file with a __main__.py
        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _first_on_path(os.path.dirname(os.path.realpath(entry)))  # noqa: PTH120
    loader: Any = importlib.machinery.SourceFileLoader("__main__", path)
    if path.endswith(".pyc"):
        loader = importlib.machinery.SourcelessFileLoader("__main__", path)
        code = loader.get_code("__main__")
    else:
        code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    main.update(__file__=path, __cached__=None, __loader__=loader)
    exec(code, main)  # noqa: S102 -- running the user's code is what this program is for


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _told(error: BaseException) -> None:
    """Write the error file, and have Python print the traceback without our frames."""
    error.with_traceback(_theirs(error.__traceback__))
    if isinstance(error, Exception):
        _write_error_file(error)
    hook = sys.excepthook

    def print_theirs(kind: Any, value: BaseException, trace: Any) -> None:
        trace = _theirs(trace)
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = print_theirs


def _theirs(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _write_error_file(error: BaseException) -> None:
    """In torch's format. Who does not use torch's `record` has a reason on file all the same."""
    import traceback

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    stack = "".join(traceback.format_exception(error))
    info = {"py_callstack": stack, "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": info}
    with contextlib.suppress(OSError), open(path, "x") as file:  # noqa: PTH123
        json.dump({"message": message}, file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
