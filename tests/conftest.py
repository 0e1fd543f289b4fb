"""Shared by all tests: repository paths, threads, the command line as a user has it."""

import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis_profiles  # noqa: F401 (loads the profile of all tests)
import numpy as np
import pytest
import torch
from data_beside import DATA

from treeproc.common.messages import messages_shown
from treeproc.common.provenance import software

REPOSITORY = Path(__file__).resolve().parent.parent

# Sums come out differently with other numbers of threads; one in this process, one in those that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# A cluster that happens to run on this machine is none of the tests' business.
os.environ.setdefault("RAY_ADDRESS", "local")
# Copies of objects and notes of hashes are this run's own.
os.environ["TREE_ATTENTION_CACHE"] = (_cache := tempfile.TemporaryDirectory(prefix="tree-attention-cache-")).name
# A function shows a test the messages that it shows in a command, without the progress of preprocessing.
_messages = messages_shown()
_messages.__enter__()
logging.getLogger("treeproc").setLevel(logging.WARNING)
logging.getLogger("treeproc.common.messages").setLevel(logging.INFO)
# Ray's workers are nice to other processes, and get next to nothing where these are busy.
os.environ.setdefault("RAY_worker_niceness", "0")
# A shell's background jobs ignore Ctrl-C, and so do the processes that they start; tests that interrupt a process need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules, and tests of quick modules, that start processes or Ray, parse with models, train, or take more than a few seconds.
# All others are `quick`.
SLOW = {
    "accumulation::test_a_batch_mate_changes_no_bit", "accumulation::test_equals_oracle",
    "advice::test_a_first_data_set_and_a_first_training_need_only_what_the_messages_say", "api_run",
    "api_trees::test_self_attention_equals_the_oracle", "attention_stats", "autoscaling", "azure", "back_translation",
    "batch_stream", "bertscore", "bpe_dropout::test_trees_are_those_that_the_encode_stage_makes_of_the_pieces",
    "cache::test_processes_share_a_cache_that_is_too_small_for_them", "carried_study", "causal_lm",
    "classifiers::test_every_model_learns_eight_sentences", "cluster_aws", "comet",
    "compact::test_processes_that_make_batches_do_not_load_the_compiler", "comparison", "compiling",
    "control::test_right_trees_beat_the_bound_and_others_do_not", "control::test_systems_see_what_decides_the_order",
    "corpora::test_training_prints_the_files_and_records_them", "damage", "damaged_models", "data_configs", "demo",
    "dense_accumulation::test_blocks_of_flex_attention_equal_the_mask", "dependency_data", "dependency_parser",
    "device_step", "docs::test_runnable_blocks_run", "docs::test_the_tutorial_runs", "documented_commands",
    "dropout::test_compiled_dropout_drops_the_same", "dropout_compiled", "dry_run",
    "encode::test_batches_agree_with_the_slow_oracle", "evaluate", "export", "export_graphs", "failing_store",
    "files::test_a_full_disk_leaves_the_old_output", "filters::test_killed_and_run_again_gives_the_same_bytes", "fuzz",
    "gpu_benchmark", "gradient_sums", "grid", "image",
    "index_parts::test_a_job_with_parts_makes_the_same_shards_and_mends_its_parts", "initial_weights", "inspect",
    "labelled_data", "layering::test_the_job_and_its_parsers_start_without_torch", "loader_processes", "loggers",
    "loggers_outside", "losses::test_a_compiled_chunk_of_the_loss_gives_the_same", "masked_lm", "memory_modes",
    "metrics::test_the_command_reads_further_references", "models", "models_benchmark", "moses", "new_pieces", "notices",
    "package::test_help_and_version_load_nothing", "package::test_the_installed_command_works_without_the_extras",
    "package::test_the_wheel_has_what_a_user_needs", "package_parsers", "parameter_choice", "parser_training_constituency",
    "parser_training_dependency", "parser_training_loop", "parser_training_tagger", "parser_training_tokenizer", "parsers",
    "phrases::test_micro_batches_and_ranks_change_no_loss_of_tags", "phrases::test_tags_are_learnt_and_belong_to_no_nll",
    "precision", "preprocess", "preprocess_benchmark", "probes", "progress", "provenance", "ray_job", "ray_session",
    "recurrent", "relatedness", "relations", "remote_run", "report", "report_lines", "report_live", "results_from_records",
    "scaling", "search::test_a_beam_that_holds_everything_finds_the_best_of_all_hypotheses", "serving", "serving_answers",
    "serving_ray", "serving_replicas", "serving_slow_clients", "sharded", "shipped_languages", "shuffled_trees",
    "significance::test_an_interval_of_95_percent_holds_the_truth_so_often", "slurm", "split_sentences", "stale_results",
    "standard_streams", "static_search_compiled", "storage", "study_in_store", "systems",
    "text_in_stores::test_inputs_and_data_set_in_a_store_have_the_bytes_of_one_process",
    "text_in_stores::test_killed_after_any_job_the_same_command_goes_on", "text_on_ray", "timing_benchmark",
    "train_classifier", "train_parser", "training", "training_faults", "training_results", "training_resume",
    "training_updates", "translate", "translate_constraints", "translate_ensemble", "translate_terminal",
    "tree_attention::test_self_attention_equals_oracle", "trust", "trust_arrow",
    "tuning::test_a_search_is_killed_and_continues",
    "tuning::test_systems_begin_with_the_same_draws_and_recorded_trials_come_first",
    "tuning::test_the_report_has_the_best_finished_trial_and_the_importances", "valid_metric", "verify", "vocab_from",
    "vocabulary_counts", "word_frequency::test_counts_of_a_data_set_in_an_object_store_are_those_of_the_same_one_here",
    "word_noise::test_equals_the_slow_reference",
}  # fmt: skip

# These modules take half a minute or more each. They run first, so that no process ends long after the others.
LONG = (
    "training_faults", "scaling", "tuning", "preprocess", "grid", "storage", "text_on_ray", "docs", "serving_ray", "ray_job",
    "translate", "train_parser", "training", "training_updates", "train_classifier", "compiling", "sharded", "training_resume",
    "loader_processes", "package", "verify", "demo", "trust_arrow", "dropout_compiled", "gpu_benchmark",
)  # fmt: skip


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m quick` does not even load the slow modules."""
    return (config.getoption("markexpr") == "quick" and collection_path.stem.removeprefix("test_") in SLOW) or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks quick tests, begins with the long modules, and leaves out the tests of real data where there is none."""

    def module_of(item: pytest.Item) -> str:
        return item.path.stem.removeprefix("test_")

    def turn(item: pytest.Item) -> int:
        module = module_of(item)
        return LONG.index(module) if module in LONG else len(LONG) + (module not in SLOW)

    items.sort(key=turn)
    for item in items:
        module = module_of(item)
        slow = {module, f"{module}::{getattr(item, 'originalname', item.name)}"} & SLOW
        if not slow and not item.get_closest_marker("data"):
            item.add_marker("quick")
    if not DATA.is_dir():
        beside = [item for item in items if item.get_closest_marker("data")]
        config.hook.pytest_deselected(items=beside)
        items[:] = [item for item in items if not item.get_closest_marker("data")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test, with the fixtures that it makes, begins with the same random numbers, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_process_in_quick_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("quick"):
        software()  # asks git for the commit, once in a process; what a quick test records needs it

        def refuse(*arguments, **options):
            pytest.fail("a quick test started a process: its module belongs to SLOW in conftest.py")

        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def run_workflow():
    """Run `python workflows/NAME ARGS...` to its end; returns the completed process with its output."""

    def run(name: str, *args: object, **options) -> subprocess.CompletedProcess:
        command = [sys.executable, str(REPOSITORY / "workflows" / name), *map(str, args)]
        options.setdefault("env", os.environ.copy())
        return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)

    return run
