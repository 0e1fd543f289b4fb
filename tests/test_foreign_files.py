"""Tokenizers, sentencepiece models and parser models of other people: no panic, no memory without a limit, one line."""

import base64
import errno
import io
import json
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
import sentencepiece
import torch
from sentencepiece import sentencepiece_model_pb2
from tiny_tokenizers import FAMILIES, QWEN, write_tokenizer

from treeproc.common import trial
from treeproc.common.settings import UserError
from treeproc.common.trial import try_first
from treeproc.parsers import ParserConfig, build_parser
from treeproc.parsers.model_files import SHIPPED_MODELS
from treeproc.pretrained_pieces import TokenizerPieces
from treeproc.shards import piece_files
from treeproc.shards.piece_files import read_pieces
from treeproc.subwords import SubwordConfig, train_pieces

pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: write_tokenizer(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def charsmap():
    """sentencepiece's own table of characters, which XLM-R, T5 and DeBERTa have."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a dog"] * 9), model_writer=model, vocab_size=9, hard_vocab_limit=False, minloglevel=2
    )
    return sentencepiece_model_pb2.ModelProto.FromString(model.getvalue()).normalizer_spec.precompiled_charsmap


def changed(folder: Path, to: Path, **parts: object) -> Path:
    """Write the tokenizer of a folder with other parts."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    model = spec["model"] | parts.pop("model", {})
    to.mkdir(exist_ok=True)
    (to / "tokenizer.json").write_text(json.dumps(spec | parts | {"model": model}))
    return to / "tokenizer.json"


def precompiled(content: bytes) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


def split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def steps(*parts: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": parts}


def doubles(times: int) -> dict:
    return {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * times}


TWICE = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2, "pair": [], "special_tokens": {}}
LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REFUSED = {
    "an expression without end": ({"pre_tokenizer": split("(a+)+$")}, "pre_tokenizer: .* is not a regular expression of a known"),
    "an expression beside a known one": ({"pre_tokenizer": split(QWEN + "|(a+)+$")}, "is not a regular expression"),
    "a known expression, repeated": ({"pre_tokenizer": split(r"(\s+)+")}, "is not a regular expression"),
    "no pattern": ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "a"}}, "the pattern is empty"),
    "2^40 characters": ({"normalizer": doubles(40)}, "normalizer.6 makes a text more than 64 times as long"),
    "bytes of bytes": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [LEVEL] * 20}},
        "pre_tokenizer.2 makes a text more than 64 times as long",
    ),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "x" * 10_000}}, "normalizer.prepend must have at most 16"),
    "a component of no family": ({"pre_tokenizer": {"type": "FixedLength", "length": 1}}, "FixedLength is not a component"),
    "many components": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 33}}, "at most 32 components"),
    "the text twice": ({"post_processor": TWICE}, "post_processor must have the text once"),
    "a table of characters": ({"normalizer": precompiled(b"\1\2")}, "precompiled_charsmap"),
    "pieces at random": ({"model": {"dropout": 0.5}}, "model.dropout must be null"),
    "a mark": ({"model": {"end_of_word_suffix": "x" * 99}}, "end_of_word_suffix must have at most 16"),
    "a number far above": ({"model": {"vocab": {"<unk>": 0, "a": 2**31}, "merges": []}}, "a piece has a number far above"),
    "a number twice": ({"model": {"vocab": {"<unk>": 0, "a": 3, "b": 3}, "merges": []}}, "two pieces have the same number"),
    "no bytes": ({"pre_tokenizer": None}, "it has no unknown piece, which a tokenizer of type BPE needs"),
    "a missing byte": (
        {"model": {"vocab": {"a": 0}, "merges": []}},
        "it has no unknown piece, which a tokenizer of type BPE needs",
    ),
    "no components": ({"normalizer": 3}, ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_of_no_known_family_is_one_line(folders, tmp_path, capfd, name):
    parts, reason = REFUSED[name]
    path = changed(folders["bytes"], tmp_path, **parts)
    with pytest.raises(UserError, match=rf"tokenizer.json is not a fast tokenizer of a known family: .*{reason}") as caught:
        TokenizerPieces(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 490
    assert capfd.readouterr() == ("", "")  # a panic prints its stack, but to a process that nobody hears


@pytest.mark.parametrize(
    "pattern",
    [
        QWEN,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        " ?[^(\\s|[.,!?…。，、।۔،])]+",
        "[\r\n]",
    ],
)
def test_expressions_of_known_families_are_read(folders, tmp_path, pattern):
    path = changed(folders["bytes"], tmp_path, pre_tokenizer=steps(split(pattern), LEVEL))
    assert TokenizerPieces(path).encode_lines(pa.array(["We know"]))[1].tolist() > [0]


def test_tables_of_characters_are_whole_or_refused(folders, tmp_path, charsmap, capfd):
    """A damaged tokenizer that is still read does not panic."""
    random, read = Random(3), 0
    assert TokenizerPieces(changed(folders["unigram"], tmp_path, normalizer=precompiled(charsmap)))
    lines = pa.array(["".join(map(chr, range(start, start + 0x300))) for start in range(0x20, 0xD000, 0x300)])
    for number in range(20):
        content = bytearray(charsmap)
        for _ in range(random.choice([1, 3])):
            place = random.randrange(4, len(content)) if number % 2 else random.randrange(len(content) - 60_000, len(content))
            content[place] = random.randrange(256)
        try:
            pieces = TokenizerPieces(changed(folders["unigram"], tmp_path, normalizer=precompiled(bytes(content))))
        except UserError as error:
            assert "precompiled_charsmap" in str(error)
            continue
        read += 1
        pieces.encode_lines(lines)
    assert 0 < read < 20 and capfd.readouterr() == ("", "")


def test_a_panic_at_use_is_one_line(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(piece_files, "try_first", lambda *_: None)
    pieces = TokenizerPieces(changed(folders["bytes"], tmp_path, pre_tokenizer=split("(a+)+$")))
    with pytest.raises(UserError, match="tokenizer.json cannot cut a text, or join its pieces: ") as caught:
        pieces.encode_lines(pa.array(["a" * 40 + "!"]))
    assert "\n" not in str(caught.value)


def test_a_file_is_tried_once(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path))
    path = changed(folders["bytes"], tmp_path / "a", version="1.0")
    TokenizerPieces(path)
    monkeypatch.setattr(trial, "_run", lambda *_: pytest.fail("it is tried again"))
    TokenizerPieces(path)
    TokenizerPieces(changed(path.parent, tmp_path / "b"))  # the same content elsewhere
    with pytest.raises(pytest.fail.Exception):
        TokenizerPieces(changed(path.parent, tmp_path / "b", normalizer=None, decoder=None))


def test_a_full_disk_of_the_cache_refuses_no_file(folders, tmp_path, monkeypatch):
    def refuse(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert len(TokenizerPieces(folders["llama"] / "tokenizer.json")) > 50


def test_without_a_cache_a_file_is_tried_each_time(folders, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TREE_ATTENTION_CACHE", str(tmp_path / "file"))
    assert len(TokenizerPieces(folders["llama"] / "tokenizer.json")) > 50
    with pytest.raises(UserError, match="is not a regular expression"):
        TokenizerPieces(changed(folders["bytes"], tmp_path, pre_tokenizer=split("(a+)+$")))


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ("allocates", r"it takes more than 0\.5 GiB of memory"),
        ("hangs", "it takes more than 1 seconds of one core"),
        ("dies", r"it is damaged, or takes more than 0\.5 GiB of memory \(its trial ended with SIGABRT\)"),
    ],
)
def test_a_trial_has_limits(own_trials, monkeypatch, check, reason):
    monkeypatch.setattr(trial, "CPU_SECONDS", 1)
    with pytest.raises(UserError, match=f"^no file: {reason}"):
        try_first(f"trial_checks:{check}", b"", 1 << 29, "no file")


def test_models_of_a_parser_that_fill_the_memory_are_one_line(tmp_path):
    """A tensor of a file of few bytes may have any size: its elements share one place."""
    for path in (SHIPPED_MODELS / "en").glob("*.pt"):
        (tmp_path / path.name).symlink_to(path)
    content = torch.load(tmp_path / "pos.pt", weights_only=True)
    name = next(name for name, value in content["model"].items() if value.is_floating_point())
    content["model"][name] = torch.zeros(1, dtype=torch.float16).expand(5 << 30)
    (tmp_path / "pos.pt").unlink()
    torch.save(content, tmp_path / "pos.pt")
    with pytest.raises(UserError, match=r"cannot load the models of the parser.* takes more than 4\.\d GiB") as caught:
        build_parser(ParserConfig(models=tmp_path))
    assert "\n" not in str(caught.value)


def test_shipped_models_and_own_pieces_are_not_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "_run", lambda *_: pytest.fail("it is tried"))
    build_parser(ParserConfig())
    (tmp_path / "pieces.model").write_bytes(train_pieces({"dog": 3}, SubwordConfig(vocab_size=264, lowercase=True)))
    read_pieces(tmp_path / "pieces.model")


@pytest.mark.parametrize("fault", ["a table of characters", "a long piece", "a long unknown piece", "no text"])
def test_a_sentencepiece_model_whose_pieces_cannot_be_text_is_refused(tmp_path, fault):
    model = sentencepiece_model_pb2.ModelProto.FromString(train_pieces({"dog": 3}, SubwordConfig(vocab_size=264)))
    if fault == "a table of characters":
        (tmp_path / "rules.tsv").write_text(f"61\t{' '.join(['61'] * 1000)}\n")
        other = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["b dog"] * 9), model_writer=other, vocab_size=9, hard_vocab_limit=False, minloglevel=2,
            normalization_rule_tsv=str(tmp_path / "rules.tsv"),
        )  # fmt: skip
        own = sentencepiece_model_pb2.ModelProto.FromString(other.getvalue())
        model.normalizer_spec.precompiled_charsmap = own.normalizer_spec.precompiled_charsmap
    elif fault == "a long piece":
        model.pieces[-1].piece = "x" * 5000
    elif fault == "a long unknown piece":
        model.trainer_spec.unk_surface = "x" * 5000
    else:
        model.pieces[-1].piece = "dog"
    content = model.SerializeToString()
    if fault == "no text":
        content = content.replace(b"dog", b"d\xffg")
    (tmp_path / "pieces.model").write_bytes(content)
    with pytest.raises(UserError, match=r"pieces.model is not a sentencepiece model"):
        read_pieces(tmp_path / "pieces.model")
