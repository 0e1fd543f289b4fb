"""Pieces of pretrained tokenizers: they are the tokenizer's own where no piece crosses a border of the parser's words."""

import hashlib
import json
import shutil
from collections import Counter
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from pretrained_data import settings, write_data
from tiny_tokenizers import FAMILIES, WITHOUT_UNKNOWN, reference_words, write_tokenizer

from treenet.runs.parameter_matching import Vocabularies
from treeproc.common.settings import UserError
from treeproc.inspect import describe, draw_line
from treeproc.online.line_encoder import LineEncoder
from treeproc.parsers import Given
from treeproc.pretrained_pieces import TokenizerPieces, _without_first_blank
from treeproc.shards.rows import WordEnds
from treeproc.shards.schema import FIRST_PIECE, UNK_ID
from treeproc.shards.shard import SplitShards
from treeproc.shards.store import read_index
from treeproc.stages.job_report import summary
from treeproc.stages.preprocess import PreprocessConfig, preprocess
from treeproc.subwords import SubwordConfig, load_pieces
from treeproc.verify import verify

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_tokenizer(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def plain(folder):
    """The tokenizer of a folder as a user has it, but for its cut to a few pieces; those for words after a blank, and inside."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    others = [_without_first_blank(json.loads(tokenizer.to_str()), touches=touches) for touches in (False, True)]
    after_blank, inside = (tokenizers.Tokenizer.from_str(json.dumps(spec)) for spec in others)
    after_blank.encode_special_tokens = inside.encode_special_tokens = True
    return tokenizer, after_blank, inside


def encode(
    pieces: TokenizerPieces, lines: list[str], ends: list[list[int]], counts: Counter | None = None
) -> list[list[list[int]]]:
    """Pieces of every word of every line."""
    words = WordEnds(np.concatenate([[0], np.cumsum([len(row) for row in ends])]).astype(int), np.array(joined(ends), dtype=int))
    flat, per_word = pieces.encode_words(pa.array(lines, pa.string()), words, counts)
    of_words = [part.tolist() for part in np.split(flat, np.cumsum(per_word)[:-1])] if len(per_word) else []
    return [of_words[a:b] for a, b in zip(words.edges, words.edges[1:], strict=False)]


def joined(lists: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def ours(pieces: TokenizerPieces, numbers: list[int]) -> list[int]:
    return [UNK_ID if number == pieces.facts()["unknown"] else FIRST_PIECE + number for number in numbers]


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_the_tokenizers_where_none_crosses_a_border(folders, family):
    """The file cuts texts to six pieces and fills them up to six: here neither happens."""
    pieces, (tokenizer, *_) = TokenizerPieces(folders[family] / "tokenizer.json"), plain(folders[family])
    lines = ["We know him, they know us!", "He knows  her", "a [b] c", "x"]
    ends = [[i for i in range(1, len(line) + 1) if i == len(line) or line[i] == " " != line[i - 1]] for line in lines]
    counts = Counter()
    found = encode(pieces, lines, ends, counts)
    assert counts["crossing_pieces"] == counts["lines_with_crossing"] == counts["words_without_piece"] == 0
    for line, words in zip(lines, found, strict=True):
        own = tokenizer.encode(line, add_special_tokens=False).ids
        assert joined(words) == ours(pieces, own), line
        assert pieces.encode_lines(pa.array([line]))[0].tolist() == ours(pieces, own)
    assert counts["tokenizer_pieces"] == sum(len(word) for words in found for word in words)
    assert len(joined(found[0])) > 6


@pytest.mark.parametrize("kind", ["WordPiece", "BPE", "Unigram", "WordLevel"])
def test_names_of_special_pieces_in_a_text_are_text(tmp_path, kind):
    """Each model could find them among its pieces. They are cut as by a tokenizer that has no such pieces."""
    letters, special = sorted("<>/[]adkmnpsu"), ["<pad>", "</s>", "<mask>", "[unk]"]
    merges = [("<", "/"), ("s", ">"), ("</", "s>"), ("</s>", "a")]

    def tokenizer(names: list[str], unknown: str) -> tokenizers.Tokenizer:
        names = [*names, *(["##" + letter for letter in letters] if kind == "WordPiece" else ["</", "s>", "dad"])]
        numbers = {
            name: number for number, name in enumerate([*names, unknown, *["</s>a"] * (kind == "BPE" and "</s>" in names)])
        }
        own = [pair for pair in merges if {*pair, "".join(pair)} <= numbers.keys()]
        models = tokenizers.models
        model = {
            "WordPiece": lambda: models.WordPiece(numbers, unk_token=unknown),
            "BPE": lambda: models.BPE(numbers, own, unk_token=unknown, ignore_merges=True),
            "Unigram": lambda: models.Unigram([(name, 0.0 if name in special else -2.0) for name in numbers], numbers[unknown]),
            "WordLevel": lambda: models.WordLevel(numbers, unk_token=unknown),
        }[kind]()
        made = tokenizers.Tokenizer(model)
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special if name in numbers])
        return made

    tokenizer([*special[:3], *letters], "[unk]").save(str(tmp_path / "tokenizer.json"))
    pieces, without = TokenizerPieces(tmp_path / "tokenizer.json"), tokenizer(letters, "?")
    for line in ("a </s> dad", "<pad>", "k<mask>m", "m [unk]", "</s></s>a", "dad"):
        wanted = ["<unk>" if name == "?" else name for name in without.encode(line).tokens]
        assert pieces.names(pieces.encode_lines(pa.array([line]))[0]) == wanted, line
    assert pieces.names(range(FIRST_PIECE, FIRST_PIECE + 3)) == special[:3]
    assert special[1] in pieces.decode([[FIRST_PIECE + 1]])[0]


def test_a_piece_that_crosses_a_border_is_cut_again_word_by_word(folders):
    pieces = TokenizerPieces(folders["wordpiece"] / "tokenizer.json")
    counts = Counter()
    (words, others) = encode(pieces, ["I don't know.", "We know"], [[1, 4, 7, 12, 13], [2, 7]], counts)
    do, nt = words[1:3]
    assert pieces.names(do) == pieces.names(joined(encode(pieces, ["do"], [[2]])[0]))
    assert pieces.names(nt) == pieces.names(joined(encode(pieces, ["n't"], [[3]])[0]))
    assert "don" in pieces.names(pieces.encode_lines(pa.array(["I don't know."]))[0])
    assert (counts["crossing_pieces"], counts["lines_with_crossing"]) == (1, 1)
    assert all(others)


@num_examples(150)
@given(st.data())
def test_a_word_that_is_cut_by_itself_has_the_pieces_of_the_whole_line(folders, data):
    """For every family, wherever the tokenizer ends its pieces at the borders of the words."""
    family = data.draw(st.sampled_from(FAMILIES))
    pieces, (tokenizer, *_) = TokenizerPieces(folders[family] / "tokenizer.json"), plain(folders[family])
    words = data.draw(st.lists(st.sampled_from(["know", "do", "don't", "x", "-", "we", "him!", "(yet)"]), min_size=1, max_size=5))
    line = "".join(data.draw(st.sampled_from(["", " ", "  "])) + word for word in words)
    cuts = {*data.draw(st.sets(st.integers(1, len(line)), max_size=3)), *(i for i in range(1, len(line)) if line[i].isspace())}
    ends = sorted(cuts - {i + 1 for i in range(len(line)) if line[i].isspace()} | {len(line)})  # a blank belongs to the next word
    whole = tokenizer.encode(line, add_special_tokens=False)
    for place, (first, last) in enumerate(zip([0, *ends], ends, strict=False)):
        touches = place > 0 and not line[first].isspace()
        own = [n for n, (a, b) in zip(whole.ids, whole.offsets, strict=True) if first <= a and max(a + 1, b) <= last]
        if any(a < cut < b for a, b in whole.offsets for cut in (first, last)) or (touches and family == "wordpiece"):
            continue  # a piece crosses a border, or the word begins with a continuation (##)
        assert pieces._word([line], WordEnds(np.array([0, len(ends)]), np.array(ends)), place) == ours(pieces, own), (line, place)


def test_a_word_after_a_blank_has_one_blank_when_it_is_cut_again(tmp_path):
    """Llama's tokenizer writes a blank before every text, also before one that has one."""
    pieces = TokenizerPieces(write_tokenizer(tmp_path, "llama", ["I can do it", "you don't"] * 20) / "tokenizer.json")
    counts = Counter()
    (words,) = encode(pieces, ["I can don't"], [[1, 5, 8, 11]], counts)
    assert counts["crossing_pieces"] == 1 and [pieces.names(word) for word in words[:3]] == [["▁I"], ["▁can"], ["▁do"]]


def test_a_word_without_a_piece_gets_the_unknown_one(folders):
    pieces = TokenizerPieces(folders["wordpiece"] / "tokenizer.json")
    counts = Counter()
    ((know, nothing, accent, emoji),) = encode(pieces, ["know \u200b \u0301 😀"], [[4, 6, 8, 10]], counts)
    assert nothing == accent == emoji == [UNK_ID] != know
    assert (counts["words_without_piece"], counts["unknown_pieces"]) == (2, 3)
    (words,) = encode(TokenizerPieces(folders["bytes"] / "tokenizer.json"), ["know \u200b \u0301 😀"], [[4, 6, 8, 10]], counts)
    assert UNK_ID not in joined(words)  # a tokenizer of bytes knows them all


@num_examples(150)
@given(st.data())
def test_pieces_are_those_of_the_slow_rule(folders, data):
    family = data.draw(st.sampled_from(FAMILIES))
    alphabet = st.one_of(st.sampled_from("knowdt'().,  é½ﬁ\u0301\u200b😀Ü"), st.characters(exclude_categories=["Cs"]))
    lines = data.draw(st.lists(st.text(alphabet, min_size=1, max_size=20), min_size=1, max_size=3))
    ends = []
    for line in lines:
        cuts = data.draw(st.sets(st.integers(1, len(line)), max_size=6))
        ends.append(sorted(cuts))
    pieces, own = TokenizerPieces(folders[family] / "tokenizer.json"), plain(folders[family])
    found = encode(pieces, lines, ends)
    for line, cuts, words in zip(lines, ends, found, strict=True):
        wanted = [ours(pieces, word) or [UNK_ID] for word in reference_words(*own, line, cuts)] if cuts else []
        assert words == wanted, (line, cuts)


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_name_the_pieces_around_a_text(folders, family):
    pieces, (tokenizer, *_) = TokenizerPieces(folders[family] / "tokenizer.json"), plain(folders[family])
    facts = pieces.facts()
    own = tokenizer.encode("know").ids
    assert own == [*facts["before"], *tokenizer.encode("know", add_special_tokens=False).ids, *facts["after"]]
    assert len(facts["before"]) == len(facts["after"]) == 1
    assert (facts["unknown"] is None) == (family in WITHOUT_UNKNOWN)
    assert len(pieces) == FIRST_PIECE + tokenizer.get_vocab_size() == FIRST_PIECE + facts["pieces"]


def test_decoded_pieces_are_text(folders):
    pieces = TokenizerPieces(folders["bytes"] / "tokenizer.json")
    line = "He knows  her 😀"
    assert pieces.decode([pieces.encode_lines(pa.array([line]))[0]]) == [line]
    assert pieces.names([0, 1]) == ["<pad>", "<unk>"]


def test_what_is_no_fast_tokenizer_is_refused_in_one_line(tmp_path, folders):
    with pytest.raises(UserError, match="is not a folder; give the folder of a pretrained encoder"):
        SubwordConfig(tokenizer=tmp_path / "none").facts()
    (tmp_path / "vocab.txt").write_text("[PAD]\n")
    with pytest.raises(UserError, match=r"has no tokenizer\.json.*AutoTokenizer.*writes it"):
        SubwordConfig(tokenizer=tmp_path).facts()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a fast tokenizer") as caught:
        load_pieces(tmp_path)
    assert "\n" not in str(caught.value)
    for model in (tokenizers.models.Unigram([("a", -1.0)], None), tokenizers.models.WordPiece({"a": 0}, unk_token="[UNK]")):
        tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(UserError, match=f"has no unknown piece, which a tokenizer of type {type(model).__name__} needs"):
            load_pieces(tmp_path)
    with pytest.raises(ValueError, match="vocab_size: is for pieces that the job learns, but tokenizer has its own"):
        SubwordConfig(tokenizer=folders["bytes"], vocab_size=100)
    assert SubwordConfig(tokenizer=folders["bytes"]).model_dump(mode="json") == {"tokenizer": str(folders["bytes"])}
    assert "tokenizer" not in SubwordConfig().model_dump()


def test_a_word_that_touches_another_gets_no_blank_in_front(folders):
    """XLM-R's tokenizer writes a blank before each text; `n't` of `don't` has none."""
    for family in ("unigram", "metaspace"):
        tokenizer, _, inside = plain(folders[family])
        assert tokenizer.encode("n't", add_special_tokens=False).tokens[0][0] == "▁"
        assert "▁" not in "".join(inside.encode("n't", add_special_tokens=False).tokens)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


def test_a_data_set_holds_its_tokenizer_and_counts_what_it_cut(data, caplog):
    index = read_index(data / "encoded")
    own = (data.parent / "encoder" / "tokenizer.json").read_bytes()
    assert (data / "encoded" / "vocab" / "tokenizer.json").read_bytes() == own
    assert not (data / "encoded" / "vocab" / "pieces.model").exists()
    assert index["files"]["vocab/tokenizer.json"] == index["subword_settings"]["tokenizer"] == hashlib.sha256(own).hexdigest()
    pieces = load_pieces(data / "encoded" / "vocab")
    assert index["num_pieces"] == len(pieces) and index["tokenizer"] == pieces.facts()
    train = index["totals"]["train"]
    assert train["unknown_pieces"] == 10 and train["words_without_piece"] == 0  # the emoji
    assert not verify(data).problems
    assert "source: we do n ' t know" in draw_line(data, "train", 1)
    assert "cross a border of words" in describe(data)[0]
    assert "tokenizer" in summary(index, data)


def test_the_leaves_of_a_row_are_the_pieces_of_its_words(data):
    shard, pieces = SplitShards(data / "encoded", "train")[0], load_pieces(data / "encoded" / "vocab")
    tokenizer, *_ = plain(data.parent / "encoder")
    line = "We do n't know"
    own = tokenizer.encode(line, add_special_tokens=False)
    row = shard.row(0)
    assert row["leaves"]["piece"].tolist() == ours(pieces, own.ids)
    assert row["leaves"]["word_index"].tolist() == [line[:start].count(" ") for start, _ in own.offsets]
    assert row["spans"]["end"][0] == len(own.ids)


def test_pieces_of_two_data_sets_are_matched_by_their_names(data):
    index = read_index(data / "encoded")
    pieces = load_pieces(data / "encoded" / "vocab")
    names = Vocabularies(data, index["vocab_fingerprint"], {"num_pieces": index["num_pieces"]}).names("num_pieces")
    assert names == pieces.names(range(len(pieces))) and names[FIRST_PIECE:][index["tokenizer"]["unknown"]] == "[UNK]"


def test_lines_are_encoded_online_as_in_the_shards(data):
    encoder = LineEncoder(data, given_trees=True)
    words = {"text": ["We", "do", "n't", "know"], "start_char": [0, 3, 6, 10], "end_char": [2, 5, 9, 14]}
    given_tree = Given(words, ["(X (X We) (X (X (X do) (X n't)) (X know)))"])
    (row,) = encoder.encode_parsed(["We do n't know"], encoder.parse(["We do n't know"], [given_tree]), [0])
    shard = SplitShards(data / "encoded", "train")[0].row(0)
    assert row["leaves"]["piece"].tolist() == shard["leaves"]["piece"].tolist()


def test_a_finished_data_set_keeps_its_tokenizer(data, tmp_path):
    """The folder of the encoder may move: its file decides. Another tokenizer needs another folder."""
    moved = shutil.copytree(data.parent / "encoder", tmp_path / "moved")
    index = (data / "encoded" / "index.json").read_bytes()
    again = PreprocessConfig.model_validate(settings(data.parent, moved))
    preprocess(again, data)
    assert (data / "encoded" / "index.json").read_bytes() == index
    other = write_tokenizer(tmp_path / "other", "bytes")
    with pytest.raises(UserError, match="has other pieces than .*other; choose another --out"):
        preprocess(PreprocessConfig.model_validate(settings(data.parent, other)), data)
    assert (data / "encoded" / "index.json").read_bytes() == index and not verify(data).problems


def test_a_test_set_takes_the_tokenizer_of_another_data_set(data, tmp_path):
    values = {"vocab_from": data, "splits": {"test": {"source": [data.parent / "train.txt"]}}, "workers": 0}
    preprocess(PreprocessConfig.model_validate(values), tmp_path / "test")
    theirs, own = (read_index(folder / "encoded") for folder in (data, tmp_path / "test"))
    assert own["vocab_fingerprint"] == theirs["vocab_fingerprint"] and own["tokenizer"] == theirs["tokenizer"]
    values |= {"new_pieces": 5, "splits": {"train": values["splits"]["test"]}}
    with pytest.raises(UserError, match="pieces of a pretrained tokenizer, which cannot grow; leave new_pieces out"):
        preprocess(PreprocessConfig.model_validate(values), tmp_path / "grown")


def test_examples_with_a_target_are_refused(tmp_path, folders):
    (tmp_path / "a").write_text("We know\n")
    (tmp_path / "trees").write_text("(S (X We) (X know))\n")
    values = settings(tmp_path, folders["wordpiece"], format="brackets")
    values["splits"] = {"train": {"source": [tmp_path / "trees"], "target": [tmp_path / "a"]}}
    with pytest.raises(UserError, match="subwords.tokenizer: .* have a target side; leave out the target files"):
        preprocess(PreprocessConfig.model_validate(values), tmp_path / "data")
