"""Read the trees that a model with constituent attention found by itself, and score their brackets against a treebank.

    tree-attention unsupervised-parse --out RUN
    tree-attention unsupervised-parse --out RUN split=valid max_words=10
    tree-attention unsupervised-parse --out RUN 'treebank=[wsj/23]' parsing.min_layer=1

RUN is the folder of a training run of model.name = constituent_transformer, made by tree-attention train. The
gold trees are those of its data set, or of a treebank. The command also scores left-branching, right-branching, balanced and
random trees. It writes RUN/parses.<split>.txt, one tree per line in the order of the input, and adds the scores to
RUN/scores.json.
"""

from treenet.cli.shipped import on_a_run
from treenet.evaluation.settings import ParseSettings
from treenet.runs.mirror import open_results
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import loading
from treeproc.common.storage import AnyPath


@on_a_run(__doc__, ParseSettings, "train-lm")
def main(out: AnyPath, settings: ParseSettings) -> None:
    with loading():
        from treenet.evaluation.unsupervised_parse import format_parse, parse_run
        from treenet.loggers.feed import log_scores

    with open_results(out, *checkpoint_names(settings.checkpoint)) as run:
        name, scores = parse_run(run, settings)
        log_scores(run)
    print(format_parse(name, scores))
    print(out / f"parses.{name}.txt")
