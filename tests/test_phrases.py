"""Multi-granularity self-attention: partitions by brute force, compositions and heads by loops over phrases, the tag loss."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import num_examples
from model_cases import batch_of, tiny_model
from strategies import Tree, right_branching, trees
from toydata import write_toy_data
from toyruns import make_config, make_task, train_ranks

from treenet.config import PHRASE_LEVELS, ModelConfig, TrainConfig
from treenet.data.input_kinds import PHRASES
from treenet.layers.phrase_attention import COMPOSITIONS, PhraseAttention
from treenet.models import VocabSizes, build_model
from treenet.runs.metrics_log import read_metrics
from treenet.structure import NO_TAG, Partition, PhraseLevels, SpanTable
from treenet.training.ranks import Ranks
from treenet.training.trainer import Trainer, train
from treeproc.common.settings import load_settings

Phrase = tuple[int, int, int]  # first leaf, one past the last, tag


def reference_level(tree: Tree, words: list[int], labels: list[int], level: int) -> list[Phrase]:
    """The phrases of one level, from the root down."""
    children = {node: [c for c, p in enumerate(tree.parents) if p == node] for node in range(-1, len(tree.spans))}
    spans = tree.leaf_spans

    def parts(node: int, start: int, end: int, depth: int) -> list[Phrase]:
        """The parts of a node, or of the text (-1), each cut to `level`."""
        out, leaf = [], start
        for child in children[node]:
            out += [(j, j + 1, NO_TAG) for j in range(leaf, spans[child][0])] + cut(child, depth)
            leaf = spans[child][1]
        return out + [(j, j + 1, NO_TAG) for j in range(leaf, end)]

    def cut(node: int, depth: int) -> list[Phrase]:
        start, end = spans[node]
        lowest = node
        while [spans[c] for c in children[lowest]] == [(start, end)]:
            lowest = children[lowest][0]
        if depth < level and any(words[spans[c][0]] != words[spans[c][1] - 1] for c in children[lowest]):
            return parts(lowest, start, end, depth + 1)
        return [(start, end, labels[node])]

    return parts(-1, 0, tree.num_leaves, 0)


def words_of(tree: Tree, seed: int) -> list[int]:
    """Words of one piece or several, with no regard to the tree."""
    return np.random.default_rng([seed, tree.num_leaves]).integers(0, 2, tree.num_leaves).cumsum().tolist()


def read_partition(partition: Partition, lengths: list[int]) -> list[list[Phrase]]:
    """The phrases of every sentence, as a partition of a batch has them."""
    width = partition.pad_mask.shape[1]
    out = []
    for b, length in enumerate(lengths):
        ids = partition.phrase[b].tolist()
        assert ids[:length] == sorted(ids[:length]) and set(ids[length:]) <= {width}
        count = ids[length - 1] + 1
        assert partition.pad_mask[b].tolist() == [p >= count for p in range(width)]
        tags = [NO_TAG] * width if partition.tags is None else partition.tags[b].tolist()
        assert set(tags[count:]) <= {NO_TAG}
        edges = [ids.index(p) for p in range(count)] + [length]
        out.append([(edges[p], edges[p + 1], tags[p]) for p in range(count)])
    return out


@num_examples(40)
@given(batch=st.lists(trees(max_leaves=12), min_size=1, max_size=4))
def test_levels_agree_with_cutting_from_the_root(batch):
    words = [words_of(tree, seed) for seed, tree in enumerate(batch)]
    labels = [list(range(1, 1 + len(tree.spans))) for tree in batch]
    lengths = [tree.num_leaves for tree in batch]
    table = SpanTable.build(lengths, [tree.span_array for tree in batch])
    levels = PhraseLevels.build(table, [np.array(row, dtype=np.int64) for row in labels], [np.array(row) for row in words])
    for level in range(1, PHRASE_LEVELS + 1):
        expected = [reference_level(*rows, level) for rows in zip(batch, words, labels, strict=True)]
        assert read_partition(Partition.level(levels, level), lengths) == expected


def test_levels_of_a_sentence():
    """(S (NP the dog) saw (VP (POS=NN un known) (NP a cat)) .): the pieces of a word are one phrase at all levels."""
    tree = Tree(8, [[0, 8, 5], [0, 2, 2], [3, 7, 5], [3, 5, 4], [5, 7, 5]], [-1, 0, 0, 2, 2])
    table = SpanTable.build([8], [tree.span_array])
    levels = PhraseLevels.build(table, [np.array([10, 11, 12, 13, 14])], [np.array([0, 1, 2, 3, 3, 4, 5, 6])])
    first, second, third = (read_partition(Partition.level(levels, level), [8])[0] for level in (1, 2, 3))
    assert first == [(0, 2, 11), (2, 3, NO_TAG), (3, 7, 12), (7, 8, NO_TAG)]
    assert second == third == [(0, 2, 11), (2, 3, NO_TAG), (3, 5, 13), (5, 7, 14), (7, 8, NO_TAG)]


@pytest.mark.parametrize("n", [2, 3, 5, 9])
def test_ngrams(n):
    lengths = [7, 1, 4]
    pad_mask = torch.arange(7) >= torch.tensor(lengths)[:, None]
    expected = [[(s, min(s + n, length), NO_TAG) for s in range(0, length, n)] for length in lengths]
    assert read_partition(Partition.ngrams(pad_mask, n), lengths) == expected


LENGTHS = [9, 1, 6]
CUTS = [[0, 1, 5, 7, 9], [0, 1], [0, 6]]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def partition_of(cuts: list[list[int]], tags: list[list[int]] | None = None) -> Partition:
    width, num_phrases = max(c[-1] for c in cuts), max(len(c) - 1 for c in cuts)
    phrase = torch.full((len(cuts), width), num_phrases)
    for b, edges in enumerate(cuts):
        for p, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
            phrase[b, start:end] = p
    pad_mask = torch.arange(num_phrases) >= torch.tensor([len(c) - 1 for c in cuts])[:, None]
    if tags is not None:
        tags = torch.tensor([row + [NO_TAG] * (num_phrases - len(row)) for row in tags])
    return Partition(phrase, pad_mask, tags)


def reference_composition(name: str, module: torch.nn.Module, leaves: torch.Tensor) -> torch.Tensor:
    """One phrase [l, D] -> [W]."""
    if name == "max_pool":
        return leaves.amax(0)
    width = module.width
    if name == "convolution":
        kernel = module.taps.weight.view(3, width, -1).permute(1, 2, 0)
        return F.conv1d(leaves.t(), kernel, module.bias, padding=1).relu().amax(1)
    if name == "attention":
        queries, keys, values = module.queries_keys_values(leaves).chunk(3, 1)
        return ((queries @ keys.t() / math.sqrt(width)).softmax(1) @ values).amax(0)
    hidden, cell = leaves.new_zeros(2, width)
    for leaf in leaves:
        i, f, o, g = (module.input(leaf) + module.recurrent(hidden)).chunk(4)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    return hidden


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_compositions_agree_with_one_phrase_at_a_time(name):
    torch.manual_seed(0)
    module = COMPOSITIONS[name](d_model=6, d_head=3).double()
    x, partition = random(3, 9, 6, seed=1).requires_grad_(), partition_of(CUTS)
    fast = module(x, partition)
    slow = torch.zeros_like(fast)
    for b, edges in enumerate(CUTS):
        for p, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
            slow[b, p] = reference_composition(name, module, x[b, start:end])
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    mixture, inputs = random(*fast.shape, seed=2), [x, *module.parameters()]
    torch.testing.assert_close(*(torch.autograd.grad((y * mixture).sum(), inputs) for y in (fast, slow)), rtol=1e-10, atol=1e-10)


def reference_attention(module: PhraseAttention, names: dict, x: torch.Tensor, cuts: list[list[int]], tags: list[list[int]]):
    """One sentence [L, D]: every head in turn, over leaves or over the phrases of `cuts`; with the tag loss."""
    d_head = x.shape[1] // module.num_heads
    queries, out, tag_loss = module.queries(x), [], 0.0
    leaf_keys, leaf_values = module.keys_values(x).chunk(2, 1)
    for head in range(module.num_heads):
        columns = slice(head * d_head, (head + 1) * d_head)
        if head < module.num_leaf_heads:
            keys, values = leaf_keys[:, columns], leaf_values[:, columns]
        else:
            number = head - module.num_leaf_heads
            memory, edges = module.memories[number], cuts[number]
            ends = zip(edges, edges[1:], strict=False)
            phrases = [reference_composition(names["composition"], memory.composition, x[s:e]) for s, e in ends]
            for phrase, tag in zip(phrases, tags[number], strict=True):
                if memory.tag_logits is not None and tag != NO_TAG:
                    tag_loss = tag_loss - memory.tag_logits(phrase).softmax(0)[tag].log()
            phrases = torch.stack(phrases)
            if memory.interaction is not None:
                phrases = memory.interaction(phrases[None])[0]
            keys, values = memory.keys_values(phrases).chunk(2, 1)
        out.append((queries[:, columns] @ keys.t() / math.sqrt(d_head)).softmax(1) @ values)
    return module.output(torch.cat(out, 1)), tag_loss


@pytest.mark.parametrize(
    "options",
    [
        {"composition": "max_pool", "interaction": "on_lstm"},
        {"composition": "convolution", "interaction": "lstm"},
        {"composition": "lstm", "interaction": "none"},
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_heads_agree_with_loops_over_phrases(options):
    torch.manual_seed(0)
    phrases = {"ngrams": [3], "levels": [1, 4], "chunk_size": 2, **options}
    module = PhraseAttention(ModelConfig(d_model=16, num_heads=4, phrases=phrases), num_tags=5).double()
    cuts = [[[*range(0, n, 3), n] for n in LENGTHS], CUTS, [list(range(n + 1)) for n in LENGTHS]]
    tags = [[[NO_TAG] * (len(c) - 1) for c in cuts[0]], [[0, 3, NO_TAG, 4], [2], [1]], [[NO_TAG] * n for n in LENGTHS]]
    x = random(3, 9, 16, seed=3).requires_grad_()
    pad_mask = torch.arange(9) >= torch.tensor(LENGTHS)[:, None]
    partitions = [Partition.ngrams(pad_mask, 3), *(partition_of(c, t) for c, t in zip(cuts[1:], tags[1:], strict=True))]
    tag_losses: list[torch.Tensor] = []
    fast = module(x, ~pad_mask[:, None, None], partitions, tag_losses)
    (fast_loss,) = tag_losses
    slow = [reference_attention(module, options, x[b, :n], *([way[b] for way in ways] for ways in (cuts, tags)))
            for b, n in enumerate(LENGTHS)]  # fmt: skip
    fast, slow_loss = torch.cat([fast[b, :n] for b, n in enumerate(LENGTHS)]), sum(loss for _, loss in slow)
    slow = torch.cat([states for states, _ in slow])
    torch.testing.assert_close((fast, fast_loss), (slow, slow_loss), rtol=1e-12, atol=1e-12)
    mixture, inputs = random(*fast.shape, seed=4), [x, *module.parameters()]
    grads = [
        torch.autograd.grad((y * mixture).sum() + loss, inputs, allow_unused=True, materialize_grads=True)
        for y, loss in ((fast, fast_loss), (slow, slow_loss))
    ]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_tags_are_learnt_and_belong_to_no_nll(tmp_path):
    """The loss of an update is that of the translation and the weighted one of the tags, in all metrics."""
    data = write_toy_data(tmp_path)
    phrases = ["model.name=multi_granularity", "model.num_heads=4", "model.phrases.ngrams=[2]", "model.phrases.levels=[1]"]
    phrases += ["model.phrases.chunk_size=2", "model.dropout=0", "log_every=1"]
    sums = {}
    for weight in (0.0, 0.5, 1.0):  # one set of weights
        trainer = Trainer(make_task(data, *phrases, f"model.phrases.tag_loss={weight}"), Ranks(0, 1, torch.device("cpu")))
        trainer.train_step.model.load_state_dict(sums.get("weights", trainer.train_step.model.state_dict()), strict=False)
        rank_batch = trainer.micro_batches.rank_batch(trainer.plan.batch(0))
        sums[weight] = trainer.train_step.compute_gradient(rank_batch, trainer.micro_batches, 0).tolist()
        sums["weights"] = trainer.train_step.model.state_dict()
    (plain, nll, none), (half, *_, half_tags), (whole, whole_nll, tags) = sums[0.0], sums[0.5], sums[1.0]
    assert none == 0 < tags and half_tags == pytest.approx(tags / 2)
    assert whole_nll == pytest.approx(nll) and half == pytest.approx(plain + tags / 2) and whole == pytest.approx(plain + tags)
    (tmp_path / "run").mkdir()
    train(make_task(data, *phrases, "max_steps=40"), tmp_path / "run")
    lines = read_metrics(tmp_path / "run")
    of = {event: [line["tag_loss"] for line in lines if line["event"] == event] for event in ("train", "valid")}
    assert np.mean(of["train"][-5:]) < np.mean(of["train"][:5]) and min(of["valid"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["optimizer.r_drop=2"]], ids=["one pass", "R-Drop"])
def test_micro_batches_and_ranks_change_no_loss_of_tags(tmp_path, options):
    data = write_toy_data(tmp_path / "data")
    options = [
        *options,
        "model.name=multi_granularity",
        "model.num_heads=4",
        "model.phrases.ngrams=[2]",
        "model.phrases.levels=[1]",
    ]
    options += ["model.phrases.chunk_size=2", "log_every=1", "max_steps=4"]

    def tag_losses(name: str, *more: str, ranks: int = 1) -> list[float]:
        (tmp_path / name).mkdir()
        if ranks > 1:
            assert train_ranks(ranks, make_config(data, *options), tmp_path / name) == [None] * ranks
        else:
            train(make_task(data, *options, *more), tmp_path / name)
        return [line["tag_loss"] for line in read_metrics(tmp_path / name)]

    whole = tag_losses("whole")
    np.testing.assert_allclose(tag_losses("pieces", "batch.tokens_per_device=16"), whole, rtol=1e-5)
    np.testing.assert_allclose(tag_losses("ranks", ranks=2), whole, rtol=1e-5)


def test_without_tags_encoding_is_the_same():
    model = tiny_model("multi_granularity")
    batch = batch_of([right_branching(6), right_branching(3)], PHRASES)
    states, tag_loss = model.decode_to_train(batch)
    assert torch.equal(states, model.decode(batch)) and tag_loss > 0


@pytest.mark.parametrize("system", ["multi_granularity", "on_lstm_hybrid"])
def test_shipped_systems_are_as_large_as_the_transformer(repository, system):
    """Parameters within a tenth of each other, at the vocabulary of IWSLT'14 with 10,000 pieces."""
    counts = []
    for name in (system, "transformer"):
        path = repository / "workflows" / "configs" / (f"iwslt14_en_de_{system}.yaml" if name == system else "iwslt14_en_de.yaml")
        config = load_settings(TrainConfig, path, ["data=somewhere", f"model.name={name}"])
        with torch.device("meta"):
            model = build_model(config.model, VocabSizes(pieces=10_000, labels=100))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert counts[0] == pytest.approx(counts[1], rel=0.1)
