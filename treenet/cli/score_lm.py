"""Score a language model: its perplexity on a split, its choices in minimal pairs, the surprisal of words.

    tree-attention score-lm --out RUN
    tree-attention score-lm --out RUN split=valid
    tree-attention score-lm --out RUN blimp=BLiMP.zip
    tree-attention score-lm --out RUN 'pairs={files: [pairs.tsv], good: good, bad: bad, by: [group]}'
    tree-attention score-lm --out RUN surprisal=story.txt
    tree-attention score-lm --out RUN trees=beam

RUN is the folder of a training run of tree-attention train. A causal model gives the probability of a sentence. A grammar gives
that of a sentence with its tree of the data set: its perplexity is an upper bound. A masked model gives a pseudo-perplexity,
which compares with no other kind.

`blimp` and `pairs` score minimal pairs: how often the good sentence has the higher probability, for each group of pairs. A
grammar reads pairs of trees, or the trees of the run's parser. evaluate --compare A B split=pairs-blimp tests two runs.

`surprisal` gives the bits of each word of a file, and of the end of each line. A word needs the probability that the next piece
begins a word; their sum is the nll.

With `trees=beam`, a grammar needs no trees: a beam search finds trees, and sums up their probabilities. That is a lower bound of
the probability of the sentence. On a split, the file has the best parses, and their labelled F1 is printed. The search takes
seconds a sentence; after an interruption, the same command continues.

The command writes RUN/language_model.NAME.tsv, a row for each example, pair or word, and adds the scores to RUN/scores.json. NAME
is the split, pairs-blimp, pairs-FILE or surprisal-FILE, then .beam with trees=beam and .every_N with every=N.
"""

import math
import sys

from treenet.cli.shipped import on_a_run
from treenet.evaluation.settings import ScoreLMSettings
from treenet.runs.mirror import open_results
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import loading
from treeproc.common.storage import AnyPath

_KINDS = {
    "exact": "",
    "joint": ", with {trees}: an upper bound",
    "beam": ", summed over the trees of a beam: an upper bound",
    "pseudo": ", from the pieces on both sides",
}
_MANY_BITS, _REMEDY = 0.1, "; leave it out, or train longer"


@on_a_run(__doc__, ScoreLMSettings, "train-lm")
def main(out: AnyPath, settings: ScoreLMSettings) -> None:
    with loading():
        from treenet.evaluation.language_models import score_lm_run  # here, as below, because it loads PyTorch
        from treenet.loggers.feed import log_scores

    with open_results(out, *checkpoint_names(settings.checkpoint)) as run:
        name, scores = score_lm_run(run, settings)
        log_scores(run)
    print(describe_scores(name, scores))
    print(out / f"language_model.{name}.tsv")


def describe_scores(name: str, scores: dict) -> str:
    """Return the tables of an entry."""
    from treenet.evaluation.minimal_pairs import format_pairs, format_unread  # here, because it loads readers of trees
    from treenet.tasks.scores import format_scores

    trees = "the parser's trees, or those of the files" if "num_pairs" in scores else "the trees of the data set"
    kind = _KINDS[scores["kind"]].format(trees=trees)
    rows = [format_scores({name: scores}, "sentences"), f"{scores['num_targets']:,} pieces{kind}"]
    if "num_pairs" in scores:
        rows += format_pairs(scores)
    rows += format_unread(scores)
    if "other_first_pieces" in scores:
        share = scores["other_first_pieces"]
        bits = -math.log2(max(1 - share, sys.float_info.min))
        what = f"{share:.2%} of the probability of first pieces is of pieces that begin no word"
        rows.append(f"{what}: the first word of each line has {bits:.2f} bits too many{_REMEDY * (bits >= _MANY_BITS)}")
    return "\n".join(rows)
