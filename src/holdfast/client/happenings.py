"""What the client decided, as events: every 404, every probe."""

from holdfast.events import Event

__all__ = ["Doubted", "Probed", "Ready", "Retried"]


class Doubted(Event, frozen=True, tag="client.doubted"):
    """A 404 that may not be true, and what was done about it."""

    labels = ("kind", "step")

    kind: str
    """What got it: submit, or poll (which changes nothing)."""
    path: str
    failures: int
    """How many there were so far."""
    control: str
    """What the control plane says of the job, or why it did not."""
    step: str
    """What comes next: send again, poll again, raise; or recovered."""
    delay_s: float = 0.0
    detail: str = ""
    left_s: float = 0.0
    """How much of the time for waiting and asking is left."""
    retries: int = 0
    """Of older logs: after how many more the caller got it."""

    def __str__(self) -> str:
        """One line for people."""
        if self.step == "recovered":
            return f"{self.kind} of {self.path} succeeded after {self.failures} 404s"
        late = self.detail == "unverified" and not self.left_s
        if late or self.detail in ("deadline", "exhausted"):
            return f"404 on {self.kind}, still at try {self.failures}: {self.step}"
        asked = f"control plane says {self.control}" if self.control else "nobody was asked"
        return (
            f"404 on {self.kind}, {asked}, try {self.failures}, {self.left_s:.0f} s left: "
            f"{self.step}"
        )


class Probed(Event, frozen=True, tag="client.probed"):
    """One probe of the data path, on a connection of its own."""

    labels = ("outcome",)

    path: str
    status: int
    code: str
    outcome: str
    streak: int
    """How many in a row have succeeded."""


class Ready(Event, frozen=True, tag="client.ready"):
    """The data path has answered several times in a row."""

    probes: int
    took_s: float
    computed: bool
    """Whether the probes were of the kind that computes something."""


class Retried(Event, frozen=True, tag="client.retried"):
    """The native client met an error that may pass, and what it decided."""

    labels = ("name", "verdict")

    name: str
    """What was called."""
    failures: int
    verdict: str
    error: str
    delay_s: float
