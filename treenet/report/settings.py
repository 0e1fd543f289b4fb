"""Settings of a report, without the code that it runs."""

from typing import Literal

from pydantic import Field, PositiveInt

from treeproc.common.settings import Settings


class ReportSettings(Settings):
    """Settings of a report: its runs, studies, split and pictures."""

    runs: tuple[str, ...] = Field(
        (),
        description="folders of tree-attention train and of studies, or records of studies; the same as arguments without key=",
    )
    title: str = Field("Runs and studies", min_length=1, description="title of the page")
    split: str = Field("test", description="split whose sentences the page shows and whose attention it counts")
    baseline: str | None = Field(
        None,
        description="name of the run against which the others are tested, in records of a study that of a model; unset, the "
        "first run of a transformer, else the first run",
    )
    main: str | None = Field(
        None,
        description="in records of a study of the data size, the model that is tested against the baseline, and against which "
        "all others are tested; unset, tree_transformer, else the first by name",
    )
    sentences: int = Field(
        5,
        ge=0,
        description="sentences to show: those whose translations by the baseline and the next run differ most in chrF; of "
        "classifiers, wrong ones, first those on which runs differ",
    )
    lines: tuple[PositiveInt, ...] = Field((), description="show these instead: lines of the split, counted from 1")
    targets: Literal["reference", "translation"] = Field(
        "reference", description="input of the decoder while attention is counted: the references, or its own translations"
    )
    bootstrap_samples: PositiveInt = Field(1000, description="samples of the paired bootstrap")
    use_gpu: bool = Field(False, description="run the models on the GPU")
