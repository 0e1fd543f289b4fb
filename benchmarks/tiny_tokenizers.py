"""Fast tokenizers of the families that pretrained encoders have, learned from a few lines."""

import json
from pathlib import Path

FAMILIES = ("wordpiece", "bytes", "unigram", "metaspace", "llama", "qwen", "t5")
WITHOUT_UNKNOWN = ("bytes", "qwen")
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
QWEN = _WORDS + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LINES = ["I don't know (yet).", "We cannot know him.", "He knows  her, doesn't he?", "They gotta know us!", "x-ray, it's"] * 5


def write_tokenizer(folder: Path, family: str, lines: list[str] = LINES) -> Path:
    """Write tokenizer.json: 'wordpiece' (BERT), 'bytes' (RoBERTa, ModernBERT), 'unigram' (XLM-R), 'metaspace' (DeBERTa 3), or the
    family's own name.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] if family in ("wordpiece", "metaspace") else [
        "<s>", "<pad>", "</s>", "<unk>", "<mask>"
    ]  # fmt: skip
    special = [AddedToken(name, special=True) for name in names]
    if family == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    elif family == "llama":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # to learn: no merge crosses a blank
        trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    elif family in ("bytes", "qwen"):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if family == "qwen":
            split = pre_tokenizers.Split(Regex(QWEN), behavior="isolated")
            tokenizer.normalizer = normalizers.NFC()
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
            )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        space = pre_tokenizers.Metaspace(prepend_scheme="always")
        split = [pre_tokenizers.WhitespaceSplit()] if family == "unigram" else []
        shrink = [normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "▁")] if family == "t5" else []
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *shrink])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, space])
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token=names[1 if names[0] == "[PAD]" else 3],
                                          show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(lines, trainer)
    if family == "llama":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    first, last = (names[2], names[3]) if names[0] == "[PAD]" else (names[0], names[2])
    ends = [(name, tokenizer.token_to_id(name)) for name in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ends)
    tokenizer.enable_truncation(6)  # as files of sentence encoders have it
    tokenizer.enable_padding(length=6)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def reference_words(tokenizer, after_blank, inside, line: str, ends: list[int]) -> list[list[int]]:
    """The pieces of every word, one word and one piece at a time: the rule of `TokenizerPieces`, in the tokenizer's numbers."""
    starts = [0, *ends[:-1]]
    stops = [*ends[:-1], len(line)]
    regions = list(zip(starts, stops, strict=True))

    def word_of(place: int) -> int:
        return next((n for n, (_, stop) in enumerate(regions) if place < stop), len(regions) - 1)

    whole = tokenizer.encode(line, add_special_tokens=False)
    found: list[list[int]] = [[] for _ in regions]
    again = set()
    for number, (start, end) in zip(whole.ids, whole.offsets, strict=True):
        first, last = word_of(start), word_of(max(start, end - 1))
        if first != last:
            again.update(range(first, last + 1))
        found[first].append(number)
    for word in again:
        part = line[slice(*regions[word])]
        own = tokenizer if word == 0 else after_blank if part[:1].isspace() else inside
        found[word] = own.encode(part, add_special_tokens=False).ids
    return found


def other_pieces(path: Path, line: str, leaves: list[dict]) -> str:
    """Return how leaves differ from the pieces of a whole line, if its words are those between blanks, and share no piece."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    whole, unknown = tokenizer.encode(line, add_special_tokens=False), json.loads(tokenizer.to_str())["model"]
    name = unknown["vocab"][unknown["unk_id"]][0] if unknown["type"] == "Unigram" else unknown["unk_token"]
    found, number_of = [leaf["piece"] for leaf in leaves], tokenizer.token_to_id
    wanted = [1 if name is not None and number == number_of(name) else number + 4 for number in whole.ids]
    crosses = any(" " in line[start:end].strip() for start, end in whole.offsets)
    special = any(token["content"] in line for token in json.loads(tokenizer.to_str())["added_tokens"])
    words = {line[:end].count(" ") for start, end in whole.offsets for end in [max(start, end - 1)]}
    if crosses or special or len(words) < len(line.split(" ")) or found == wanted:
        return ""
    return f"pieces {found!r:.60} of {line!r:.60}, but the tokenizer has {wanted!r:.60}"
