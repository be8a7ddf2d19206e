"""One trainer for all modules that want the same of it: nobody here hurts it."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trainer.house import House, house

Open = Callable[[dict[str, Any]], House]


@pytest.fixture(scope="session")
def houses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Houses by policy, each opened when it is first asked for."""
    opened: dict[str, House] = {}
    with contextlib.ExitStack() as stack:

        def one(policy: dict[str, Any]) -> House:
            key = json.dumps(policy, sort_keys=True)
            if key not in opened:
                folder = tmp_path_factory.mktemp("house")
                opened[key] = stack.enter_context(house(folder, policy=policy))
            return opened[key]

        yield one


@pytest.fixture(scope="module")
def there(request: pytest.FixtureRequest, houses: Open) -> House:
    """A house; a module says with `POLICY` how patient its trainer is."""
    return houses(getattr(request.module, "POLICY", {}))
