"""The vocabulary of another data set: byte for byte, or with the new pieces, labels and tags of a training split."""

import heapq
import logging
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from treeproc.common.files import read_text
from treeproc.common.settings import UserError
from treeproc.common.storage import AnyPath
from treeproc.shards.piece_files import read_pieces
from treeproc.shards.schema import lower_case
from treeproc.shards.shard import read_names
from treeproc.shards.store import (
    OPTIONAL_VOCABULARY_FILES,
    PIECES_FILES,
    TOKENIZER_FILE,
    VOCABULARY_FILES,
    fingerprint_of,
    read_index,
)
from treeproc.stages.config import read_vocabulary_file
from treeproc.stages.run_jobs import previous_index
from treeproc.stages.vocabulary import TrainSplit, count_vocabulary, fingerprint_of_inputs, is_done, names_by_file, write_files
from treeproc.subwords import BOUNDARY, LabelVocab, SubwordConfig

logger = logging.getLogger(__name__)


def copy_vocabulary(data: AnyPath, other: AnyPath) -> str:
    """Copy the vocabulary of the data set `other`, byte for byte, to `encoded/vocab` of `data`; returns its fingerprint.

    Raises UserError when a file of it is missing or damaged, and when `data` was encoded with another one.
    """
    folder = data / "encoded"
    contents, inputs_fingerprint = _read_vocabulary(other)
    _refuse_another(data, other, inputs_fingerprint)
    if not is_done(folder, inputs_fingerprint):
        write_files(folder, contents, inputs_fingerprint)
    return inputs_fingerprint


def grow_vocabulary(data: AnyPath, other: AnyPath, new_pieces: int, split: TrainSplit) -> str:
    """Extend the vocabulary of the data set `other` by what the training split adds; returns its fingerprint.

    It gains at most `new_pieces` pieces, after the others. Labels, tags and relations of both are sorted together. Raises
    UserError when a file of `other` is missing or damaged.
    """
    folder = data / "encoded"
    contents, theirs = _read_vocabulary(other)
    inputs_fingerprint = fingerprint_of(theirs, new_pieces, fingerprint_of_inputs(split))
    if split.line_tags:
        inputs_fingerprint = fingerprint_of(inputs_fingerprint, split.line_tags)
    _refuse_another(data, other, inputs_fingerprint)
    if is_done(folder, inputs_fingerprint):
        return inputs_fingerprint
    read_pieces(other / "encoded" / "vocab" / "pieces.model")  # it may not be a model, even with the right hash
    counts = count_vocabulary(split)
    model = "vocab/pieces.model"
    contents[model], added = add_pieces(contents[model], counts.words["source"], new_pieces, split.config, split.line_tags)
    if added < new_pieces:
        logger.info("the training split has %s new pieces that occur twice, fewer than new_pieces = %s", added, new_pieces)
    for name, found in names_by_file(counts, split.tree).items():
        before = read_names(other / "encoded" / name) if name in contents else []
        if names := {*before, *found}:
            contents[name] = LabelVocab(names).file_bytes()
    write_files(folder, contents, inputs_fingerprint)
    return inputs_fingerprint


def _refuse_another(data: AnyPath, other: AnyPath, inputs_fingerprint: str) -> None:
    """Raise UserError if `data` is finished, with a vocabulary that does not come from these inputs."""
    own = previous_index(data / "encoded", "vocab_fingerprint")
    if own is not None and own["vocab_fingerprint"] != _fingerprint(own["files"], inputs_fingerprint):
        raise UserError(f"{data} has another vocabulary than {other}; choose another --out")


def _fingerprint(files: Mapping[str, str], inputs_fingerprint: str) -> str:
    """Return the fingerprint of a vocabulary, from the hashes of its files by name."""
    return fingerprint_of(inputs_fingerprint, *(files[name] for name in PIECES_FILES if name in files))


def _read_vocabulary(other: AnyPath) -> tuple[dict[str, bytes], str]:
    """Read the files of a vocabulary by name, and the fingerprint of its inputs. Raises UserError for a file that is damaged."""
    source = other / "encoded"
    index, contents = read_index(source), {}
    for name in (*VOCABULARY_FILES, *OPTIONAL_VOCABULARY_FILES, TOKENIZER_FILE):
        if sha256 := index["files"].get(name):
            contents[name] = read_vocabulary_file(source, name, sha256)
    note = source / "vocab" / "fingerprint.txt"
    inputs_fingerprint = read_text(note, "run its tree-attention preprocess again").partition("\n")[0] if note.exists() else ""
    if _fingerprint(index["files"], inputs_fingerprint) != index["vocab_fingerprint"]:
        raise UserError(f"vocab_from: {note} is missing or damaged; run its tree-attention preprocess again")
    return contents, inputs_fingerprint


_BLANK = "\u2581"  # in a piece, it stands for the blank before a word
_MOST_CHARACTERS = 16  # of a piece, as sentencepiece has it
_LEAST_COUNT = 2  # a piece that occurs once teaches a model nothing
_APART = ""  # stands for bytes, and joins nothing

Pair = tuple[str, str]


def add_pieces(
    model: bytes, words: Mapping[str, int], most: int, config: SubwordConfig, tags: Sequence[str] = ()
) -> tuple[bytes, int]:
    """Return a sentencepiece model with up to `most` new pieces after its own, and their number.

    `words` are blank-separated words with counts, as `train_pieces` takes them. Each of the `tags` that the model lacks becomes
    one more piece.
    """
    proto, kinds = sentencepiece_model_pb2.ModelProto.FromString(model), sentencepiece_model_pb2.ModelProto.SentencePiece
    symbols = {tag: f"{_BLANK}{lower_case(tag) if config.lowercase else tag}" for tag in tags}
    words = {word: count for word, count in words.items() if word not in symbols}
    lowest = min(piece.score for piece in proto.pieces)
    for symbol in sorted({*symbols.values()} - {piece.piece for piece in proto.pieces}):
        proto.pieces.add(piece=symbol, score=0.0, type=kinds.USER_DEFINED)
    sequences, characters = _split_words(model, words)
    chosen = _choose_characters(characters, sum(words[word] * len(word) for word in words), config)[:most]
    known = {piece.piece for piece in proto.pieces} | set(chosen)
    kept = Counter[tuple[str, ...]]()
    for sequence, count in sequences.items():
        kept[tuple(symbol if symbol in known else _APART for symbol in sequence)] += count
    new = [*chosen, *learn_pieces(kept, known, most - len(chosen), _may_join if config.vocab_size else lambda left, right: True)]
    for number, name in enumerate(new, start=1):
        proto.pieces.add(piece=name, score=lowest - number, type=kinds.NORMAL)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return proto.SerializeToString(), len(new)


def _split_words(model: bytes, words: Mapping[str, int]) -> tuple[Counter[tuple[str, ...]], Counter[str]]:
    """Return the words as sequences of old pieces, and of characters where these are bytes; and the counts of the latter."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    proto.normalizer_spec.add_dummy_prefix = False
    encoder = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    sequences, characters = Counter[tuple[str, ...]](), Counter[str]()
    for word, count in words.items():
        first, *others = word.split(BOUNDARY)
        for part in (f" {first}", *others):
            sequence, found = [], b""
            for piece in [*encoder.encode(part), -1]:
                if piece >= 0 and encoder.is_byte(piece):
                    found += bytes([int(encoder.id_to_piece(piece)[1:-1], 16)])
                    continue
                in_bytes = found.decode(errors="replace")
                for character in in_bytes:
                    characters[character] += count
                sequence += [*in_bytes, *([encoder.id_to_piece(piece)] if piece >= 0 else [])]
                found = b""
            sequences[tuple(sequence)] += count
    return sequences, characters


def _choose_characters(characters: Mapping[str, int], total: int, config: SubwordConfig) -> list[str]:
    """Return the new characters that become pieces, the most frequent first, until the text is covered as far as is asked."""
    missing, allowed = sum(characters.values()), (1 - config.character_coverage) * total
    chosen = []
    for character, count in sorted(characters.items(), key=lambda item: (-item[1], item[0])):
        if missing <= allowed:
            break
        missing -= count
        if character != "\ufffd" and not character.isspace():
            chosen.append(character)
    return chosen


def learn_pieces(
    sequences: Mapping[tuple[str, ...], int], known: Iterable[str], most: int, may_join: Callable[[str, str], bool]
) -> list[str]:
    """Return up to `most` new pieces of byte-pair encoding, in the order of their merges.

    `sequences` are words as symbols, with counts. The next piece joins the most frequent pair of neighbours for which `may_join`
    holds; it is the first of equal ones in the order of code points. A pair that makes a known piece joins at once, because
    sentencepiece joins it too.
    """
    learner = _Learner(sequences, set(known), may_join)
    new: list[str] = []
    while len(new) < most and (pair := learner.best()):
        joined = "".join(pair)
        if joined not in learner.known:
            new.append(joined)
            learner.add(joined)
        learner.join(pair)
    return new


class _Learner:
    """Words as symbols, and the counts of neighbours, which change with every join."""

    def __init__(self, sequences: Mapping[tuple[str, ...], int], known: set[str], may_join: Callable[[str, str], bool]):
        self.known, self._may_join = known, may_join
        self._words = [(list(symbols), count) for symbols, count in sequences.items()]
        self._counts: Counter[Pair] = Counter()
        self._places: defaultdict[Pair, set[int]] = defaultdict(set)
        self._by_name: defaultdict[str, set[Pair]] = defaultdict(set)
        self._heap: list[tuple[bool, int, str, Pair]] = []
        changed: set[Pair] = set()
        for number in range(len(self._words)):
            changed |= self._count(number, 1)
        self._push(changed)

    def best(self) -> Pair | None:
        """Return the pair to join next; None if there is none that occurs often enough."""
        while self._heap:
            is_new, count, joined, pair = heapq.heappop(self._heap)
            if self._counts[pair] == -count and is_new == (joined not in self.known):  # else it changed since
                return pair
        return None

    def add(self, name: str) -> None:
        """Take up a new piece. Other pairs that make it join at once."""
        self.known.add(name)
        self._push(self._by_name[name])

    def join(self, pair: Pair) -> None:
        """Join all neighbours that are this pair, from left to right."""
        changed: set[Pair] = set()
        for number in self._places.pop(pair, set()):
            changed |= self._count(number, -1)
            symbols, count = self._words[number]
            self._words[number] = (_joined(symbols, pair), count)
            changed |= self._count(number, 1)
        self._push(changed)

    def _count(self, number: int, sign: int) -> set[Pair]:
        symbols, count = self._words[number]
        pairs = {pair for pair in pairwise(symbols) if all(pair) and self._may_join(*pair)}
        for pair in pairwise(symbols):
            if pair in pairs:
                self._counts[pair] += sign * count
        for pair in pairs:
            if sign > 0:
                self._places[pair].add(number)
                self._by_name["".join(pair)].add(pair)
        return pairs

    def _push(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            joined, count = "".join(pair), self._counts[pair]
            is_new = joined not in self.known
            if count >= (_LEAST_COUNT if is_new else 1):
                heapq.heappush(self._heap, (is_new, -count, joined, pair))


def _joined(symbols: list[str], pair: Pair) -> list[str]:
    joined: list[str] = []
    for symbol in symbols:
        if joined and (joined[-1], symbol) == pair:
            joined[-1] += symbol
        else:
            joined.append(symbol)
    return joined


def _may_join(left: str, right: str) -> bool:
    """Return whether a piece may hold both: letters, digits and other characters stay apart, as sentencepiece has it."""
    kinds = {_kind(character) for character in (left + right).removeprefix(_BLANK)}
    return len(left + right) <= _MOST_CHARACTERS and len(kinds) <= 1


def _kind(character: str) -> str:
    category = unicodedata.category(character)[0]
    return "M" if category == "L" else category if category in "MN" else "other"  # a mark belongs to its letter
