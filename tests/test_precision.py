"""Precision: what `auto` becomes and where it is kept, scaled losses of float16, clipped gradients."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from toyruns import final_weights, losses, make_config, make_task, same

from treenet.config import TrainConfig
from treenet.jobs import train_run
from treenet.jobs.train_run import choose_for_gpu, run_training
from treenet.layers import backend
from treenet.layers.backend import computing_in, precision_of_scores, resolve_precision, set_up_gpu
from treenet.tasks import losses as task_losses
from treenet.training import optimizer, step
from treenet.training.optimizer import LossScale
from treenet.training.ranks import Ranks
from treenet.training.step import TrainStep
from treenet.training.trainer import Trainer, train
from treeproc.common.settings import UserError, load_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


# What `auto` is.


def test_auto_is_float32_on_cpus_and_by_the_gpu_on_gpus(data, monkeypatch):
    assert make_config(data).precision == make_config(data, "precision=auto").precision == "float32"
    assert make_config(data, "use_gpu=no").precision == make_config(data, "use_gpu=off").precision == "float32"
    assert make_config(data, "use_gpu=true").precision == make_config(data, "use_gpu=yes").precision == "auto"
    assert make_config(data, "use_gpu=true", "precision=float32").precision == "float32"
    for with_bf16, expected in ((True, "bf16"), (False, "fp16")):
        monkeypatch.setattr(backend, "has_bf16", lambda device, answer=with_bf16: answer)
        assert resolve_precision("auto", CUDA) == expected
    assert resolve_precision("auto", CPU) == resolve_precision("auto", torch.device("meta")) == "float32"
    assert resolve_precision("tf32", CUDA) == "tf32"


def test_a_gpu_computes_attention_without_cudnn_and_float32_exactly_if_asked():
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    before = cuda.matmul.allow_tf32, cudnn.allow_tf32, cuda.cudnn_sdp_enabled()
    try:
        cuda.matmul.allow_tf32 = False
        cuda.enable_cudnn_sdp(True)
        for precision, device, expected in (
            ("bf16", CPU, (False, True)),
            ("tf32", CUDA, (True, False)),
            ("float32", CUDA, (False, False)),
        ):
            set_up_gpu(precision, device)
            assert (cuda.matmul.allow_tf32, cuda.cudnn_sdp_enabled()) == expected
            assert cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled()
    finally:
        cuda.matmul.allow_tf32, cudnn.allow_tf32 = before[:2]
        cuda.enable_cudnn_sdp(before[2])


def test_a_run_keeps_the_precision_that_it_began_with(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_run, "_best_precision", lambda config: "bf16")
    wanted = make_config(data, "use_gpu=true")
    assert choose_for_gpu(wanted, tmp_path).precision == "bf16"
    run_training(make_config(data, "max_steps=5"), tmp_path)
    assert load_settings(TrainConfig, tmp_path / "config.yaml").precision == "float32"
    assert choose_for_gpu(wanted, tmp_path).precision == "float32"
    assert "began with precision=float32, and keeps it; a new run would use bf16" in capsys.readouterr().err
    with pytest.raises(UserError, match="precision: 'float32' -> 'bf16'"):
        run_training(make_config(data, "max_steps=5", "precision=bf16"), tmp_path)


def test_settings_of_before_are_recorded_as_before(data):
    recorded = make_config(data).model_dump(mode="json")
    assert recorded["precision"] == "float32" and "clip_norm" not in recorded["optimizer"]
    assert make_config(data, "optimizer.clip_norm=1").model_dump()["optimizer"]["clip_norm"] == 1


def test_scores_are_computed_as_the_training_was():
    assert [precision_of_scores(name, with_bf16=True) for name in ("float32", "bf16", "fp16")] == ["float32", "bf16", "fp16"]
    assert [precision_of_scores(name, with_bf16=False) for name in ("float32", "bf16", "fp16")] == ["float32", "fp16", "fp16"]
    with computing_in("bf16", CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    for name in ("float32", "tf32"):
        with computing_in(name, CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


# Scaled losses.


@pytest.fixture
def scaled(monkeypatch) -> None:
    """Losses are scaled as for float16, but computed in float32: a power of two changes no bit."""
    monkeypatch.setattr(TrainStep, "defers", True)
    monkeypatch.setattr(step, "resolve_precision", lambda precision, device: "fp16")
    monkeypatch.setattr(step, "computing_in", lambda precision, device: computing_in("float32", device))


@pytest.mark.slow
def test_a_scaled_loss_trains_as_an_unscaled_one_and_resumes(data, tmp_path, scaled, monkeypatch):
    for name in ("scaled", "plain"):
        (tmp_path / name).mkdir()
        with monkeypatch.context() as patch:
            if name == "plain":
                patch.setattr(step, "resolve_precision", resolve_precision)
            else:
                patch.setattr(optimizer, "INTERVAL", 3)
            for steps in (10, 20):
                train(make_task(data, f"max_steps={steps}"), tmp_path / name)
    assert losses(tmp_path / "scaled") == losses(tmp_path / "plain")
    assert same(final_weights(tmp_path / "scaled"), final_weights(tmp_path / "plain"))


def test_the_scale_grows_falls_and_is_kept(data, scaled, monkeypatch):
    monkeypatch.setattr(optimizer, "INTERVAL", 4)
    trainer = Trainer(make_task(data), Ranks(0, 1, CPU))
    true_loss, calls = task_losses.projected_nll, iter(range(100))

    def loss(*arguments):
        sums = true_loss(*arguments)
        return sums._replace(loss=sums.loss * math.inf) if next(calls) == 5 else sums

    monkeypatch.setattr(task_losses, "projected_nll", loss)
    seen = []
    for rank_batch in list(trainer.rank_batches())[:8]:
        trainer.step(rank_batch)
        seen.append(trainer.train_step.loss_scale.state())
    first = optimizer.FIRST_SCALE
    assert seen == [(first, 1), (first, 2), (first, 3), (2 * first, 0), (2 * first, 1), (first, 0), (first, 1), (first, 2)]
    other = LossScale(CPU)
    other.load(seen[4])
    assert other.state() == seen[4]


# Clipped gradients.


@pytest.mark.parametrize("defers", [False, True])
def test_a_gradient_is_clipped_as_by_pytorch(data, monkeypatch, defers):
    """The first update of Adam follows the sign alone, so the second is compared."""
    monkeypatch.setattr(TrainStep, "defers", defers)
    weights = []
    for clip in (0.0, 0.3):
        trainer = Trainer(make_task(data, f"optimizer.clip_norm={clip}", "optimizer.adam_eps=0.01"), Ranks(0, 1, CPU))
        train_step, model = trainer.train_step, trainer.train_step.model
        for number, rank_batch in enumerate(list(trainer.rank_batches())[:3]):
            if clip:
                trainer.step(rank_batch)
                assert trainer.settle().grad_norm > clip  # what is logged is the norm before
                continue
            train_step.compute_gradient(rank_batch, trainer.micro_batches, number)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            for group in train_step.optimizer.param_groups:
                group["lr"] = step.learning_rate(trainer.config.optimizer, number + 1)
            train_step.optimizer.step()
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_micro_batches_clip_alike_and_a_small_gradient_stays(data, tmp_path):
    runs = {"whole": [], "cut": ["batch.tokens_per_device=16"], "loose": [], "off": []}
    for name, options in runs.items():
        clip = {"loose": 1e6, "off": 0}.get(name, 0.5)
        (tmp_path / name).mkdir()
        train(make_task(data, "max_steps=8", f"optimizer.clip_norm={clip}", *options), tmp_path / name)
    found = {name: [loss for _, loss in losses(tmp_path / name)] for name in runs}
    assert found["cut"] == pytest.approx(found["whole"], rel=1e-5)
    assert found["loose"] == found["off"] != found["whole"]


def test_a_trained_model_remembers_its_precision(monkeypatch):
    """Alone and in an ensemble. A GPU computes in it, and in fp16 where it has no bf16; a CPU in float32."""

    class OnGpu(torch.nn.Module):
        def parameters(self, recurse: bool = True):
            yield SimpleNamespace(device=CUDA)

    seen = []
    monkeypatch.setattr(backend, "computing_in", lambda name, device: seen.append((name, device.type)) or nullcontext())
    monkeypatch.setattr(backend, "set_up_gpu", lambda name, device: None)
    alone, together = OnGpu(), OnGpu()
    backend.remember_precision(alone, "bf16")
    together.members = torch.nn.ModuleList([alone])
    for with_bf16 in (True, False):
        monkeypatch.setattr(backend, "has_bf16", lambda device, answer=with_bf16: answer)
        for model in (alone, together):
            with backend.scoring(model):
                pass
    assert seen == 2 * [("bf16", "cuda")] + 2 * [("fp16", "cuda")]
    on_cpu = torch.nn.Linear(1, 1)
    backend.remember_precision(on_cpu, "bf16")
    with backend.scoring(on_cpu):
        assert on_cpu(torch.ones(1, 1)).dtype == torch.float32
