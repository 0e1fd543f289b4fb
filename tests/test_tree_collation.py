"""Trees in samples: what `default_collate`, a DataLoader and collators of Hugging Face make is the batch built at once."""

import re
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from strategies import batches
from test_accumulation import FIGURE_1
from test_api_trees import check_same
from torch.utils.data import DataLoader, default_collate

from treenet import TreeAttention, TreeCollator, TreeStructure, UserError


def build(sentences, kind: str = "build") -> TreeStructure:
    return getattr(TreeStructure, kind)([tree.num_leaves for tree in sentences], [tree.span_array for tree in sentences])


def same_maps(found, expected) -> None:
    """The masks of accumulation and attention too."""
    check_same(found, expected)
    assert type(found.branches) is type(expected.branches) and type(found.attention) is type(expected.attention)
    for maps in ("branches", "attention"):
        for name, value in vars(getattr(expected, maps) or torch.nn.Module()).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(getattr(found, maps), name), value), name


@num_examples(30)
@given(sentences=batches(max_size=5, max_leaves=6), kind=st.sampled_from(["build", "build_compact"]), data=st.data())
def test_joined_batches_are_the_batch_built_at_once(sentences, kind, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sentences) - 1)))) if len(sentences) > 1 else []
    parts = [sentences[first:last] for first, last in zip([0, *cuts], [*cuts, None], strict=True)]
    whole = build(sentences, kind)
    same_maps(TreeStructure.cat([build(part, kind) for part in parts]), whole)
    same_maps(default_collate([build([tree], kind) for tree in sentences]), whole)


def test_joined_batches_have_the_form_of_the_first():
    whole, compact = (build([FIGURE_1], kind) for kind in ("build", "build_compact"))
    same_maps(TreeStructure.cat([whole, compact]), build([FIGURE_1] * 2, "build"))
    same_maps(TreeStructure.cat([compact, whole]), build([FIGURE_1] * 2, "build_compact"))


LABELLED = [[(0, 3, "S"), (0, 2, "NP")], [(0, 2, "X")], [(0, 4, "S"), (1, 3, "VP"), (1, 2, "A")]]


class Samples(torch.utils.data.Dataset):
    """A sample has its number, a mask padded to four leaves, and a tree."""

    def __init__(self):
        self.trees = TreeStructure.from_spans(LABELLED)

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, place: int) -> dict:
        return {"number": place, "labels": float(place), "mask": self.trees.leaf_pad_mask[place], "structure": self.trees[place]}


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_data_loader_makes_batches_with_their_trees(workers):
    loader = DataLoader(Samples(), batch_size=2, num_workers=workers, pin_memory=True)
    found = list(loader)
    assert [batch["number"].tolist() for batch in found] == [[0, 1], [2]]
    for batch, rows in zip(found, ([0, 1], [2]), strict=True):
        expected = TreeStructure.from_spans([LABELLED[row] for row in rows])
        same_maps(batch["structure"], expected)
        assert batch["structure"].labels == expected.labels
    nested = default_collate([({"trees": sample["structure"]}, sample["number"]) for sample in Samples()])
    check_same(nested[0]["trees"], TreeStructure.from_spans(LABELLED))


def test_labels_are_kept_if_all_have_them():
    plain = TreeStructure.build([2], [torch.tensor([[0, 2, 1]]).numpy()])
    labelled = TreeStructure.from_spans(LABELLED)
    assert TreeStructure.cat([labelled, labelled[:1]]).labels == (*labelled.labels, labelled.labels[0])
    assert TreeStructure.cat([labelled, plain]).labels is None


def test_other_values_go_through_the_given_collator():
    samples = list(Samples())
    batch = TreeCollator(default_collate)(samples)
    assert list(batch) == ["number", "labels", "mask", "structure"] and batch["number"].tolist() == [0, 1, 2]
    same_maps(batch["structure"], TreeStructure.from_spans(LABELLED))
    assert set(samples[0]) == set(batch)  # the samples are as they were


MISTAKES = {
    "each sample must have a TreeStructure of one tree, .* but sample 1 has 2 trees": lambda trees: default_collate(
        [trees[0], trees[:2]]
    ),
    "but sample 1 has None": lambda trees: TreeCollator(default_collate)([{"a": trees[0]}, {"b": 1}]),
    "but sample 0 has None": lambda trees: TreeCollator(default_collate)([{"b": 1}, {"b": 2, "a": trees[0]}]),
    r"samples\[0\] must be a dictionary, but is a TreeStructure": lambda trees: TreeCollator(default_collate)([trees[0]]),
    "collator must be a function of a list of samples, but is None": lambda trees: TreeCollator(None),
    "structures must be a list of TreeStructures, but is None": lambda trees: TreeStructure.cat(None),
    r"structures\[1\] must be of type TreeStructure, but is a Tensor": lambda trees: TreeStructure.cat([trees, torch.zeros(2)]),
    "a batch must have at least one tree": lambda trees: TreeStructure.cat([]),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_mistake_is_one_sentence(message):
    with pytest.raises(UserError, match=message):
        MISTAKES[message](TreeStructure.from_spans(LABELLED))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: pip install transformers")
def test_collators_of_hugging_face_pad_the_rest():
    from tokenizers import Tokenizer, models
    from transformers import (
        DataCollatorForTokenClassification,
        DataCollatorWithPadding,
        PreTrainedTokenizerFast,
        default_data_collator,
    )

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0}, "[PAD]")), pad_token="[PAD]")
    trees = TreeStructure.from_spans(LABELLED)
    features = [{"input_ids": list(range(1, 2 + row)), "structure": trees[row]} for row in range(3)]
    batch = TreeCollator(DataCollatorWithPadding(tokenizer))(features)
    assert batch["input_ids"].tolist() == [[1, 0, 0], [1, 2, 0], [1, 2, 3]]
    same_maps(batch["structure"], trees)
    batch = TreeCollator(DataCollatorForTokenClassification(tokenizer))([{**one, "labels": one["input_ids"]} for one in features])
    assert batch["labels"].tolist() == [[1, -100, -100], [1, 2, -100], [1, 2, 3]]
    same_maps(batch["structure"], trees)
    batch = TreeCollator(default_data_collator)([{"label": row, "structure": trees[row]} for row in range(3)])
    assert batch["labels"].tolist() == [0, 1, 2]
    same_maps(batch["structure"], trees)
    wrap = r"cannot make a tensor of a TreeStructure, .*; wrap the collator: treenet\.TreeCollator\(collator\)"
    with pytest.raises(UserError, match=wrap):
        default_data_collator([{"label": row, "structure": trees[row]} for row in range(3)])
    with pytest.raises(ValueError, match="`structure` in this case") as caught:
        DataCollatorWithPadding(tokenizer)(features)
    assert re.search(wrap, str(caught.value.__cause__))


class Model(torch.nn.Module):
    """Tree attention, the root's state, and a loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.head, self.seen = TreeAttention(8, 2), torch.nn.Linear(8, 1), []

    def forward(self, mask, structure, labels=None):
        leaves = torch.ones(*structure.leaf_pad_mask.shape, 8)
        self.seen.append(structure)
        states = torch.cat([leaves, structure.node_means(leaves)], dim=1)
        out = self.head(self.attention(states, structure=structure)[0][:, structure.num_leaves])[:, 0]
        return {"loss": (out - labels.float()).square().mean(), "logits": out}


@pytest.mark.slow
@pytest.mark.parametrize("collator", [default_collate, TreeCollator(default_collate)])
def test_the_trainer_of_hugging_face_trains_on_them(collator, tmp_path):
    """With the updates of a plain loop on batches that were built at once."""
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    options = {"num_train_epochs": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, "learning_rate": 0.1}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "lr_scheduler_type": "constant", "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path), **options, **quiet, max_grad_norm=0.0, optim="sgd", seed=1)
    model = Model()
    trainer = transformers.Trainer(model, arguments, data_collator=collator, train_dataset=Samples(), eval_dataset=Samples())
    trainer.train()
    assert [len(structure) for structure in model.seen] == [2, 1, 2, 1]
    scored = trainer.evaluate()["eval_loss"]
    by_hand, names = Model(), [tuple(label for *_, label in nodes) for nodes in LABELLED]
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for structure in model.seen[:4]:
        rows = list(map(names.index, structure.labels))
        batch = TreeStructure.from_spans([LABELLED[row] for row in rows])
        loss = by_hand(None, batch, torch.tensor(rows))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for one, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    whole = by_hand.eval()(None, TreeStructure.from_spans(LABELLED), torch.arange(3))["loss"]
    assert scored == pytest.approx(whole.item(), rel=1e-5)
