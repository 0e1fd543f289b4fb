"""Stanford CoreNLP through Stanza's client: a running server, or one of $CORENLP_HOME that is started here."""

import bisect
import os
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from treeproc.common.errors import one_line, require
from treeproc.common.settings import UserError
from treeproc.parsers.config import CORENLP_LANGUAGES, PARSED, ParserConfig, public_endpoint
from treeproc.parsers.lines import Line, LineParser, Sentence, Token, batches
from treeproc.shards.rows import edges_of
from treeproc.shards.schema import UNANALYSED
from treeproc.trees.spans import read_brackets

_SEPARATORS = re.compile(r"[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]")
_CHARS_PER_REQUEST = 20_000
_TIMEOUT_MS = 600_000


def describe_server(config: ParserConfig) -> str:
    """Return the description of CoreNLP in fingerprints: the release from $CORENLP_HOME. A running server does not tell it.

    Raises UserError if there is neither, and for a language without a constituency parser in CoreNLP.
    """
    if config.language not in CORENLP_LANGUAGES:
        raise UserError(
            f"parser.language: CoreNLP has no constituency parser for {config.language!r}, only for "
            f"{' '.join(sorted(CORENLP_LANGUAGES))}; choose another parser"
        )
    if _is_alive(config.endpoint):
        return "CoreNLP server"
    home = os.environ.get("CORENLP_HOME")
    jars = sorted(Path(home).glob("stanford-corenlp-*.jar")) if home else []
    releases = [jar.stem for jar in jars if jar.stem.removeprefix("stanford-corenlp-").replace(".", "").isdigit()]
    if not releases:
        raise UserError(
            f"parser.name: is corenlp, but no server answers at {public_endpoint(config.endpoint)} and $CORENLP_HOME holds no "
            "CoreNLP; set CORENLP_HOME to the folder of CoreNLP, or choose another parser"
        )
    return releases[-1]


def _is_alive(endpoint: str) -> bool:
    import requests  # Stanza's client uses this session: user and password of the address, ~/.netrc, proxies

    try:
        return requests.get(f"{endpoint}/ping", timeout=5).ok
    except (requests.RequestException, OSError, ValueError):
        return False


class CoreNLPParser(LineParser):
    """Tokens, tags, trees and arcs of CoreNLP."""

    @staticmethod
    def describe(config: ParserConfig) -> dict:
        """Return what fingerprints have of this parser. Raises UserError if it cannot run here."""
        require(("stanza", "requests"), "parser.name=corenlp")
        return {"library": describe_server(config)}

    def __init__(self, config: ParserConfig):
        super().__init__(config)
        from stanza.server import CoreNLPClient, StartServer

        describe_server(config)
        running = _is_alive(config.endpoint)
        self._client = CoreNLPClient(
            start_server=StartServer.DONT_START if running else StartServer.FORCE_START,
            endpoint=config.endpoint if running else f"http://localhost:{_free_port()}",
            timeout=_TIMEOUT_MS,
            threads=1,
            be_quiet=True,
        )
        if not running:
            self._client.start()
        self._properties = {
            "annotators": "tokenize,ssplit,pos,parse" + (",depparse" if config.dependencies else ""),
            "pipelineLanguage": CORENLP_LANGUAGES[config.language],
            "parse.maxlen": str(config.max_words),
            "outputFormat": "json",
            **({"ssplit.newlineIsSentenceBreak": "always"} if config.split_sentences else {"ssplit.eolonly": "true"}),
        }

    def _sentences(self, lines: Sequence[Line]) -> list[list[Sentence]]:
        out: list[list[Sentence]] = [[] for _ in lines]
        for tokenised in (False, True):
            chosen = [i for i, line in enumerate(lines) if (line.words is not None) == tokenised]
            given = [self._given_tokens(lines[i].words or ()) for i in chosen]
            texts = [_blank_separated(t) if tokenised else lines[i].text for i, t in zip(chosen, given, strict=True)]
            for batch in batches([len(text) for text in texts], _CHARS_PER_REQUEST):
                groups = self._request([texts[k] for k in batch], tokenised)
                for k, group in zip(batch, groups, strict=True):
                    out[chosen[k]] = _put_in_place(group, given[k]) if tokenised else group
        return out

    def _request(self, texts: Sequence[str], tokenised: bool) -> list[list[Sentence]]:
        properties = self._properties
        if tokenised:
            properties = properties | {"tokenize.whitespace": "true", "tokenize.keepeol": "true"}
        # Every separator that CoreNLP may take for a line end becomes a blank.
        text = "\n".join(_SEPARATORS.sub(" ", part) for part in texts)
        try:
            answer = self._client.annotate(text, properties=properties)
        except Exception as error:  # Stanza's client tells a server that is gone and a text that failed by the same error
            if _is_alive(self._client.endpoint):
                raise
            raise UserError(
                f"the CoreNLP server at {public_endpoint(self._client.endpoint)} does not answer any more "
                f"({one_line(str(error), 200)}); start the server again, then run the same command again"
            ) from None
        offsets = edges_of([len(part) + 1 for part in texts]).tolist()
        points = _code_points(text)
        out: list[list[Sentence]] = [[] for _ in texts]
        for sentence in answer["sentences"]:
            line = bisect.bisect_right(offsets, points(sentence["tokens"][0]["characterOffsetBegin"])) - 1
            out[line].append(self._sentence(sentence, lambda at, base=offsets[line]: points(at) - base))
        return out

    def _sentence(self, answer: dict, place: Callable[..., int]) -> Sentence:
        tokens: list[Token] = []
        for token in answer["tokens"]:
            start, end = place(token["characterOffsetBegin"]), place(token["characterOffsetEnd"])
            # The words of a multi-word token have its offsets.
            before = tokens.pop().words if tokens and (tokens[-1].start, tokens[-1].end) == (start, end) else ()
            tokens.append(Token(start, end, (*before, token["word"])))
        if len(answer["tokens"]) > self._config.max_words:
            return Sentence(tokens, status="flat_too_long")
        tree = read_brackets(answer["parse"])[2]
        if tree.labels[0] == UNANALYSED:  # the root that CoreNLP gives to sentences that it cannot parse
            return Sentence(tokens, status="flat_parser_failed")
        arcs = None
        if self._config.dependencies:
            by_word = {arc["dependent"]: (arc["governor"] - 1, arc["dep"]) for arc in answer["basicDependencies"]}
            arcs = [by_word[i] for i in range(1, len(answer["tokens"]) + 1)]
        tags = [("", token["pos"]) for token in answer["tokens"]]
        return Sentence(tokens, tags, arcs, tree, PARSED)


def _blank_separated(tokens: Sequence[Token]) -> str:
    return " ".join("_".join(text.split()) or "_" for token in tokens for text in token.words)


def _put_in_place(group: list[Sentence], tokens: list[Token]) -> list[Sentence]:
    """Return the given tokens instead of the blank-separated words."""
    rest = iter(tokens)
    for sentence in group:
        wanted, sentence.tokens = len(sentence.tokens), []
        while len(sentence.words) < wanted and (token := next(rest, None)):
            sentence.tokens.append(token)
        if len(sentence.words) != wanted:
            raise RuntimeError("CoreNLP returned other words than the given ones")
    if next(rest, None) is not None:
        raise RuntimeError("CoreNLP returned other words than the given ones")
    return group


def _code_points(text: str) -> Callable[[int], int]:
    """Map CoreNLP's offsets in UTF-16 units to characters, which Python counts."""
    if text.isascii() or max(text) < "\U00010000":
        return lambda at: at
    units = edges_of([2 if character >= "\U00010000" else 1 for character in text]).tolist()
    return lambda at: bisect.bisect_left(units, at)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]
