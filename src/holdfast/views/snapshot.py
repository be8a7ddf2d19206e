"""A picture as plain data: for the page, the report, `final.json` and Prometheus. Pure."""

from types import SimpleNamespace
from typing import Any

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from holdfast.views.curve import Point
from holdfast.views.faults import Fault
from holdfast.views.picture import Picture

__all__ = ["prometheus", "snapshot", "summary"]

_PLAIN = ["serial", "run", "seed", "how", "content", "began", "ended", "now", "resumes"]
_PLAIN += ["step", "steps"]
_POINTS = 400
_VERSIONS = 40


def snapshot(picture: Picture, *, log_after: int = 0) -> dict[str, Any]:
    """Everything that the page draws; of the log only what is new."""
    faults = picture.faults
    return {
        **{name: getattr(picture, name) for name in _PLAIN},
        "pace_s": faults.pace_s(),
        "train": _thin(picture.train.points()),
        "evals": _thin(picture.evals.points()),
        "depth": _thin(picture.depth.points()),
        "queue": {
            "depth": picture.queue,
            "made": picture.made,
            "acknowledged": picture.acknowledged,
        },
        "versions": [
            msgspec.to_builtins(picture.versions[number])
            for number in sorted(picture.versions)[-_VERSIONS:]
        ],
        "members": [
            {**msgspec.to_builtins(member), "state": member.state}
            for member in picture.members.sorted()
        ],
        "spares": len(picture.members.spares),
        "spare_nodes": picture.spare_nodes(),
        "faults": [_fault(picture, fault) for fault in faults.kept],
        "faults_total": faults.total,
        "points": picture.points.facts(),
        "jobs": [
            {"job": job, "epochs": [msgspec.to_builtins(epochs[at]) for at in sorted(epochs)]}
            for job, epochs in picture.jobs.items()
        ],
        "counts": dict(sorted(picture.counts.items())),
        "log": msgspec.to_builtins(picture.entries(log_after)),
    }


def summary(picture: Picture) -> dict[str, Any]:
    """The run in a few numbers."""
    first, last, held = picture.train.first, picture.train.last, picture.evals.last
    kinds = {}
    for kind, faults in picture.faults.by_kind().items():
        lost = [picture.faults.lost_s(fault) for fault in faults]
        kinds[kind] = {
            "faults": len(faults),
            "seconds_lost": round(sum(each or 0.0 for each in lost), 3),
        }
    return {
        "steps": picture.step,
        "first_reward": first[1] if first else None,
        "last_reward": last[1] if last else None,
        "eval_exact": held[1] if held else None,
        "faults": picture.faults.total,
        "recoveries": _recoveries(picture),
        "seconds_lost": round(sum(kind["seconds_lost"] for kind in kinds.values()), 3),
        "lost_by_kind": kinds,
        "pace_s": round(picture.faults.pace_s(), 3),
        "seconds": round((picture.ended or picture.now) - (picture.began or picture.now), 3),
    }


def prometheus(picture: Picture) -> bytes:
    """The picture in Prometheus' text format."""
    # All that is asked of a registry is to collect.
    registry: Any = SimpleNamespace(collect=lambda: _families(picture))
    return generate_latest(registry)


def _families(picture: Picture) -> list[Metric]:
    """Every number."""
    train, held = picture.train.last, picture.evals.last
    facts = summary(picture)
    numbers = {
        "run_step": picture.step,
        "run_steps": picture.steps,
        "run_reward": train[1] if train else None,
        "run_exact": train[2] if train else None,
        "run_loss": train[3] if train else None,
        "run_eval_exact": held[1] if held else None,
        "run_step_seconds": facts["pace_s"],
        "queue_depth": picture.queue,
        "weights_version": picture.version,
        "spares": len(picture.members.spares),
    }
    families: list[Metric] = [
        GaugeMetricFamily(f"holdfast_{name}", "of the run", value=value)
        for name, value in numbers.items()
        if value is not None
    ]
    up = GaugeMetricFamily("holdfast_member_up", "whether it lives", labels=["member"])
    deaths = CounterMetricFamily("holdfast_member_deaths", "deaths", labels=["member"])
    for member in picture.members.sorted():
        up.add_metric([member.name], member.state == "up")
        deaths.add_metric([member.name], member.deaths)
    faults = CounterMetricFamily("holdfast_run_faults", "by their kind", labels=["kind"])
    lost = GaugeMetricFamily("holdfast_run_lost_seconds", "by kind", labels=["kind"])
    for kind, each in facts["lost_by_kind"].items():
        faults.add_metric([kind], each["faults"])
        lost.add_metric([kind], each["seconds_lost"])
    counts = CounterMetricFamily("holdfast_events", "events in the logs", labels=["type"])
    for kind, count in sorted(picture.counts.items()):
        counts.add_metric([kind], count)
    return [*families, up, deaths, faults, lost, counts]


def _fault(picture: Picture, fault: Fault) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(fault)
    return {**fields, "kind": fault.kind, "lost_s": picture.faults.lost_s(fault)}


def _recoveries(picture: Picture) -> int:
    """Faults that are over: the member lives again, or a step came after it."""
    faults = picture.faults.kept
    return sum(
        fault.healed_s is not None or fault.again_s is not None or fault.gap_s is not None
        for fault in faults
    )


def _thin(points: list[Point]) -> list[Point]:
    every = -(-len(points) // _POINTS)
    return points if every <= 1 else [*points[:-1:every], points[-1]]
