"""`holdfast`, run as its users do: what it says, and how it ends."""

import contextlib
import io
import json
import sys
from typing import Any

import pytest

from holdfast.cli import main


def run(*args: str, code: int = 0) -> str:
    """Run the command's own `main` here, which spares a second each; a complaint is one line.

    Returns the output or, if there is none, the complaint.
    """
    out, complaint = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(complaint),
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", ["holdfast", *args])
        main()
    assert end.value.code == code, out.getvalue() + complaint.getvalue()
    if code == 0 or out.getvalue():
        return out.getvalue()
    assert complaint.getvalue().startswith(("holdfast: ", "Usage")), complaint.getvalue()
    assert "Traceback" not in complaint.getvalue()
    return complaint.getvalue()


def rows(*args: str, code: int = 0, only: str = "") -> list[dict[str, Any]]:
    """What it says with `--json`; `only` rows of one type."""
    found = [json.loads(line) for line in run(*args, "--json", code=code).splitlines()]
    return [row for row in found if row["type"] == (only or row["type"])]
