"""The page about pretrained encoders, followed word by word in an empty folder: from own text to an answer, and in Python."""

import json
import random
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import run_installed_here
from conftest import REPOSITORY
from test_minilm import MODEL

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

from tiny_pretrained import WIDTH, write_encoder

pytestmark = pytest.mark.cluster

PAGE = (REPOSITORY / "docs" / "pretrained.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## From your text to an answer\n")[2].partition("\n## ")[0]
BLOCKS = re.findall(r"^```(yaml|bash|python)\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
LEAST = {  # what the test makes smaller
    "seeds: [1, 2, 3, 4, 5]": "seeds: [1, 2, 3]",
    "for seed in (1, 2, 3, 4, 5):": "for seed in (1, 2, 3):",
    '"num_train_epochs": 3': '"max_steps": 2',
}
SMALLER = {
    "tiny": {
        **{"d_model: 384": f"d_model: {WIDTH}", "d_ff: 1536": "d_ff: 24", "num_heads: 12": "num_heads: 2", "0.0005": "0.02"},
        **{"max_steps: 1000": "max_steps: 8", "_every: 100": "_every: 4", "warmup_steps: 100": "warmup_steps: 2"},
        **{"max_tokens: 1024": "max_tokens: 128", "> 510": "> 38"},
    },
    "minilm": {
        "max_steps: 1000": "max_steps: 40",
        "_every: 100": "_every: 20",
        "warmup_steps: 100": "warmup_steps: 10",
        "max_tokens: 1024": "max_tokens: 256",
    },
}


def write_lines(folder: Path) -> None:
    """Write splits of lines whose classes a word decides."""
    draw = random.Random(1)
    verbs = {"good": ("loved", "praised", "enjoyed"), "bad": ("hated", "ignored", "left")}
    nouns = ("the old man", "a nurse", "my little sister", "the new teacher", "our neighbour")

    def line() -> tuple[str, str]:
        label = draw.choice(list(verbs))
        subject, other = draw.sample(nouns, 2)
        return label, f"{subject.capitalize()} {draw.choice(verbs[label])} the {draw.randint(2, 99)} books of {other}."

    for split, count in (("train", 60), ("valid", 12), ("test", 24)):
        lines = ["\t".join(line()) + "\n" for _ in range(count)]
        lines[-1] = lines[-1].replace(" books", " very" * 40 + " old books")
        (folder / f"{split}.tsv").write_text("".join(lines))
    (folder / "new.txt").write_text("The nurse loved the book.\nWe hated it.\n")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("encoder", ["tiny", "minilm"])
def test_the_page_leads_from_text_to_an_answer(encoder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path)
    if encoder == "tiny":
        write_encoder(tmp_path / "models" / "bert")
    elif MODEL.is_dir():
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "bert").symlink_to(MODEL)
    else:
        pytest.skip("no MiniLM: run make minilm, or set TREE_ATTENTION_MINILM to its folder")
    printed = []
    for language, text in BLOCKS:
        for long, short in (LEAST | SMALLER[encoder]).items():
            text = text.replace(long, short)
        if language == "yaml":
            Path(text.partition("\n")[0].removeprefix("# ")).write_text(text)
        elif language == "bash":
            for line in text.splitlines():
                program, *words = shlex.split(line)
                if program == "tree-attention":
                    done = run_installed_here(*words)
                    assert done.returncode == 0, (line, done.stderr)
                    printed.append(done.stdout)
        elif find_spec("accelerate"):
            exec(compile(text, "docs/pretrained.md", "exec"), {})
            trained = capsys.readouterr().out
            left_out = re.findall(r"^(\w+): example (\d+) is left out: \d+ pieces$", trained, re.MULTILINE)
            assert left_out == ([("train", "59"), ("test", "23")] if encoder == "tiny" else [])
            assert re.search(r"\{'plain': \[(0?\.\d+, ){2}0?\.\d+\], 'tree': ", trained) and "ConfidenceInterval" in trained
    report = json.loads((tmp_path / "STUDY" / "comparison.json").read_text())
    assert [row["system"] for row in report["systems"]] == ["tree", "shuffled", "plain"]
    tests = [row["tests"]["test.accuracy"] for row in report["systems"][1:]]
    assert all(test["seeds"] == 3 for test in tests)
    table = printed[2].strip().splitlines()
    table = table[next(place for place, line in enumerate(table) if line.startswith("system ")) :]
    assert table[0].split()[-8:] == ["95", "%", "seen", "p", "p,", "Holm", "parameters", "minutes"] and "− tree" in table[0]
    assert [line.split()[0] for line in table[1:4]] == ["tree", "shuffled", "plain"]
    assert (tmp_path / "REPORT" / "index.html").stat().st_size > 10_000
    assert len((tmp_path / "new.classes").read_text().splitlines()) == 2
    if encoder == "tiny":
        assert tests[1]["interval"] and tests[1]["seen"] > 0
    else:  # all seeds may have all lines right, which gives no interval
        assert min(row["test.accuracy"]["mean"] for row in report["systems"]) > 0.75
