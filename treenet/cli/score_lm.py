"""Score a language model: its perplexity on a split, and its choices in minimal pairs.

    tree-attention score-lm --out RUN
    tree-attention score-lm --out RUN split=valid
    tree-attention score-lm --out RUN 'treebank=[pairs.mrg]' pairs=true

RUN is the folder of a training run of tree-attention train. A causal model gives the probability of a sentence. A grammar gives
that of a sentence with its tree of the data set: its perplexity is an upper bound. A masked model gives a pseudo-perplexity,
which compares with no other kind.

`treebank` scores trees of files, encoded with the vocabulary of the run. With pairs=true, the sentences of the input are pairs,
the right one first. The command counts how often the right one has the higher probability.

It writes RUN/language_model.<split>.tsv, an example a line, and adds the scores to RUN/scores.json.
"""

from treenet.cli.shipped import on_a_run
from treenet.evaluation.settings import ScoreLMSettings
from treenet.runs.mirror import open_results
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import loading
from treeproc.common.storage import AnyPath

TITLES = {
    "perplexity": "perplexity per piece",
    "word_perplexity": "perplexity per word",
    "perplexity_given_tree": "perplexity per piece, given the tree so far",
    "pseudo_perplexity": "pseudo-perplexity per piece",
    "pair_accuracy": "right in minimal pairs",
}
_KINDS = {"exact": "", "joint": ", with the given trees: an upper bound", "pseudo": ", from the pieces on both sides"}


@on_a_run(__doc__, ScoreLMSettings, "train-lm")
def main(out: AnyPath, settings: ScoreLMSettings) -> None:
    with loading():
        from treenet.evaluation.language_models import score_lm_run  # here, as below, because it loads PyTorch
        from treenet.loggers.feed import log_scores
        from treenet.tasks.learning import find_unlearned, say_unlearned

    with open_results(out, *checkpoint_names(settings.checkpoint)) as run:
        name, scores = score_lm_run(run, settings)
        log_scores(run)
    print("\n".join([format_scores(name, scores), *say_unlearned(find_unlearned({name: scores}))]))
    print(out / f"language_model.{name}.tsv")


def format_scores(name: str, scores: dict) -> str:
    """Return a small table of an entry."""
    rows = [f"{name}: {scores['num_examples']:,} examples, {scores['num_targets']:,} pieces{_KINDS[scores['kind']]}"]
    for key, title in TITLES.items():
        if key in scores:
            value = f"{100 * scores[key]:.2f} %" if key == "pair_accuracy" else f"{scores[key]:.2f}"
            rows.append(f"  {title:44}{value:>10}")
    if "num_pairs" in scores:
        left_out = f"; {scores['lines_without_pair']:,} lines have no partner"
        rows.append(f"  {scores['num_pairs']:,} pairs" + (left_out if scores["lines_without_pair"] else ""))
    return "\n".join(rows)
