"""The run in a terminal: a live picture, or plain lines where there is no terminal.

A view never hurts what it looks at: when its output is gone it falls silent.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from holdfast.errors import MissingPackage
from holdfast.events import Event
from holdfast.timeouts import DEFAULTS
from holdfast.views.lines import Lines, closing
from holdfast.views.picture import Picture
from holdfast.views.tail import Live
from holdfast.views.told import kind_of

__all__ = ["Viewer"]


class Viewer:
    """Shows a run, in threads of its own, from `start` to `stop`.

    `plain` is chosen by the output if it is not given: a terminal gets the live picture.
    Plain lines tell only of what happened after `since` (wall-clock seconds): a run that is
    taken up again need not tell its past.
    """

    def __init__(
        self,
        folder: Path,
        *,
        plain: bool | None = None,
        out: TextIO | None = None,
        since: float = 0.0,
    ) -> None:
        self._out = sys.stdout if out is None else out
        self._plain = not self._out.isatty() if plain is None else plain
        if not self._plain:
            _need_rich()
        self._lines = Lines()
        self._since = since
        self._silent = False
        self._live = Live(folder, tell=self._tell if self._plain else None)
        self._drawing = threading.Thread(target=self._draw, name="views.draw", daemon=True)

    def start(self) -> None:
        """Begin to show."""
        self._live.start()
        if not self._plain:
            self._drawing.start()

    def stop(self) -> None:
        """Show what is left, and end."""
        self._live.stop()
        if self._plain:
            self._say(self._lines.flush())
        elif self._drawing.ident is not None:
            self._drawing.join()
            if self._live.picture.ended is not None:
                self._say(closing(self._live.picture))

    def _tell(self, event: Event, picture: Picture) -> None:
        if kind_of(event) and event.at >= self._since:
            self._say(self._lines.take(event, picture))

    def _say(self, lines: list[str]) -> None:
        if self._silent:
            return
        with self._quietly():
            for line in lines:
                self._out.write(line + "\n")
            if lines:
                self._out.flush()

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # a closed pipe, a closed file
            self._silent = True

    def _draw(self) -> None:
        from rich.console import Console
        from rich.live import Live as Screen

        from holdfast.views.drawing import draw

        with self._quietly():
            console = Console(file=self._out)
            with Screen(console=console, auto_refresh=False, transient=False) as screen:
                serial, over = -1, False
                while not over:
                    self._live.wait(serial, DEFAULTS.show_s)
                    with self._live.lock:
                        over, serial = self._live.stopped, self._live.picture.serial
                        shown = draw(self._live.picture, console.height)
                    screen.update(shown, refresh=True)
                    time.sleep(0 if over else DEFAULTS.show_s)


def _need_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError:
        raise MissingPackage(
            "the live view needs rich: pip install 'holdfast-rl[views]'"
        ) from None
