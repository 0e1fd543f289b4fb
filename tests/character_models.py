"""Makes models of Stanza that read language models of characters, as the published English ones do, out of the shipped models.

    python tests/character_models.py OUT        # of the sizes of the published ones, for benchmarks/preprocess.py --installed

OUT is a folder of Stanza's resources. Language models are random. New inputs and states have random weights of deviation `noise`.
With 0, the trees of the shipped parser stay, and only the work is that of the published models.
"""

import itertools
import json
import shutil
import sys
from pathlib import Path

import torch
from stanza.models.common.char_model import CharacterLanguageModel, CharVocab
from torch import Tensor

from treeproc.parsers import ParserConfig, find_models

Parts = list[tuple[int, int]]  # of one dimension: (size, new size)
CHARACTERS = [chr(code) for code in range(32, 256)] + ["\n"]


def widen(tensor: Tensor, parts: list[Parts], noise: float) -> Tensor:
    """Enlarge parts of dimensions; `parts` has one entry for each dimension."""
    out = torch.randn([sum(new for _, new in one) for one in parts]) * noise
    places = []
    for one in parts:
        old = new = 0
        places.append([])
        for before, after in one:
            places[-1].append((slice(old, old + before), slice(new, new + before)))
            old, new = old + before, new + after
    for place in itertools.product(*places):
        out[tuple(new for _, new in place)] = tensor[tuple(old for old, _ in place)].float()
    return out


def same(tensor: Tensor, dimension: int) -> Parts:
    return [(tensor.shape[dimension],) * 2]


def write_language_model(path: Path, size: int, forwards: bool) -> None:
    sizes = {"char_emb_dim": min(size, 100), "char_hidden_dim": size, "char_num_layers": 1}
    rates = {"char_dropout": 0.0, "char_unit_dropout": 0.0, "char_rec_dropout": 0.0}
    CharacterLanguageModel(sizes | rates, {"char": CharVocab([CHARACTERS])}, is_forward_lm=forwards).save(str(path))


def widen_tagger(content: dict, size: int, hidden: int, noise: float) -> None:
    """Give a tagger the states of characters instead of its own model of characters, and `hidden` states."""
    args, tensors = content["config"], content["model"]
    words, states = args["word_emb_dim"], [(args["hidden_dim"], hidden)]
    inputs: Parts = [(words, words), (0, 2 * size)]
    for name in [name for name in tensors if name.startswith(("charmodel.", "trans_char."))]:
        del tensors[name]
    for name, tensor in tensors.items():
        first = ".0." in name and name.startswith("taggerlstm")
        if name == "drop_replacement":
            tensors[name] = widen(tensor[:words], [inputs], noise)
        elif name.endswith("_init"):
            tensors[name] = widen(tensor, [same(tensor, 0), same(tensor, 1), states], noise)
        elif ".weight_ih_" in name:
            source = tensor[:, :words] if first else tensor
            tensors[name] = widen(source, [states * 4, inputs if first else states * 2], noise)
        elif ".weight_hh_" in name:
            tensors[name] = widen(tensor, [states * 4, states], noise)
        elif ".bias_" in name:
            tensors[name] = widen(tensor, [states * 4], noise)
        elif name.startswith(("taggerlstm.highway", "taggerlstm.gate")):
            source = tensor[:, :words] if first and tensor.ndim == 2 else tensor
            tensors[name] = widen(source, [states * 2, inputs if first else states * 2][: tensor.ndim], noise)
        elif name == "upos_hid.weight" or (name.startswith("tag_hid.") and name.endswith(".weight")):
            tensors[name] = widen(tensor, [same(tensor, 0), states * 2], noise)
        else:
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
    args |= {"charlm": True, "charlm_transform_dim": None, "hidden_dim": hidden}


def widen_parser(content: dict, size: int, hidden: int, noise: float) -> None:
    """Give a constituency parser the states of characters, and `hidden` states."""
    args, tensors = content["params"]["config"], content["params"]["model"]
    words, states = len(tensors["word_start_embedding"]), [(args["hidden_size"], hidden)]
    inputs: Parts = [(words, words), (0, 2 * size)]
    output = [*states, (args["transition_hidden_size"],) * 2, *states]
    vectors = ("word_zeros", "constituent_stack.start_embedding", "word_to_constituent.bias", "reduce_linear.bias")
    for name, tensor in tensors.items():
        if name in ("word_start_embedding", "word_end_embedding"):
            parts = [inputs]
        elif name in vectors or name == "output_layers.0.bias":
            parts = [states]
        elif name == "constituent_zeros":
            parts = [same(tensor, 0), same(tensor, 1), states]
        elif name.startswith("word_lstm.weight_ih"):
            parts = [states * 4, inputs if "_l0" in name else states * 2]
        elif name.startswith(("word_lstm.weight", "constituent_stack.lstm.weight")):
            parts = [states * 4, states]
        elif name.startswith(("word_lstm.bias", "constituent_stack.lstm.bias")):
            parts = [states * 4]
        elif name == "word_to_constituent.weight":
            parts = [states, states * 2]
        elif name == "reduce_linear.weight":
            parts = [states, states]
        elif name == "output_layers.0.weight":
            parts = [states, output]
        elif name in ("constituent_open_embedding.weight", "dummy_embedding.weight", "output_layers.1.weight"):
            parts = [same(tensor, 0), states]
        else:
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        tensors[name] = widen(tensor, parts, noise)
    args["hidden_size"] = hidden


def write_resources(out: Path, size: int, tagger_hidden: int, parser_hidden: int, noise: float) -> None:
    """Write a folder of Stanza's resources with English models."""
    torch.manual_seed(1)
    folder, shipped = out / "en", find_models(ParserConfig(name="shipped")).folder
    kinds = ("tokenize", "pos", "constituency", "pretrain", "forward_charlm", "backward_charlm")
    paths = {kind: folder / kind / "wide.pt" for kind in kinds}
    for path in paths.values():
        path.parent.mkdir(parents=True)
    shutil.copy(shipped / "tokenizer.pt", paths["tokenize"])
    shutil.copy(shipped / "vectors.pt", paths["pretrain"])
    for kind, change, hidden in (("pos", widen_tagger, tagger_hidden), ("constituency", widen_parser, parser_hidden)):
        content = torch.load(shipped / f"{kind}.pt", weights_only=False)
        change(content, size, hidden, noise)
        args = content["config"] if kind == "pos" else content["params"]["config"]
        args |= {f"charlm_{way}_file": str(paths[f"{way}_charlm"]) for way in ("forward", "backward")}
        torch.save(content, paths[kind], _use_new_zipfile_serialization=False)
    for way in ("forward", "backward"):
        write_language_model(paths[f"{way}_charlm"], size, way == "forward")
    needs = [{"model": kind, "package": "wide"} for kind in kinds[3:]]
    english: dict = {kind: {"wide": {"md5": ""}} for kind in kinds} | {"lang_name": "English"}
    for kind in ("pos", "constituency"):
        english[kind]["wide"]["dependencies"] = needs
    english["packages"] = {"default": {kind: "wide" for kind in kinds[:3]}}
    (out / "resources.json").write_text(json.dumps({"en": english}))


if __name__ == "__main__":
    write_resources(Path(sys.argv[1]), 1024, 200, 512, 0.0)
