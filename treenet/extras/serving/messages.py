"""Messages of the server: what clients send and get, as pydantic models, and what the entrance expects of replicas.

The models check requests and describe the interface.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, create_model

from treenet.extras.serving.settings import ServeSettings
from treenet.translation.line_constraints import constraint_columns


@dataclass(frozen=True)
class Served:
    """The model that replicas serve, and what a request may ask of it."""

    name: str
    task: str = "translation"
    beam_size: int = 1  # most translations of a line
    has_phrases: bool = False  # a classifier that knows classes of phrases
    reads_pairs: bool = False  # a classifier of pairs of texts


@dataclass(frozen=True)
class Question:
    """A request that was checked."""

    lines: tuple[str, ...]  # the texts of a pair with a tab between them
    num_best: int
    attention: bool
    constraints: dict[str, tuple[str, ...]] = field(default_factory=dict)  # in the form of the lines of files, one a line
    phrases: bool = False  # of a classifier: whether the answer has the classes of phrases


class Hypothesis(BaseModel):
    """One translation of a line."""

    text: str
    score: float | None = Field(
        description="log-probability divided by the length penalty, plus the coverage penalty if there is one; with minimum "
        "Bayes risk, mean chrF against the samples; null for an empty line"
    )
    log_prob: float | None = Field(description="sum over pieces and the end of the sentence, in nats")
    pieces: list[str]


class Leaf(BaseModel):
    """A piece of the line."""

    piece: str
    tag: str
    word: int = Field(description="number of its word, from 0")


class Node(BaseModel):
    """A constituent; nodes are in pre-order."""

    label: str
    start: int = Field(description="first leaf")
    end: int = Field(description="one past the last leaf")
    parent: int = Field(description="number of the node above, -1 at a root")


class Tree(BaseModel):
    """The tree of a line over its pieces."""

    brackets: str = Field(description="Penn Treebank brackets")
    leaves: list[Leaf]
    nodes: list[Node]


class Attention(BaseModel):
    """Where the best translation looked: means over layers and heads."""

    targets: list[str] = Field(description="pieces of the translation; the last one is </s>")
    weights: list[list[float]] = Field(description="a row a target; columns are leaves, then the nodes that the model attends to")


class LineAnswer(BaseModel):
    """The answer for one line."""

    source: str
    translation: str = Field(description="the first hypothesis; empty if there is none")
    hypotheses: list[Hypothesis]
    tree: Tree | None = None
    attention: Attention | None = None
    warnings: list[str] = []
    error: str | None = Field(None, description="why the line has no translation")


class Answer(BaseModel):
    """One answer a line, in the order of the request."""

    lines: list[LineAnswer]


class PhraseClass(BaseModel):
    """The most probable class of a phrase."""

    text: str
    start: int = Field(description="first leaf")
    end: int = Field(description="one past the last leaf")
    label: str
    probability: float


class LineClassAnswer(BaseModel):
    """The classes of one line, or of a pair of texts."""

    source: str = Field(description="the texts of a pair have a tab between them")
    label: str | None = Field(description="the most probable class; null if there is none")
    probabilities: dict[str, float] = Field(description="by the name of the class")
    phrases: list[PhraseClass] = Field(description="the outer ones first")
    tree: Tree | None = None
    second_tree: Tree | None = Field(None, description="of the second text of a pair")
    warnings: list[str] = []
    error: str | None = Field(None, description="why the line has no class")


class ClassAnswer(BaseModel):
    """One answer a line, in the order of the request."""

    lines: list[LineClassAnswer]


class Health(BaseModel):
    """The state of the server."""

    status: str = Field(description="ok, or starting where no replica runs")
    model: str
    replicas: int = Field(description="replicas that run")
    waiting: int = Field(description="requests that are accepted and not answered yet")


class Problem(BaseModel):
    """Why a request got no answer."""

    error: str


class _Request(BaseModel):
    """Lines to translate."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lines: list[str]
    num_best: int
    attention: bool
    prefix: list[str] | None
    must_appear: list[list[str]] | None
    must_not_appear: list[list[str]] | None

    def question(self) -> Question:
        columns = constraint_columns(self.prefix, self.must_appear, self.must_not_appear)
        constraints = {name: tuple(values) for name, values in columns.items()}
        return Question(tuple(self.lines), self.num_best, self.attention, constraints)


def _one_a_line(values: list | None, info: ValidationInfo) -> list | None:
    if values is not None and "lines" in info.data and len(values) != (lines := len(info.data["lines"])):
        raise ValueError(f"must have one entry for each line, {lines}, but has {len(values)}")
    return values


def _check_tabs(phrase: str) -> str:
    if "\t" in phrase:
        raise ValueError("must not have tabs")
    return phrase


class _ClassRequest(BaseModel):
    """Lines to classify."""

    model_config = ConfigDict(extra="forbid", strict=True)

    lines: list[str] | list[tuple[str, str]]

    def question(self) -> Question:
        lines = tuple(line if isinstance(line, str) else "\t".join(line) for line in self.lines)
        return Question(lines, 1, False, phrases=getattr(self, "phrases", False))


def request_model(settings: ServeSettings, served: Served) -> type[_Request | _ClassRequest]:
    """Return the model of a request with the limits of `settings`, for the model that is served."""
    if served.task == "classification":
        wanted = (bool, Field(False, description="whether the answer has the classes of phrases"))
        more: dict[str, Any] = {"phrases": wanted} if served.has_phrases else {}
        lines = _lines(settings, pairs=served.reads_pairs)
        return create_model("Request", __base__=_ClassRequest, __doc__=_ClassRequest.__doc__, lines=lines, **more)
    text = Annotated[str, Field(max_length=settings.line_characters)]
    phrases = Annotated[list[Annotated[text, AfterValidator(_check_tabs)]], Field(max_length=settings.line_phrases)]
    return create_model(
        "Request",
        __base__=_Request,
        __doc__=_Request.__doc__,
        lines=_lines(settings),
        num_best=(
            int,
            Field(1, ge=1, le=served.beam_size, description="translations a line, best first; samples by their numbers"),
        ),
        attention=(bool, Field(False, description="whether the answer has attention weights")),
        prefix=_constraint(text, "beginnings of the translations"),
        must_appear=_constraint(phrases, "phrases that each translation must contain"),
        must_not_appear=_constraint(phrases, "strings that each translation must not contain; a blank in front begins a word"),
    )


def _lines(settings: ServeSettings, *, pairs: bool = False) -> tuple[Any, Any]:
    """Return the type of the lines of a request, with their limits, and its field. With `pairs`, a line is a pair of texts."""

    def check_words(line: str) -> str:
        if (words := len(line.split())) > settings.line_words:
            raise ValueError(f"must have at most {settings.line_words:,} words, but has {words:,}")
        return line

    line = Annotated[str, Field(max_length=settings.line_characters), AfterValidator(check_words)]
    most: dict[str, Any] = {"min_length": 1, "max_length": settings.request_lines}
    if pairs:
        text = Annotated[line, AfterValidator(_check_tabs)]
        return list[tuple[text, text]], Field(**most, description="pairs of texts")
    return list[line], Field(**most, description="sentences, one a line")


def _constraint(of_line: Any, description: str) -> tuple[Any, Any]:
    """Return the type of a constraint and its field. It has one value for each line of the request."""
    values = Annotated[list[of_line] | None, AfterValidator(_one_a_line)]
    return values, Field(None, description=f"{description}, one entry for each line")


class ReplicaLost(Exception):
    """The replica that was asked is gone."""


class NoAnswer(Exception):
    """Why a replica has no answer to a question."""


class Serving(Protocol):
    """Replicas of one model."""

    served: Served

    async def ask(self, question: Question, *, alone: bool = False) -> bytes:
        """Return the answer as JSON, `alone` without other questions beside it. Raises ReplicaLost or NoAnswer."""
        ...

    def running(self) -> int:
        """Return the number of replicas that run now."""
        ...
