"""The description of the HTTP interface in the form of OpenAPI, for programs that make clients."""

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from treenet.extras.serving.messages import Answer, ClassAnswer, Health, Problem, Served
from treeproc import __version__

_PROBLEMS = {"401": "no token", "413": "too large", "422": "bad request", "500": "the model failed", "503": "not now"}


# By task: the address that takes questions, what it does, and the form of its answers.
QUESTIONS = {
    "translation": ("/translate", "Translate lines of text, one sentence each.", Answer),
    "classification": ("/classify", "Classify lines of text, one sentence each.", ClassAnswer),
}


def describe_interface(request: type[BaseModel], served: Served) -> dict:
    """Return the content of /openapi.json, for questions of the form `request`."""
    path, summary, answer = QUESTIONS[served.task]
    models: list = [(request, "validation"), *((one, "serialization") for one in (answer, Health, Problem))]
    references, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")

    def holds(model: type[BaseModel], mode: str = "serialization") -> dict:
        return {"content": {"application/json": {"schema": references[model, mode]}}}  # type: ignore[index]

    problems = {status: {"description": what, **holds(Problem)} for status, what in _PROBLEMS.items()}
    question = {
        "summary": summary,
        "requestBody": {"required": True, **holds(request, "validation")},
        "responses": {"200": {"description": "one answer a line", **holds(answer)}, **problems},
        "security": [{}, {"token": []}],
    }
    states = {status: {"description": what, **holds(Health)} for status, what in (("200", "yes"), ("503", "no"))}
    health = {"summary": "Whether a replica runs.", "responses": states}
    return {
        "openapi": "3.1.0",
        "info": {"title": "tree-attention", "version": __version__},
        "paths": {path: {"post": question}, "/healthz": {"get": health}},
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
