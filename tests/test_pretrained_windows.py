"""Texts with more pieces than a pretrained encoder has positions: read in windows, as a slow loop over single leaves does."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from pretrained_data import write_data  # noqa: E402
from test_pretrained import config_of, damage_config, leaves_of  # noqa: E402
from tiny_pretrained import write_encoder  # noqa: E402

from treenet.data.batch import collate  # noqa: E402
from treenet.jobs.train_run import run_training  # noqa: E402
from treenet.layers.core import share_dropout_keys  # noqa: E402
from treenet.models.pretrained import Windows  # noqa: E402
from treenet.runs.loading import load_model  # noqa: E402
from treenet.tasks.base import build_task  # noqa: E402

pytestmark = pytest.mark.slow

MOST = 4  # leaves that the encoder reads at once


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(1, 12))
def test_every_leaf_has_the_window_with_the_longest_shorter_side(lengths, most):
    windows = Windows.of(np.array(lengths), most)
    of_text = [[(n, int(s)) for n, s in enumerate(windows.starts) if windows.rows[n] == row] for row in range(len(lengths))]
    window, offset = windows.places(max(lengths))
    for row, length in enumerate(lengths):
        assert of_text[row][0][1] == 0 and (len(of_text[row]) == 1) == (length <= most)
        assert length <= most or of_text[row][-1][1] + most == length
        for leaf in range(length):
            sides = {n: min(leaf - start, start + most - 1 - leaf) for n, start in of_text[row]}
            best = max(sides.values())
            assert best >= 0 and window[row, leaf] == min(n for n, side in sides.items() if side == best)
            assert offset[row, leaf] == leaf - windows.starts[window[row, leaf]]


@pytest.fixture(scope="module", params=["bert", "roberta"])
def made(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp(request.param)
    encoder = write_encoder(folder / "encoder", request.param, positions=MOST + (2 if request.param == "bert" else 4))
    damage_config(encoder, attention_probs_dropout_prob=0.0)
    return encoder, write_data(folder, tokenizer=encoder)


LENGTHS = (3, 17, MOST, 31, MOST + 1)


def long_batch(made, chosen=(0, 1, 2, 3, 4)):
    """A batch of texts of these lengths, from the leaves of the data set."""
    source = build_task(config_of(made)).open("train")
    pieces = np.concatenate([source.lists(source.pick([row]), "leaves", "piece").flat for row in range(8)])
    none = {"nodes": {"label": []}, "spans": {"start": [], "end": [], "subtree_end": []}, "tgt_pieces": []}
    rows = [{"example_id": n, "leaves": {"piece": pieces[n : n + LENGTHS[n]]}, **none} for n in chosen]
    return collate(rows, source.reads)


@torch.no_grad()
def test_states_are_those_of_transformers_in_the_window_of_each_leaf(made):
    """Every leaf is read in a window of its own call of transformers. A text of one window is as it was."""
    leaves, batch = leaves_of(*made), long_batch(made)
    states, first = leaves.encode(batch)
    model = transformers.AutoModel.from_pretrained(made[0]).eval()
    for row, length in enumerate(LENGTHS):
        numbers = leaves.numbers[batch.leaf_pieces[row, :length]]
        starts = [0] if length <= MOST else sorted({*range(0, length - MOST, MOST // 2), length - MOST})
        for leaf in range(length):
            start = max((s for s in starts if 0 <= leaf - s < MOST), key=lambda s: min(leaf - s, s + MOST - 1 - leaf))
            ids = torch.cat([leaves.before, numbers[start : start + MOST], leaves.after])[None]
            own = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
            torch.testing.assert_close(states[row, leaf], own[1 + leaf - start], atol=2e-5, rtol=1e-4)
            if start == leaf == 0:
                torch.testing.assert_close(first[row], own[0], atol=2e-5, rtol=1e-4)


def test_dropout_and_gradients_of_a_long_text_do_not_depend_on_its_neighbours(made):
    leaves = leaves_of(*made).train()
    shared, keys = share_dropout_keys(leaves), torch.arange(3, 3 + len(LENGTHS), dtype=torch.int32)

    def run(chosen):
        shared.set(keys[chosen])
        leaves.zero_grad()
        states, first = leaves.encode(long_batch(made, chosen))
        place = chosen.index(3)
        (states[place, : LENGTHS[3]].sum() + first[place].sum()).backward()
        assert torch.equal(shared.keys, keys[chosen])
        return states[place, : LENGTHS[3]].detach(), leaves.weight.grad.clone()

    alone, together = run([3]), run([1, 0, 3, 4])
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert alone[1].abs().sum() > 0
    shared.set(keys[[3]] + 1)
    assert not torch.allclose(leaves.encode(long_batch(made, [3]))[0][0], alone[0])


def test_a_validation_reads_more_long_texts_than_the_training_batch_before_it(made):
    leaves = leaves_of(*made)
    wanted = leaves.encode(long_batch(made))[0]
    share_dropout_keys(leaves).set(torch.ones(1, dtype=torch.int32))
    assert torch.equal(leaves.encode(long_batch(made))[0], wanted)


def test_a_run_trains_on_long_texts_and_says_how_many_there_are(made, tmp_path, capsys):
    config = config_of(made, model={"name": "tree_transformer"}, batch={"max_leaves": 1000})
    run_training(config, tmp_path / "run")
    lengths = build_task(config).open("train").lengths["leaves"][:]
    longer = int((lengths > MOST).sum())
    assert 0 < longer < len(lengths)
    said = f"note: {longer} of 40 texts of train and {longer} of 40 texts of valid have more than {MOST} pieces, and are read in"
    assert said in capsys.readouterr().err
    batch = build_task(config).open("valid").batch(np.arange(8))
    assert load_model(tmp_path / "run").model(batch).examples.isfinite().all()
