"""The REST of the control plane, described in OpenAPI: for people, tools and tests."""

from typing import Any, Final

from holdfast.jobs.records import NAME, STATES

__all__ = ["DOCUMENT"]

_NAME: Final = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_JOBS: Final = "/v1/accounts/{account}/rlorTrainerJobs"
_JOB: Final = {"$ref": "#/components/schemas/Job"}
_ERROR: Final = {"$ref": "#/components/schemas/Error"}
_REFUSALS: Final = {
    "400": "the request must be changed",
    "401": "no API key, or a wrong one",
    "404": "not there, or another account's",
    "405": "not with this method",
    "409": "the id has been used",
    "410": "gone for good",
    "413": "too large",
    "503": "the ledger is away: try again",
}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    told = {"type": "object", "required": list(required), "properties": properties}
    return {name: value for name, value in told.items() if value}


def _body(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _parameter(where: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    required = {"required": True} if where == "path" else {}
    return {"name": name, "in": where, "schema": schema, **required}


_ACCOUNT: Final = [_parameter("path", "account", _NAME)]
_ONE: Final = [*_ACCOUNT, _parameter("path", "job", _NAME)]
_PAGES: Final = [
    _parameter("query", "pageSize", {"type": "integer", "minimum": 1, "maximum": 200}),
    _parameter("query", "pageToken", {"type": "string", "maxLength": 63}),
]


def _operation(
    about: str,
    schema: dict[str, Any] = _JOB,
    parameters: list[dict[str, Any]] = _ONE,
    **more: Any,
) -> dict[str, Any]:
    refused = {code: {"description": why, **_body(_ERROR)} for code, why in _REFUSALS.items()}
    responses = {"200": {"description": "done", **_body(schema)}, **refused}
    return {"summary": about, "parameters": parameters, "responses": responses, **more}


_VERBS: Final = {
    "pause": "stop a job's trainer; what it has done is kept",
    "resume": "let a job go on",
    "cancel": "stop a job",
    "stop": "end a job before its time; what it has saved is kept",
    "archive": "put a job that has ended away for good",
}
_PATHS: Final = {
    "/v1/accounts": {
        "get": _operation("the account that the key belongs to", _object("accounts"), [])
    },
    _JOBS: {
        "get": _operation(
            "list jobs",
            _object(
                "rlorTrainerJobs",
                "nextPageToken",
                rlorTrainerJobs={"type": "array", "items": _JOB},
            ),
            [*_ACCOUNT, *_PAGES],
        ),
        "post": _operation(
            "create a job",
            parameters=[*_ACCOUNT, _parameter("query", "rlorTrainerJobId", _NAME)],
            requestBody=_body(_object()),
        ),
    },
    f"{_JOBS}/{{job}}": {
        "get": _operation("one job"),
        "delete": _operation("end a job for good", _object()),
    },
    **{f"{_JOBS}/{{job}}:{verb}": {"post": _operation(why)} for verb, why in _VERBS.items()},
    f"{_JOBS}/{{job}}/checkpoints": {
        "get": _operation(
            "what a job's trainer has saved",
            _object("checkpoints", "nextPageToken"),
            [*_ONE, *_PAGES],
        )
    },
    f"{_JOBS}/{{job}}/logs": {
        "get": _operation(
            "what a job's trainer has written",
            _object("text", "offset", "epoch"),
            [*_ONE, *(_parameter("query", name, _COUNT) for name in ("epoch", "offset"))],
        )
    },
}

DOCUMENT: Final[dict[str, Any]] = {
    "openapi": "3.0.3",
    "info": {"title": "Holdfast: trainer jobs", "version": "1"},
    "security": [{"key": []}],
    "paths": _PATHS,
    "components": {
        "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"}},
        "schemas": {
            "Job": _object(
                *("name", "state", "epoch", "createTime", "updateTime", "status"),
                name={"type": "string"},
                state={"enum": [f"JOB_STATE_{state}" for state in STATES]},
                epoch={"type": "integer", "minimum": 1},
            ),
            "Error": _object("error", error=_object("code", "message")),
        },
    },
}
