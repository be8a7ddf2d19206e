"""Logins and TLS on real servers, with certificates made on the spot."""

import asyncio
import base64
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import Denied, HoldfastError, Mistake, Unavailable
from holdfast.ledger.etcd import EtcdLedger
from holdfast.ledger.types import Put
from holdfast.servers import EtcdServer, EtcdTls
from ledger.conformance import take
from patience import HANG_S

pytestmark = pytest.mark.etcd


class Certificates(msgspec.Struct, frozen=True):
    ca: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    other_ca: Path


def make_certificates(folder: Path) -> Certificates:
    """An authority, certificates signed by it, and an authority nobody knows."""

    def run(*argv: str) -> None:
        subprocess.run(["openssl", *argv], cwd=folder, check=True, capture_output=True)

    def authority(name: str) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        names = ("-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}")
        run("req", "-x509", *curve, "-days", "2", *names)

    def signed(name: str, extension: str) -> None:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / f"{name}.ext").write_text(extension)
        signer = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        files = ("-in", f"{name}.csr", "-out", f"{name}.crt", "-extfile", f"{name}.ext")
        run("x509", "-req", *signer, *files)

    authority("ca")
    authority("other")
    signed("server", "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    signed("client", "extendedKeyUsage=clientAuth\n")
    names = ("ca.crt", "server.crt", "server.key", "client.crt", "client.key", "other.crt")
    return Certificates(*(folder / name for name in names))


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdServer]:
    """A server that wants a login: `root`, and `limited`, who may only touch /mine/."""
    with EtcdServer(tmp_path) as server:
        mine = {"key": b64("/mine/"), "range_end": b64("/mine0"), "permType": "READWRITE"}
        for path, request in (
            ("user/add", {"name": "root", "password": "s:cret@"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "limited", "password": "x"}),
            ("role/add", {"name": "mine"}),
            ("role/grant", {"name": "mine", "perm": mine}),
            ("user/grant", {"user": "limited", "role": "mine"}),
            ("enable", {}),
        ):
            tell(server, path, dict(request))
        yield server


def tell(server: EtcdServer, path: str, request: dict[str, object], token: str = "") -> str:
    """Ask a server about its logins."""
    status, text = server.ask(f"/v3/auth/{path}", request, token)
    assert status == 200, text
    return text


def forget_tokens(server: EtcdServer) -> None:
    """Let a server forget every login that it has given."""
    root = json.loads(tell(server, "authenticate", {"name": "root", "password": "s:cret@"}))
    tell(server, "disable", {}, root["token"])
    tell(server, "enable", {})


async def test_credentials(guarded: EtcdServer) -> None:
    """Right ones work, wrong ones and missing ones are `Denied`, other people's keys too."""
    where = guarded.endpoints
    with pytest.raises(Denied, match="wants a login"):
        await EtcdLedger(where)
    with pytest.raises(Denied, match="'root' or its password"):
        await EtcdLedger(where, user="root", password="wrong")
    with pytest.raises(Denied, match="'nobody' or its password"):
        await EtcdLedger(where, user="nobody", password="wrong")
    async with EtcdLedger(where, user="root", password="s:cret@") as ledger:
        await ledger.txn([], [Put("/theirs", b"1")])
    async with EtcdLedger(where, user="limited", password="x") as ledger:
        made = await ledger.txn([], [Put("/mine/a", b"1")])
        async with ledger.watch("/mine/", start=made.revision) as watch:
            assert len(await take(watch)) == 1
        for call in (ledger.get("/theirs"), ledger.txn([], [Put("/theirs", b"2")])):
            with pytest.raises(Denied, match="'limited'"):
                await call
        async with ledger.watch("/theirs", start=1) as watch:
            with pytest.raises(Denied, match="/theirs"):
                await take(watch)


async def test_an_old_login_is_renewed(guarded: EtcdServer) -> None:
    """When the server forgets its tokens, calls and watches log in again by themselves."""
    async with EtcdLedger(guarded.endpoints, user="root", password="s:cret@") as ledger:
        start = (await ledger.txn([], [Put("/old/1", b"")])).revision
        forget_tokens(guarded)
        await asyncio.gather(*(ledger.txn([], [Put(f"/old/{n}", b"")]) for n in range(2, 6)))
        forget_tokens(guarded)
        async with ledger.watch("/old/", start=start) as watch:
            assert len(await take(watch, 5)) == 5


async def test_a_login_that_is_not_wanted_does_no_harm(etcd: EtcdServer) -> None:
    """A server without logins takes a client that has one."""
    async with EtcdLedger(etcd.endpoints, user="root", password="any") as ledger:
        await ledger.txn([], [Put("/open", b"")])


async def test_tls(tmp_path: Path, certificates: Certificates) -> None:
    """Calls and watches run over TLS; every way to get it wrong is one clear line."""
    files = certificates
    tls = EtcdTls(files.ca, files.server, files.server_key, want_client_certificate=True)
    with EtcdServer(tmp_path, tls=tls) as server:
        where = server.endpoints
        async with EtcdLedger(
            where, tls=True, ca=files.ca, cert=files.client, key=files.client_key
        ) as ledger:
            made = await ledger.txn([], [Put("/tls", b"1")])
            async with ledger.watch("/tls", start=made.revision) as watch:
                assert len(await take(watch)) == 1
        wrong: list[tuple[EtcdLedger, type[HoldfastError], str]] = [
            (EtcdLedger(where, tls=True, ca=files.other_ca), Mistake, "not trusted"),
            (EtcdLedger(where, tls=True), Mistake, "not trusted"),
            (EtcdLedger(where, tls=True, ca=files.ca), Denied, "client certificate"),
            (EtcdLedger(where, timeout_s=0.5), Unavailable, "TLS"),
            (EtcdLedger(where, tls=True, ca=tmp_path / "no"), Mistake, "is not there"),
            (EtcdLedger(where, tls=True, ca=files.client_key), Mistake, "cannot be used"),
        ]
        for ledger, kind, text in wrong:
            async with asyncio.timeout(HANG_S):
                with pytest.raises(kind, match=text) as caught:
                    await ledger
            assert "\n" not in str(caught.value)


async def test_tls_towards_a_server_without(etcd: EtcdServer) -> None:
    """A server that speaks no TLS is suspected of it."""
    with pytest.raises((Mistake, Unavailable), match="TLS"):
        await EtcdLedger(etcd.endpoints, tls=True, timeout_s=0.5)
