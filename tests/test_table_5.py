"""Table 5 of the paper: parameters of our configurations, those of the paper, and every part of the difference."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from treenet.config import TrainConfig
from treenet.models import VocabSizes, build_model
from treeproc.common.settings import load_settings

REPOSITORY = Path(__file__).resolve().parent.parent
LABELS = 100
MODULES = 12  # that accumulate: self-attention of six encoder layers, cross-attention of six decoder layers
ROWS = 100  # of a table of hierarchical embeddings, |E|


@dataclass(frozen=True)
class Size:
    config: str
    pieces: int  # with which the plain Transformer has the paper's number
    d_model: int
    d_head: int
    transformer: int  # the paper's
    tree: int  # the paper's


SIZES = [
    Size("wmt14_en_de_base", 34_392, 512, 64, 61_747_200, 61_810_944),
    Size("wmt14_en_de_big", 32_672, 1024, 64, 209_813_504, 209_967_104),
]


def count_parts(size: Size, *overrides: str) -> Counter[str]:
    """Parameters of the configuration by the last part of their names, the label table apart."""
    path = REPOSITORY / "workflows" / "configs" / f"{size.config}.yaml"
    model_config = load_settings(TrainConfig, path, list(overrides), data=Path("DATA")).model
    with torch.device("meta"):
        model = build_model(model_config, VocabSizes(pieces=size.pieces, labels=LABELS))
    parts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parts["label_embedding" if name.startswith("encoder.label_embedding") else name.split(".")[-1]] += parameter.numel()
    return parts


@pytest.fixture(params=SIZES, ids=lambda size: size.config)
def size(request) -> Size:
    return request.param


def test_the_plain_transformer_has_the_number_of_the_paper(size):
    assert count_parts(size, "model.name=transformer").total() == size.transformer


def test_the_tree_transformer_has_these_additional_parameters(size):
    """Leaf weights, two tables of 100 rows of half a head's width, and vectors of labels; nothing else."""
    plain, tree = count_parts(size, "model.name=transformer"), count_parts(size)
    tables = MODULES * ROWS * size.d_head // 2
    assert tree - plain == {
        "leaf_weight": MODULES * size.d_model,
        "vertical": tables,
        "horizontal": tables,
        "label_embedding": LABELS * size.d_model,
    }
    assert not plain - tree


def test_the_difference_from_the_paper():
    """Base: the paper's number is that of 50 rows in the vertical table. Big: 64,512 fewer than the paper's."""
    base, big = SIZES
    fifty = count_parts(base, "model.tree.vertical_rows=50")
    assert fifty.total() - fifty["label_embedding"] == base.tree
    whole = count_parts(base)
    assert whole.total() - whole["label_embedding"] - base.tree == MODULES * 50 * 32 == 19_200
    whole = count_parts(big)
    assert whole.total() - whole["label_embedding"] - big.tree == -64_512


def test_other_settings_of_the_accumulation():
    base = SIZES[0]
    plain = count_parts(base, "model.name=transformer").total()
    for overrides, more in {
        ("model.tree.accumulate_on=scores",): MODULES * 512,
        ("model.tree.hierarchical_embeddings=false",): MODULES * 512,
        ("model.tree.leaf_weights=per_head",): MODULES * (8 * 512 + 2 * ROWS * 32),
    }.items():
        parts = count_parts(base, *overrides)
        assert parts.total() - parts["label_embedding"] - plain == more


def test_the_document_has_these_numbers(size):
    text = (REPOSITORY / "docs" / "reproduce.md").read_text()
    section = re.search(r"^## Table 5\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)[1]
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\d|\d", section)]
    plain, tree = count_parts(size, "model.name=transformer"), count_parts(size)
    without_labels = tree.total() - tree["label_embedding"]
    expected = [size.pieces, size.transformer, size.tree, plain.total(), without_labels, size.tree - size.transformer]
    expected += [without_labels - plain.total(), tree["leaf_weight"], tree["vertical"] + tree["horizontal"]]
    expected += [abs(without_labels - size.tree), size.d_model]
    assert set(expected) <= set(numbers), set(expected) - set(numbers)
