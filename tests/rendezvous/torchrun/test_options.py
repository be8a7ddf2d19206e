"""What torchrun's flags are read as."""

import subprocess
import sys
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from holdfast.contrib.torchrun import handlers
from holdfast.contrib.torchrun.options import Options, parse
from holdfast.errors import Mistake
from holdfast.rendezvous import torchrun as old


def options(endpoint: str = "sqlite:///l.db", run: str = "r", **conf: Any) -> Options:
    return parse(RendezvousParameters("holdfast", endpoint, run, 2, 4, **conf))


def test_everything_that_rdzv_conf_may_hold() -> None:
    """Text in, rules out; torch's own `timeout`, and `is_host` of c10d, mean nothing."""
    found = options(
        spares="1",
        segment="1",
        last_call_timeout="3",
        join_timeout="60",
        settle_timeout="2",
        stop_timeout="50",
        lease="7.5",
        domain="rack3",
        infra_rank="12",
        node_name="n12",
        is_host="1",
        timeout=900,
    )
    rules, node = found.rules, found.node
    assert (rules.minimum, rules.maximum, rules.spares, rules.segment) == (2, 4, 1, 1)
    assert (rules.last_call_s, found.join_s, rules.settle_s, rules.stop_s) == (3, 60, 2, 50)
    assert (node.domain, node.infra_rank, found.name, found.lease_s) == ("rack3", 12, "n12", 7.5)


def test_two_nodes_of_one_host_have_different_names() -> None:
    """Several torchruns on one machine are several nodes."""
    assert options().name != options().name


def test_an_endpoint_is_a_ledger_url() -> None:
    """Several etcd hosts, a password, options: it arrives as it was given."""
    endpoint = "etcd://root:secret@127.0.0.1:2379,127.0.0.1:2380?timeout=3"
    found = options(endpoint)
    assert (found.url, found.node.address) == (endpoint, "127.0.0.1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"store_type": "file"}, "store_type: there is no such option; there are domain, infra"),
        ({"spares": "many"}, "spares: Input should be a valid integer"),
        ({"spares": "3"}, "leaves fewer than the minimum"),
        ({"lease": "0"}, "lease: Input should be greater than 0"),
        ({"segment": "5"}, "no multiple of it lies between"),
        ({"infra_rank": "-1"}, "infra_rank"),
        ({"run": "none"}, "--rdzv-id NAME"),
        ({"run": "a/b"}, "a/b"),
        ({"endpoint": "etcd://no-such-host.invalid:1"}, "--local-addr"),
    ],
)
def test_a_mistake_is_one_clear_line(change: dict[str, Any], words: str) -> None:
    """Whatever is wrong is named, with what to do instead."""
    with pytest.raises(Mistake) as caught:
        options(**change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_old_name_of_the_plug_in_leads_to_the_same_handlers() -> None:
    """The entry point of an earlier installation names it."""
    assert old.handlers is handlers


def test_nothing_is_imported_before_a_handler_is_asked_for() -> None:
    """torch loads the entry point whatever back end is used: that must cost next to nothing."""
    code = (
        "import sys, holdfast.contrib.torchrun as t; t.handlers(); "
        "print([m for m in ('torch', 'pydantic', 'apsw', 'aiohttp') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
