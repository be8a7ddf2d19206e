"""The ledger on a real etcd v3 cluster, through its JSON gateway.

`wire.py` translates (pure), `http.py` carries (endpoints, fail-over, login, TLS, limits),
`watch.py` follows, `backend.py` is the `Ledger`. Works with etcd 3.4 and newer.
"""

from holdfast.ledger.etcd.backend import EtcdLedger

__all__ = ["EtcdLedger"]
