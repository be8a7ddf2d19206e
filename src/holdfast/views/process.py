"""The web page of a run, as a process of its own.

    python -m holdfast.views.process DIR --web --port 8080

Prints its address in one line and serves until SIGTERM or Ctrl-C. Without --web it shows
the run in this terminal. With --with-parent it ends when whoever started it does.
"""

import os
import signal
import threading
from pathlib import Path

import click

from holdfast.errors import HoldfastError
from holdfast.proc import die_with_parent
from holdfast.views.terminal import Viewer
from holdfast.views.web import Web

__all__ = ["main"]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--web", is_flag=True, help="Serve the page.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", default=0, show_default="a free one", type=click.IntRange(0, 65535))
@click.option("--name", "names", multiple=True, help="A host name under which it is reached.")
@click.option("--with-parent", is_flag=True, help="End when the process that started this ends.")
def main(
    folder: Path, web: bool, host: str, port: int, names: tuple[str, ...], with_parent: bool
) -> None:
    """Show the run in FOLDER."""
    if with_parent:
        die_with_parent(os.getppid())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        view: Web | Viewer = Web(folder, host, port, names=names) if web else Viewer(folder)
    except HoldfastError as error:
        raise click.ClickException(str(error)) from None
    view.start()
    if isinstance(view, Web):
        click.echo(view.url)
    stop.wait()
    view.stop()


if __name__ == "__main__":
    main()
