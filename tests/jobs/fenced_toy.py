"""A trainer of a few lines behind the fence: answers with the path and headers that came in."""

import json
import os
from typing import Any

import uvicorn

from holdfast.jobs.fence import Fence, Incarnation


async def app(scope: Any, _receive: Any, send: Any) -> None:
    headers = {name.decode(): value.decode() for name, value in scope["headers"]}
    body = json.dumps({"path": scope["path"], "headers": headers}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


if __name__ == "__main__":
    fenced = Fence(app, Incarnation.from_env())
    port = int(os.environ["PORT"])
    uvicorn.run(fenced, host=os.environ["HOST"], port=port, lifespan="off", log_level="warning")
