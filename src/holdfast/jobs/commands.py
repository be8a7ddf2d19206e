"""`holdfast jobs`: trainer jobs, through the control plane's REST."""

import functools
import json
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import click

from holdfast.errors import (
    Denied,
    Exists,
    Gone,
    HoldfastError,
    Mistake,
    NotFound,
    TimedOut,
    Unavailable,
)
from holdfast.fetch import fetch
from holdfast.jobs.note import find_service
from holdfast.jobs.records import GONE
from holdfast.machine import state_dir
from holdfast.text import clean, table
from holdfast.timeouts import DEFAULTS

__all__ = ["Remote", "jobs"]

_ENDED = (GONE | {"PAUSED"}) - {"CANCELLING", "DELETING"}
"""Nothing more is waited for."""


class Remote:
    """The control plane, as a command reaches it."""

    def __init__(self, url: str, key: str, ca: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Mistake(f"{url!r} is not the URL of a service: http://host:port")
        self.url = parts.geturl().rstrip("/")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"X-Api-Key": key, "Content-Type": "application/json"}
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        answer = self.call("GET", "/v1/accounts")
        self.account: str = answer["accounts"][0]["name"].removeprefix("accounts/")

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One call; errors come as ours."""
        try:
            status, raw = fetch(
                method,
                self._origin + path,
                timeout_s=DEFAULTS.command_call_s,
                headers=self._headers,
                body=None if body is None else json.dumps(body).encode(),
                tls=self._tls,
            )
        except Unavailable as error:
            raise Unavailable(f"is `holdfast serve` running? {error}") from None
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = {"message": raw[:200].decode(errors="replace")}
        if status >= 400:
            message = answer.get("message") or answer.get("detail") or f"status {status}"
            raise _ERRORS.get(status, Mistake if status < 500 else Unavailable)(message)
        return answer

    def pages(self, path: str, what: str, more: str = "") -> Iterator[Any]:
        """Everything that a path lists, page by page."""
        token = ""
        while True:
            page = self.call("GET", f"{path}?pageSize=200&pageToken={token}{more}")
            yield from page[what]
            if not (token := page["nextPageToken"]):
                return

    def job(self, name: str = "", rest: str = "") -> str:
        """The path of a job, or of all."""
        path = f"/v1/accounts/{self.account}/rlorTrainerJobs"
        return f"{path}/{quote(name, safe='')}{rest}" if name else path


_ERRORS: dict[int, type[HoldfastError]] = {401: Denied, 404: NotFound, 409: Exists, 410: Gone}


def _remote(command: Callable[..., None]) -> Callable[..., None]:
    @click.option("--url", envvar="HOLDFAST_URL", help="The service [default: your own serve].")
    @click.option("--api-key", envvar="HOLDFAST_API_KEY", help="Your key [default: serve's note].")
    @click.option("--ca", envvar="HOLDFAST_CA", help="Certificates to trust, for https.")
    @functools.wraps(command)
    def wrapped(
        url: str | None, api_key: str | None, ca: str | None, *args: Any, **kwargs: Any
    ) -> None:
        command(Remote(*find_service(state_dir(), url, api_key), ca), *args, **kwargs)

    return wrapped


@click.group()
def jobs() -> None:
    """Create trainer jobs, and look after them.

    \b
    holdfast jobs create my-job                          the trainer called "default"; waits for it
    holdfast jobs create my-job --trainer grpo --no-wait
    holdfast jobs create my-job -- python t.py {port}    needs serve --allow-commands
    holdfast jobs key                                    your API key, for the SDKs
    """


@jobs.command()
@click.argument("name")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--trainer", default="default", show_default=True, help="One of serve's commands.")
@click.option("--base-model", default="", help="Told to the trainer.")
@click.option("--display-name", default="")
@click.option("--spec", default="{}", help="More fields of the job, as JSON.")
@click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until it is RUNNING."
)
@click.option("--timeout", default=600.0, show_default=True, help="How long to wait: s.")
@_remote
def create(
    remote: Remote,
    name: str,
    command: tuple[str, ...],
    trainer: str,
    base_model: str,
    display_name: str,
    spec: str,
    wait: bool,
    timeout: float,
) -> None:
    """Create the job NAME, and wait until its trainer serves."""
    try:
        fields = json.loads(spec)
    except ValueError as error:
        raise Mistake(f"--spec is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise Mistake("--spec is a JSON object")
    if base_model:
        fields.setdefault("trainingConfig", {})["baseModel"] = base_model
    if display_name:
        fields["displayName"] = display_name
    own = {"command": list(command)} if command else {"trainer": trainer}
    fields["holdfast"] = {**(fields.get("holdfast") or {}), **own}
    remote.call("POST", f"{remote.job()}?rlorTrainerJobId={quote(name, safe='')}", fields)
    if wait:
        _wait(remote, name, timeout)
    click.echo(f"base_url: {remote.url}{_way(remote.account, name)}")


def _way(account: str, name: str) -> str:
    return f"/training/v1/rlorTrainerJobs/{account}/{name}"


@jobs.command("list")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@click.option("--all", "everything", is_flag=True, help="Deleted ones too.")
@_remote
def list_(remote: Remote, as_json: bool, everything: bool) -> None:
    """List your jobs."""
    rows = []
    also = "&showDeleted=1" if everything else ""
    for job in remote.pages(remote.job(), "rlorTrainerJobs", also):
        if as_json:
            click.echo(json.dumps(job))
        rows.append(_row(job))
    if not as_json:
        _print(("job", "state", "epoch", "changed", "why"), rows)


def _print(names: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    for line in table(names, rows):
        click.echo(line)


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    name = job["name"].rpartition("/")[2]
    state = job["state"].removeprefix("JOB_STATE_")
    why = clean(job["status"]["message"], 80)
    return name, state, str(job["epoch"]), job["updateTime"][:19], why


@jobs.command()
@click.argument("name")
@_remote
def url(remote: Remote, name: str) -> None:
    """Print where a job's trainer is reached: the base_url of the Tinker client."""
    remote.call("GET", remote.job(name))
    click.echo(remote.url + _way(remote.account, name))


@jobs.command()
@click.argument("name")
@_remote
def checkpoints(remote: Remote, name: str) -> None:
    """List what a job's trainer has saved, with the hash of the weights."""
    rows = []
    for one in remote.pages(remote.job(name, "/checkpoints"), "checkpoints"):
        what = one["checkpointType"], str(one["step"]), one["contentHash"]
        rows.append((clean(one["path"], 120), *what, one["createTime"][:19]))
    _print(("path", "kind", "step", "weights", "saved"), rows)


@jobs.command()
@click.argument("name")
@_remote
def get(remote: Remote, name: str) -> None:
    """Show everything about one job, as JSON."""
    click.echo(json.dumps(remote.call("GET", remote.job(name)), indent=2))


def _verb(verb: str, about: str, *, waits: bool = False) -> None:
    """Add a subcommand that asks for one verb."""

    @jobs.command(verb, help=about)
    @click.argument("name")
    @click.option("--wait/--no-wait", default=waits, hidden=not waits, help="Wait for RUNNING.")
    @_remote
    def ask(remote: Remote, name: str, wait: bool) -> None:
        if verb == "delete":
            remote.call("DELETE", remote.job(name))
        else:
            remote.call("POST", remote.job(name, f":{verb}"))
        if wait:
            _wait(remote, name, 600.0)
        else:
            state = remote.call("GET", remote.job(name))["state"].removeprefix("JOB_STATE_")
            click.echo(f"{name} is {state}", err=True)


_verb("pause", "Stop a job's trainer; what it has done is kept.")
_verb("resume", "Let a paused, failed, cancelled or completed job go on.", waits=True)
_verb("cancel", "Stop a job. It can be resumed.")
_verb("delete", "End a job for good. Its id is not used again.")
_verb("archive", "Put a job that has ended away for good. Its id is not used again.")


@jobs.command()
@click.option("--url", envvar="HOLDFAST_URL", hidden=True)
@click.option("--api-key", envvar="HOLDFAST_API_KEY", hidden=True)
def key(url: str | None, api_key: str | None) -> None:
    """Print the API key of your own `holdfast serve`: what the SDKs take as api_key."""
    click.echo(find_service(state_dir(), url, api_key)[1])


@jobs.command()
@click.argument("name")
@click.option("--epoch", default=0, help="Which incarnation's [default: the newest].")
@click.option("-f", "--follow", is_flag=True, help="Go on as it grows, and over restarts.")
@_remote
def logs(remote: Remote, name: str, epoch: int, follow: bool) -> None:
    """Print what a job's trainer has written."""
    offset, shown = 0, epoch
    while True:
        piece = remote.call("GET", remote.job(name, f"/logs?epoch={shown}&offset={offset}"))
        click.echo(piece["text"], nl=False)
        offset, shown = piece["offset"], piece["epoch"]
        if piece["text"]:
            continue
        if not follow:
            return
        newest = remote.call("GET", remote.job(name, "/logs?epoch=0&offset=0"))["epoch"]
        if newest > shown and not epoch:
            offset, shown = 0, newest
        time.sleep(DEFAULTS.show_s)


def _wait(remote: Remote, name: str, timeout_s: float) -> None:
    """Wait for RUNNING, and show what is waited for."""
    began, said = time.monotonic(), ""
    try:
        while True:
            job = remote.call("GET", remote.job(name))
            state = job["state"].removeprefix("JOB_STATE_")
            why = job["status"]["message"]
            if state == "RUNNING":
                _show(said, f"{name} is RUNNING (epoch {job['epoch']})", end=True)
                return
            if state in _ENDED:
                _show(said, "", end=True)
                raise Gone(f"{name} is {state}" + (f": {why}" if why else ""))
            waited = time.monotonic() - began
            if waited > timeout_s:
                _show(said, "", end=True)
                raise TimedOut(f"{name} is {state} after {timeout_s:g} s: {why}")
            said = _show(said, f"{name}: {state}, {waited:.0f} s {why}".rstrip())
            time.sleep(DEFAULTS.show_s)
    except KeyboardInterrupt:
        click.echo(f"\nholdfast: {name} goes on; `holdfast jobs get {name}` shows it", err=True)
        raise


def _show(said: str, text: str, *, end: bool = False) -> str:
    """One line that changes in place on a terminal; elsewhere only what is new."""
    if sys.stderr.isatty():
        click.echo(f"\r{text[:100]:<100}", err=True, nl=end and bool(text))
    elif text.split(",")[0] != said.split(",")[0] and text:
        click.echo(text, err=True)
    return text
