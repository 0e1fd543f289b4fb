"""Probe the encoder of a trained run for syntax: linear classifiers on its frozen states, beside baselines.

    tree-attention probe --out RUN
    tree-attention probe --out RUN layer=all tasks=[depth,top_constituents,pos_tag]
    tree-attention probe --out RUN checkpoint=20000 word_state=mean use_gpu=true

RUN is the folder of a training run, of translation or of classification. Its data set must have parsed shards. The command trains
probes on sentences of train, chooses their penalty on valid, and scores them on test. It does so for the states of the trained
model, for those of the untrained model, and for the embeddings of pieces.

The command adds each result to RUN/probes.json at once. The first new result replaces earlier ones of other settings (seed,
train_sentences), other data or earlier weights. After an interruption, the same command continues. If RUN is in an object store,
results are uploaded at the end: after a kill, the command begins again. With layer=all, RUN/probes.<checkpoint>.png shows
accuracy by layer.
"""

from treenet.cli.shipped import on_a_run
from treenet.probing.settings import ProbeSettings
from treenet.runs.mirror import open_results
from treenet.runs.result_entries import PROBES
from treenet.runs.run_folder import checkpoint_names
from treeproc.common.command_line import loading
from treeproc.common.errors import require
from treeproc.common.storage import AnyPath


@on_a_run(__doc__, ProbeSettings)
def main(out: AnyPath, settings: ProbeSettings) -> None:
    if settings.layer == "all":
        require("matplotlib", "the figure of layer=all")
    with loading():
        from treenet.probing.probe_results import figure_name, format_probes  # here, as below, because it loads PyTorch
        from treenet.probing.probe_run import probe_run

    with open_results(out, *checkpoint_names(settings.checkpoint)) as run:
        name, entry = probe_run(run, settings)
        drawn = (run / figure_name(name)).is_file()
    print(format_probes(name, entry))
    print(out / PROBES)
    if drawn:
        print(out / figure_name(name))
