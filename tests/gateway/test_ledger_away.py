"""The ledger goes away: what is known is served on, what is not known is never "not found"."""

from pathlib import Path

from gateway.service import serve
from holdfast.servers import EtcdServer
from patience import until


def test_what_is_known_is_served_on(tmp_path: Path) -> None:
    """Requests go on for as long as the trainers do; everything else may be asked again."""
    flags = ("--submit-wait", "2.5", "--poll-hold", "3")
    with EtcdServer(tmp_path / "etcd") as etcd:
        url = "etcd://{}:{}?timeout=2".format(*etcd.endpoint)
        with serve(tmp_path / "serve", *flags, ledger=url) as service:
            service.create("known")
            service.wait("known")
            service.create("paused")
            service.wait("paused")
            service.ask("POST", service.jobs("paused", ":pause"))
            epoch = service.ask("GET", service.way("known")).json["epoch"]
            etcd.pause()
            try:
                for _ in range(20):
                    answer = service.ask("POST", service.way("known", "/api/v1/optim_step"), b"{}")
                    assert answer.status == 200, answer
                for job in ("never", "paused"):
                    submit = service.ask("POST", service.way(job, "/api/v1/optim_step"), b"{}")
                    assert submit.status == 503, submit
                    assert submit.json["error"]["code"] == "route_not_ready"
                poll = service.ask("POST", service.way("never", "/api/v1/retrieve_future"), b"{}")
                assert poll.status == 408, poll
                asked = service.ask("GET", service.jobs("known"))
                assert (asked.status, asked.headers["retry-after-ms"]) == (503, "500"), asked
            finally:
                etcd.resume()
            until(lambda: service.ask("GET", service.way("never")).status == 404, "it is back")
            after = service.ask("GET", service.way("known"))
            assert (after.status, after.json["epoch"]) == (200, epoch), "the trainer lived on"
