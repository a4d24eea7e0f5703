"""The OpenAPI document: every path, its request, and every answer that it can give."""

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octet import __version__
from serve.api.embeddings import EmbeddingRequest
from serve.api.errors import errors_of
from serve.api.messages import CountTokensRequest, MessagesRequest
from serve.api.responses import ResponsesRequest
from serve.api.schemas import ChatRequest, CompletionRequest
from serve.api.tokens import DetokenizeRequest, TokenizeRequest
from serve.config import GatewayConfig, HttpConfig
from serve.http import openapi_responses as responses

__all__ = ["document"]

Json = dict[str, Any]
_REF = "#/components/schemas/"
_JSON = "application/json"
_STREAM = "text/event-stream"
_OBJECT: Json = {"schema": {"type": "object"}}

# path: (what it does, request, answer, whether it streams)
_OPERATIONS: dict[str, tuple[str, type[BaseModel], type[BaseModel], bool]] = {
    "/v1/completions": (
        "Continue one or more prompts",
        CompletionRequest,
        responses.Completion,
        True,
    ),
    "/v1/chat/completions": (
        "Answer a conversation",
        ChatRequest,
        responses.ChatCompletion,
        True,
    ),
    "/v1/responses": ("Answer without state", ResponsesRequest, responses.Response, True),
    "/v1/messages": ("Answer in Anthropic's form", MessagesRequest, responses.Message, True),
    "/v1/messages/count_tokens": (
        "Count the tokens of a conversation",
        CountTokensRequest,
        responses.CountedTokens,
        False,
    ),
    "/v1/embeddings": ("Embed texts", EmbeddingRequest, responses.EmbeddingList, False),
    "/tokenize": ("Token ids of a text", TokenizeRequest, responses.Tokenized, False),
    "/detokenize": ("The text of token ids", DetokenizeRequest, responses.Detokenized, False),
}
_DONE = "the last one's is `[DONE]`"
_LAST = {
    "/v1/responses": "its `type` is the event's name; the last one is `response.completed`",
    "/v1/messages": "its `type` is the event's name; the last one is `message_stop`",
}
# Descriptions of the errors, by status.
_ERRORS = {
    400: "A request that cannot be served as sent; `param` names the field",
    401: "No API key, or one that is not known or has expired",
    403: "The API key may not use this model",
    404: "No such model",
    408: "The request did not arrive in time",
    413: "The body is larger than the limit",
    429: "A rate, a quota or the number of requests in flight is used up",
    431: "The header fields are larger than the limit",
    500: "A defect of the gateway, in its log",
    502: "The backend failed",
    503: "No backend takes the request now, or the gateway is full or shutting down",
    504: "A deadline passed; the message says what was spent",
}
_OF_KEYS = (401, 403)
_ALWAYS = (408, 431, 500, 503)  # possible for every path
_RETRIED = (429, 503)
_EARLY = (400, 408, 431, 503)  # possible before the request is read, so before it has an id


def document(config: GatewayConfig) -> Json:
    """Returns the OpenAPI 3.1 document, as JSON, of a gateway with this configuration."""
    keys = bool(config.access.keys or config.access.keys_file)
    backends = [backend for pool in config.all_pools.values() for backend in pool.backends]
    # A server's own refusals pass through, with the status that it chose.
    relays = any(isinstance(backend, HttpConfig) for backend in backends)
    relays = relays or any(pool.discover for pool in config.all_pools.values())
    paths: Json = {
        path: {"post": _operation(path, keys=keys, relays=relays, tiers=bool(config.tiers))}
        for path in _OPERATIONS
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octet", "version": __version__},
        "paths": paths | _models(keys) | _status(config) | _admin(config),
        "components": {
            "schemas": _schemas(),
            "parameters": _PARAMETERS | _tier_parameter(config),
            "headers": _HEADERS,
            "securitySchemes": _security(config, keys),
        },
    }


def _operation(path: str, *, keys: bool, relays: bool, tiers: bool) -> Json:
    summary, request, answer, streams = _OPERATIONS[path]
    content = {_JSON: _schema(answer)}
    if streams:
        about = f"Each event, with `stream: true`: `data` is JSON, {_LAST.get(path, _DONE)}"
        event = {"type": "object", "required": ["data"], "description": about}
        content[_STREAM] = {"schema": event | {"properties": {"data": {"type": "string"}}}}
    statuses = [status for status in _ERRORS if keys or status not in _OF_KEYS]
    of_tiers = ("tier",) if tiers else ()
    found = _answer("The answer", content)
    for header in (*of_tiers, "backend", "precision", "artifact", "divergence", "fallback"):
        found["headers"][f"X-Octet-{header.title()}"] = {"$ref": f"#/components/headers/{header}"}
    anthropic = errors_of(path).takes_x_api_key
    answers = {"200": found} | _errors(statuses, anthropic=anthropic)
    if relays:
        answers["4XX"] = _error("A refusal of the backend's own", anthropic=anthropic)
    return {
        "summary": summary,
        "operationId": path.removeprefix("/v1").strip("/").replace("/", "_"),
        "parameters": [
            {"$ref": f"#/components/parameters/{name}"}
            for name in ("timeout", "request_id", *of_tiers)
        ],
        "requestBody": {"required": True, "content": {_JSON: _schema(request)}},
        "responses": answers,
        **_secured(keys, anthropic=anthropic),
    }


def _models(keys: bool) -> Json:
    statuses = [*((401,) if keys else ()), *_ALWAYS]
    of_list = _answer("The models that this server offers", {_JSON: _schema(responses.ModelList)})
    of_one = _answer("The model", {_JSON: _schema(responses.Model)})
    return {
        "/v1/models": {
            "get": {
                "summary": "List the models",
                "operationId": "list_models",
                "responses": {"200": of_list} | _errors(statuses),
                **_secured(keys),
            }
        },
        "/v1/models/{model}": {
            "get": {
                "summary": "Describe one model",
                "operationId": "get_model",
                "parameters": [_in_path("model")],
                "responses": {"200": of_one} | _errors([*statuses, 404]),
                **_secured(keys),
            }
        },
    }


def _status(config: GatewayConfig) -> Json:
    """Describes the paths without a model. Leaves out metrics and status with a separate port."""
    alive: Json = {"type": "object", "properties": {"status": {"const": "alive"}}}
    ready = {_JSON: _schema(responses.Readiness)}
    health = {"200": _answer("The process lives", {_JSON: {"schema": alive}})}
    readiness = {
        "200": _answer("Send traffic here", ready),
        "503": _answer("Draining, or no backend is ready", ready),
    }
    always = [status for status in _ALWAYS if status != 503]
    paths = {
        "/health": {"get": _get("health", "Whether the process lives", health | _errors(_ALWAYS))},
        "/ready": {"get": _get("ready", "Whether to send traffic", readiness | _errors(always))},
    }
    if config.admin.port is None:
        text = {"text/plain": {"schema": {"type": "string"}}}
        metrics = {"200": _answer("Prometheus metrics", text)}
        status = {"200": _answer("The status of models, pools and backends", {_JSON: _OBJECT})}
        paths["/metrics"] = {"get": _get("metrics", "Metrics", metrics | _errors(_ALWAYS))}
        paths["/status"] = {"get": _get("status", "Pools and queues", status | _errors(_ALWAYS))}
    return paths


def _admin(config: GatewayConfig) -> Json:
    """Describes /admin, which is here only if it has a key of its own and no port of its own."""
    if config.admin.sha256 is None or config.admin.port is not None:
        return {}
    refusals = _errors([400, 401, 403, 404, *_ALWAYS])

    def operation(name: str, summary: str, *in_path: str, status: int = 200) -> Json:
        done = {str(status): _answer("Done", {_JSON: _OBJECT})}
        parameters = [_in_path(parameter) for parameter in in_path]
        secured = {"parameters": parameters, "security": [{"admin_key": []}]}
        return _get(name, summary, done | refusals) | secured

    add = operation("add_backend", "Start one more backend", "pool", status=201)
    roll_out = operation("roll_out", "Roll out a canary of the model", "model", status=202)
    for posted in (add, roll_out):
        posted["requestBody"] = {"required": True, "content": {_JSON: _OBJECT}}
    return {
        "/admin/reload": {"post": operation("reload", "Read the configuration again")},
        "/admin/backends": {"get": operation("list_backends", "Every pool's backends")},
        "/admin/pools/{pool}/backends": {"post": add},
        "/admin/pools/{pool}/backends/{name}": {
            "delete": operation(
                "remove_backend", "Remove a backend once its requests have ended", "pool", "name"
            )
        },
        "/admin/pools/{pool}/backends/{name}/proof": {
            "post": operation("prove_backend", "Prove a backend again", "pool", "name", status=202)
        },
        "/admin/models/{model}/rollout": {
            "get": operation("get_rollout", "The latest rollout of the model", "model"),
            "post": roll_out,
            "delete": operation("roll_back", "Send the model's canary back", "model"),
        },
    }


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _get(name: str, summary: str, answers: Json) -> Json:
    return {"summary": summary, "operationId": name, "responses": answers}


def _schema(model: type[BaseModel]) -> Json:
    return {"schema": {"$ref": _REF + model.__name__}}


def _answer(description: str, content: Json) -> Json:
    headers = {"X-Request-Id": {"$ref": "#/components/headers/request_id"}}
    return {"description": description, "headers": headers, "content": content}


def _error(description: str, status: int | None = None, *, anthropic: bool = False) -> Json:
    schema = _schema(responses.ErrorObject)
    if anthropic:
        ours, schema = schema["schema"], _schema(responses.AnthropicErrorObject)
        if status in _EARLY:  # before the path is known
            schema = {"schema": {"anyOf": [schema["schema"], ours]}}
    answer = _answer(description, {_JSON: schema})
    if status in _RETRIED:
        answer["headers"]["Retry-After"] = {"$ref": "#/components/headers/retry_after"}
    if status in _EARLY:
        answer["headers"]["X-Request-Id"] = {"$ref": "#/components/headers/maybe_request_id"}
    return answer


def _errors(statuses: Any, *, anthropic: bool = False) -> Json:
    return {
        str(status): _error(_ERRORS[status], status, anthropic=anthropic)
        for status in sorted(statuses)
    }


def _tier_parameter(config: GatewayConfig) -> Json:
    """Describes the tier header; empty without tiers, because the header is then an error."""
    if not config.tiers:
        return {}
    about = "How exact the answer must be; the most exact tier first"
    schema = {"type": "string", "enum": list(config.tiers)}
    return {
        "tier": {"name": "X-Octet-Tier", "in": "header", "description": about, "schema": schema}
    }


def _secured(keys: bool, *, anthropic: bool = False) -> Json:
    schemes: list[Json] = [{"api_key": []}, *([{"x_api_key": []}] if anthropic else ())]
    return {"security": schemes} if keys else {}


def _security(config: GatewayConfig, keys: bool) -> Json:
    bearer = {"type": "http", "scheme": "bearer"}
    anthropic = {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
    schemes = {"api_key": bearer, "x_api_key": anthropic} if keys else {}
    return schemes | ({"admin_key": bearer} if config.admin.sha256 else {})


def _schemas() -> Json:
    requests: list[type[BaseModel]] = [request for _, request, _, _ in _OPERATIONS.values()]
    answers: list[type[BaseModel]] = [getattr(responses, name) for name in responses.__all__]
    _, definitions = models_json_schema(
        [(model, "validation") for model in (*requests, *answers)], ref_template=_REF + "{model}"
    )
    found: Json = definitions["$defs"]
    return found


_PARAMETERS: Json = {
    "timeout": {
        "name": "X-Request-Timeout",
        "in": "header",
        "description": "Seconds that the whole request may take; only shortens the gateway's own",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    "request_id": {
        "name": "X-Request-Id",
        "in": "header",
        "description": "Taken for logs, traces and the backend, and echoed; else one is made",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:/+=-]{1,128}$"},
    },
}
_HEADERS: Json = {
    "request_id": {
        "required": True,
        "description": "The request's id in logs and traces",
        "schema": {"type": "string"},
    },
    "maybe_request_id": {
        "description": "The request's id, unless it was refused before its headers were read",
        "schema": {"type": "string"},
    },
    "tier": {
        "description": "The requested tier, whose budget the answer keeps",
        "schema": {"type": "string"},
    },
    "backend": {
        "description": "The pool and the name of the backend that answered",
        "schema": {"type": "string"},
    },
    "precision": {
        "description": "The precision of the pool that answered, as the operator names it",
        "schema": {"type": "string"},
    },
    "artifact": {
        "description": "The artifact that answered, by the beginning of its identity",
        "schema": {"type": "string", "pattern": "^[0-9a-f]{12}$"},
    },
    "divergence": {
        "description": "Nats from the reference, as measured of the pool: the upper bound",
        "schema": {"type": "number", "minimum": 0},
    },
    "fallback": {
        "description": "The pool that answered, and those that were given up before it, with why",
        "schema": {"type": "string"},
    },
    "retry_after": {
        "description": "Seconds to wait before a retry",
        "schema": {"type": "integer", "minimum": 1},
    },
}
