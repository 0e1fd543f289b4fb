"""BERTScore with a tiny encoder, against a slow oracle and against the authors' package."""

import json
import math
import random

import numpy as np
import pytest
import torch
from tiny_encoder import LONGEST, WORDS, write_tiny_encoder

from treenet.cli import evaluate
from treenet.extras.learned_metrics.bertscore import BertScoreConfig, BertScorer, bert_scores, check_bertscore
from treeproc.common.settings import UserError

pytestmark = pytest.mark.slow

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return write_tiny_encoder(tmp_path_factory.mktemp("models") / "tiny")


def draw_lines(seed: int, count: int = 12, longest: int = 11) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices([word for word in WORDS if word != "##s"], k=draw.randint(1, longest))) for _ in range(count)]


def slow_scores(folder, layer, lines, references, weights_of) -> list[tuple[float, float, float]]:
    """Equations of Zhang et al. (2020), a pair and a token at a time, on the states of the whole model."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()

    def states(line):
        ids = tokenizer(line)["input_ids"]
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
        return ids, [row / row.norm() for row in found]

    scores = []
    for line, reference in zip(lines, references, strict=True):
        (ids, mine), (ref_ids, theirs) = states(line), states(reference)
        sides = []
        for own_ids, own, other in ((ids, mine, theirs), (ref_ids, theirs, mine)):
            weights = [weights_of(token) for token in own_ids]
            best = [max(float(a @ b) for b in other) for a in own]
            sides.append(sum(w * b for w, b in zip(weights, best, strict=True)) / sum(weights))
        scores.append((*sides, 2 * sides[0] * sides[1] / sum(sides)))
    return scores


@pytest.mark.parametrize("idf", [False, True])
@pytest.mark.parametrize("layer", [1, 3])
def test_equals_the_definition(encoder, layer, idf):
    lines, references = draw_lines(1), draw_lines(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    documents = [set(tokenizer(line)["input_ids"]) for line in references]

    def weight(token):
        if token in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            return 0.0
        return math.log((len(documents) + 1) / (sum(token in one for one in documents) + 1)) if idf else 1.0

    expected = np.array(slow_scores(encoder, layer, lines, references, weight))
    for batch_tokens in (1, 60, 8192):
        found = bert_scores(
            BertScoreConfig(model=encoder, layer=layer, idf=idf, batch_tokens=batch_tokens), [lines], [references]
        )
        assert found.values == pytest.approx(100 * expected[None, :, 2], abs=1e-3)
        assert found.details["precision"] == pytest.approx([100 * expected[:, 0].mean()], abs=1e-3)
        assert found.details["recall"] == pytest.approx([100 * expected[:, 1].mean()], abs=1e-3)
    assert found.num_cut == 0 and f"|layer:{layer}|idf:{'yes' if idf else 'no'}|" in found.signature


@pytest.mark.parametrize("kind", ["bert", "modernbert", "megatron-bert"])
@torch.no_grad()
def test_states_of_every_layer_are_those_of_the_whole_encoder(tmp_path, kind):
    """Some encoders have a norm after their last layer, which the states of the others lack."""
    write_tiny_encoder(tmp_path)  # for its tokenizer
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 3, "vocab_size": 15}
    ends = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    whole = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **sizes, **ends)).eval()
    whole.save_pretrained(tmp_path)
    for layer in (1, 2, 3):
        scorer = BertScorer(BertScoreConfig(model=tmp_path, layer=layer))
        tokens = scorer.encode("the cat sat")
        expected = whole(torch.tensor([tokens]), output_hidden_states=True).hidden_states[layer]
        torch.testing.assert_close(scorer._embed([tokens])[0], expected)


def test_an_encoder_whose_states_depend_on_padding_reads_lines_alone(tmp_path):
    write_tiny_encoder(tmp_path)  # for its tokenizer
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 15}
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model("convbert", **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="states of a line in .* change with the padding.*add bertscore.batch_tokens=1"):
        BertScorer(BertScoreConfig(model=tmp_path, layer=2))
    lines, references = draw_lines(1), draw_lines(2)
    found = bert_scores(BertScoreConfig(model=tmp_path, layer=2, batch_tokens=1), [lines], [references])
    expected = slow_scores(tmp_path, 2, lines, references, lambda token: float(token not in (2, 3)))
    assert found.values[0] == pytest.approx([100 * f1 for _, _, f1 in expected], abs=1e-3)


@pytest.mark.parametrize("idf", [False, True])
def test_equals_the_package_of_the_authors(encoder, idf):
    package = pytest.importorskip("bert_score")
    lines, references = draw_lines(3, longest=20), draw_lines(4, longest=20)
    # One pair a batch: otherwise the package lets padding take part in matches.
    options = {"model_type": str(encoder), "num_layers": 2, "idf": idf, "batch_size": 1, "nthreads": 0, "device": "cpu"}
    expected = package.score(lines, references, **options)
    found = bert_scores(BertScoreConfig(model=encoder, layer=2, idf=idf), [lines], [references])
    assert found.values[0] == pytest.approx(100 * expected[2].numpy(), abs=1e-3)
    assert found.details["precision"] == pytest.approx([100 * expected[0].mean().item()], abs=1e-3)


def test_bytes_of_roberta_are_those_inside_of_a_line(tmp_path):
    vocab = {word: n for n, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", "Ġ", "a", "b"])}
    transformers.RobertaTokenizer(vocab=vocab, merges=[]).save_pretrained(tmp_path)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    config = transformers.RobertaConfig(vocab_size=8, max_position_embeddings=12, pad_token_id=1, **sizes)
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    scorer = BertScorer(BertScoreConfig(model=tmp_path, layer=1))
    assert scorer.encode(" ab") == (0, 5, 6, 7, 2) and scorer.encode(" ") == (0, 2)
    # Two of its twelve positions are not used.
    assert len(scorer.encode("a" * 30)) == 10 and scorer.cut == {"a" * 30}
    assert scorer.score([("a" * 30, "b" * 30)], {-1: 1.0})[0].f1 <= 1


def test_equal_lines_score_100_and_blank_ones_0(encoder):
    config = BertScoreConfig(model=encoder, layer=2)
    lines = ["the cat sat .", "", " ", "a dog", "the cat sat ."]
    found = bert_scores(config, [lines, lines[::-1]], [["the cat sat .", "a", "", "a dog", "not ."]])
    assert found.values[0] == pytest.approx([100, 0, 0, 100, found.values[0, 4]], abs=1e-3)
    assert found.values[0, 4] < 99 and found.values.shape == (2, 5)
    # All weights of this line are 0, so that its tokens count equally.
    one = bert_scores(config.model_copy(update={"idf": True}), [["a dog"]], [["a dog"]])
    assert one.values == pytest.approx(100, abs=1e-3)


def test_the_best_reference_of_a_line_counts(encoder):
    config = BertScoreConfig(model=encoder, layer=2)
    lines, first, second = (draw_lines(seed, 6) for seed in (5, 6, 7))
    alone = [bert_scores(config, [lines], [one]).values[0] for one in (first, second)]
    both = bert_scores(config, [lines], [first, second])
    assert both.values[0] == pytest.approx(np.maximum(*alone), abs=1e-3) and both.signature.startswith("nrefs:2|")


def test_a_line_that_is_too_long_is_cut_and_counted(encoder):
    long = " ".join(["cat"] * 30)
    found = bert_scores(BertScoreConfig(model=encoder, layer=2), [[long]], [[" ".join(["cat"] * (LONGEST - 2))]])
    assert found.num_cut == 1 and found.values == pytest.approx(100, abs=1e-3)


def test_a_folder_without_an_encoder_is_refused_and_runs_nothing(encoder, tmp_path):
    def message(folder, layer=2):
        with pytest.raises(UserError) as error:
            config = BertScoreConfig(model=folder, layer=layer)
            check_bertscore(config)
            BertScorer(config)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "has no config.json" in message(tmp_path / "missing")
    assert "layer must be at most 3, but is 4" in message(encoder, 4)
    write_tiny_encoder(tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    torch.save({"evil": print}, tmp_path / "old" / "pytorch_model.bin")
    assert "cannot load" in message(tmp_path / "old")
    folder = write_tiny_encoder(tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    mark = tmp_path / "executed"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n")
    entry = {"auto_map": {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(config | entry))
    assert "cannot load" in message(folder) and not mark.exists()
    write_tiny_encoder(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot load" in message(tmp_path / "cut")


def test_weights_that_are_missing_are_named(encoder, tmp_path):
    folder = write_tiny_encoder(tmp_path / "one", num_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"lack encoder\.layer\.1\.\S+ and 15 more"):
        BertScorer(BertScoreConfig(model=folder, layer=2))
    with pytest.raises(ValueError, match="must be a number with bertscore.model"):
        BertScoreConfig(model=folder)


def test_the_command_scores_and_compares(encoder, tmp_path, capsys):
    texts = {"first": draw_lines(8), "second": draw_lines(9), "truth": draw_lines(9)}
    texts["second"][0] = " ".join(["cat"] * 30)
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    options = [f"references={tmp_path / 'truth'}", f"bertscore.model={encoder}", "bertscore.layer=2"]
    evaluate.main(["--out", str(tmp_path / "out"), f"hypotheses={tmp_path / 'first'}", *options])
    printed = capsys.readouterr().out
    entry = json.loads((tmp_path / "out" / "scores.json").read_text())["test.file.first"]
    values = bert_scores(BertScoreConfig(model=encoder, layer=2), [texts["first"], texts["second"]], [texts["truth"]]).values
    assert entry["bertscore"] == pytest.approx(values[0].mean(), abs=1e-3) and f"{entry['bertscore']:.2f}" in printed
    assert entry["bertscore_signature"] in printed and entry["learned"]["bertscore"]["cut_texts"] == 0
    assert entry["asked"]["bertscore"] == {"model": str(encoder), "layer": 2}
    evaluate.main(
        ["--compare", *(str(tmp_path / name) for name in ("first", "second")), "--out", str(tmp_path / "out"), *options]
    )
    printed, warned = capsys.readouterr()
    found = json.loads((tmp_path / "out" / "comparison.json").read_text())["metrics"]["bertscore"]
    assert [found["baseline"], found["system"]] == pytest.approx(values.mean(1).tolist(), abs=1e-3)
    assert found["p_two_sided"] < 0.05 and "\nBERTScore " in printed and "|bs:1000|seed:12345" in printed
    assert "warning: BERTScore: one text is longer than the model reads" in warned
    with pytest.raises(UserError, match="sources: needs references=FILE"):
        evaluate.main(["--compare", "a", "b", f"sources={tmp_path / 'truth'}"])
