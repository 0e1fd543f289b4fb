"""benchmarks/gpu.py at toy size on the CPU: every section, and a page that is complete after every row."""

import sys
from importlib.util import find_spec

import gpu
import gpu_flops
import gpu_report
import pytest
import torch
from model_cases import batch_of
from strategies import Tree

from treenet.config import ModelConfig
from treenet.training.micro_batches import StepInputs
from treeproc.common import provenance

pytestmark = pytest.mark.slow

SENTENCES = [Tree(5, [[0, 5, 3], [0, 2, 2], [3, 5, 3]]), Tree(1, [[0, 1, 1]])]


@pytest.mark.cluster
def test_every_section_at_toy_size(tmp_path, monkeypatch):
    out = tmp_path / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(out), "--quick", "--device", "cpu"])
    gpu.main()
    page = out.read_text()
    for section in ("Checks", "Training", "Search", "Encoder layer, forward and backward", "Loss", "Left out"):
        assert f"## {section}\n" in page
    checks = [line for line in page.split("## Checks\n")[1].split("##")[0].splitlines() if line.startswith("| ")][2:]
    assert len(checks) == 10 and all(line.endswith("| yes |") for line in checks), checks
    searches = page.split("## Search\n")[1].split("##")[0]
    caches = [f"{model}, {cache} cache" for model in ("transformer", "tree_transformer") for cache in ("growing", "static")]
    assert all(f"| {way} |" in searches for way in caches) and "compiled steps" in page
    assert ("| CTranslate2 |" in searches) == (find_spec("ctranslate2") is not None)
    assert "has not ended" not in page and out.with_suffix(".png").exists()


@pytest.fixture
def without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    provenance.software.cache_clear()
    yield
    provenance.software.cache_clear()


def test_a_run_that_is_cut_off_leaves_its_rows(tmp_path, without_git):
    report = gpu_report.Report(tmp_path / "gpu.md", "python gpu.py", torch.device("cpu"))
    report.add("Training", model="tree_transformer", **{"tokens/s": 1234.5})
    report.add("Training", model="transformer", padding=0.012345)
    page = report.out.read_text()
    assert "has not ended" in page and f"(no commit known), torch {torch.__version__}." in page
    assert "| model | tokens/s | padding |" in page
    assert "| tree_transformer | 1,234 | - |" in page and "| transformer | - | 0.0123 |" in page


def test_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def parts(report, *places):
        yield gpu.CHECKS, lambda: torch.ones(2) @ torch.ones(3)
        yield gpu.LOSS, lambda: report.add("Loss", by="ours", tokens=64)

    monkeypatch.setattr(gpu, "quick_parts", parts)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.md"), "--quick", "--device", "cpu"])
    gpu.main()
    page = (tmp_path / "gpu.md").read_text()
    assert "| ours | 64 |" in page and "- a part that failed: RuntimeError: " in page and "has not ended" not in page
    assert "Traceback" in capsys.readouterr().err


def test_without_a_gpu_the_long_run_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path / "gpu.md"), "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 2 and "--quick" in capsys.readouterr().err


def test_work_is_counted_by_position():
    batch = batch_of(SENTENCES, target_length=3)
    work = gpu_flops.Work.of(batch, tree=True)
    spans_and_subtrees = (5 + 3) + (2 + 1) + (2 + 1) + (1 + 1)
    assert (work.leaves, work.nodes, work.targets, work.entries) == (6, 4, 8, spans_and_subtrees)
    assert work.encoder_pairs == 25 + 1 + spans_and_subtrees
    assert work.decoder_pairs == 2 * (4 * 5 // 2) and work.cross_pairs == 4 * (5 + 3) + 4 * (1 + 1)
    assert gpu_flops.Work.of(batch, tree=False).encoder_pairs == 25 + 1
    assert gpu_flops.Work.of(StepInputs(batch, (), None), tree=True) == work  # what a GPU gets


def test_flops_are_those_that_torch_counts():
    """The model is plain, and its batch has no padding. On a CPU, torch does not count the products inside of attention."""
    from torch.utils.flop_counter import FlopCounterMode

    from treenet.models import VocabSizes, build_model

    config = ModelConfig(name="transformer", d_model=32, d_ff=64, num_heads=4, num_encoder_layers=2, num_decoder_layers=1)
    batch = batch_of([SENTENCES[0]] * 3, target_length=7)
    model = build_model(config, VocabSizes(pieces=23, labels=7))
    with FlopCounterMode(display=False) as counter:
        model(batch).sum().backward()
    work = gpu_flops.Work.of(batch, tree=False)
    pairs = 2 * work.encoder_pairs + work.decoder_pairs + work.cross_pairs
    assert counter.get_total_flops() == gpu_flops.training_flops(work, config, 23) - 3 * 4 * config.d_model * pairs
