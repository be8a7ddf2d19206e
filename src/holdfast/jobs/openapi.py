"""The REST of the control plane, described in OpenAPI: for people, tools and tests."""

from typing import Any, Final

from holdfast.jobs.records import NAME, STATES

__all__ = ["DOCUMENT"]

_NAME: Final = {"type": "string", "pattern": f"^{NAME.pattern}$"}
_JOBS: Final = "/v1/accounts/{account}/rlorTrainerJobs"
_ERROR: Final = {"$ref": "#/components/schemas/Error"}


def _answer(about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _operation(
    about: str, schema: dict[str, Any], parameters: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    refusals = {
        "400": "the request must be changed",
        "401": "no API key, or a wrong one",
        "404": "not there, or another account's",
        "405": "not with this method",
        "409": "the id has been used",
        "410": "gone for good",
        "413": "too large",
        "503": "the ledger is away: try again",
    }
    return {
        "summary": about,
        "parameters": parameters,
        "responses": {
            "200": _answer("done", schema),
            **{status: _answer(why, _ERROR) for status, why in refusals.items()},
        },
        **more,
    }


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": _NAME}


def _in_query(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema}


_ACCOUNT: Final = [_in_path("account")]
_ONE: Final = [_in_path("account"), _in_path("job")]
_JOB: Final = {"$ref": "#/components/schemas/Job"}
_PAGES: Final = [
    _in_query("pageSize", {"type": "integer", "minimum": 1, "maximum": 200}),
    _in_query("pageToken", {"type": "string", "maxLength": 63}),
]


def _verb(name: str, about: str) -> dict[str, Any]:
    return {f"{_JOBS}/{{job}}:{name}": {"post": _operation(about, _JOB, _ONE)}}


DOCUMENT: Final[dict[str, Any]] = {
    "openapi": "3.0.3",
    "info": {"title": "Holdfast: trainer jobs", "version": "1"},
    "security": [{"key": []}],
    "paths": {
        "/v1/accounts": {
            "get": _operation(
                "the account that the key belongs to",
                {"type": "object", "required": ["accounts"]},
                [],
            )
        },
        _JOBS: {
            "get": _operation(
                "list jobs",
                {
                    "type": "object",
                    "required": ["rlorTrainerJobs", "nextPageToken"],
                    "properties": {"rlorTrainerJobs": {"type": "array", "items": _JOB}},
                },
                [*_ACCOUNT, *_PAGES],
            ),
            "post": _operation(
                "create a job",
                _JOB,
                [*_ACCOUNT, _in_query("rlorTrainerJobId", _NAME)],
                requestBody={
                    "content": {"application/json": {"schema": {"type": "object"}}},
                },
            ),
        },
        f"{_JOBS}/{{job}}": {
            "get": _operation("one job", _JOB, _ONE),
            "delete": _operation("end a job for good", {"type": "object"}, _ONE),
        },
        **_verb("pause", "stop a job's trainer; what it has done is kept"),
        **_verb("resume", "let a job go on"),
        **_verb("cancel", "stop a job"),
        **_verb("archive", "put a job that has ended away for good"),
        f"{_JOBS}/{{job}}/checkpoints": {
            "get": _operation(
                "what a job's trainer has saved",
                {"type": "object", "required": ["checkpoints", "nextPageToken"]},
                [*_ONE, *_PAGES],
            )
        },
        f"{_JOBS}/{{job}}/logs": {
            "get": _operation(
                "what a job's trainer has written",
                {"type": "object", "required": ["text", "offset", "epoch"]},
                [
                    *_ONE,
                    _in_query("epoch", {"type": "integer", "minimum": 0}),
                    _in_query("offset", {"type": "integer", "minimum": 0}),
                ],
            )
        },
    },
    "components": {
        "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"}},
        "schemas": {
            "Job": {
                "type": "object",
                "required": ["name", "state", "epoch", "createTime", "updateTime", "status"],
                "properties": {
                    "name": {"type": "string"},
                    "state": {"enum": [f"JOB_STATE_{state}" for state in STATES]},
                    "epoch": {"type": "integer", "minimum": 1},
                },
            },
            "Error": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {"type": "object", "required": ["code", "message"]},
                },
            },
        },
    },
}
