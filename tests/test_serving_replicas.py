"""Two replicas of the server: both answer, and a killed one loses no request while the other goes on."""

import pytest

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
from search_runs import SEARCH_WORDS, write_run, write_vocabulary
from serving_process import Server, answers_while_killing

from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treeproc.online.raw_lines import RawLine, RawLineEncoder

pytestmark = pytest.mark.slow

LINES = [" ".join(SEARCH_WORDS[:length]) for length in (2, 5, 7)]


@pytest.mark.cluster
def test_killing_one_of_two_replicas_loses_no_accepted_request(tmp_path):
    run = write_run(tmp_path / "run", write_vocabulary(tmp_path / "data"))
    translate = LineTranslator(TranslateSettings(), [run], RawLineEncoder)
    expected = translate([RawLine(line.encode()) for line in LINES], 0).text.splitlines()
    server = Server(run, tmp_path / "log", "replicas=2")
    try:
        assert server.model == "tree_transformer averaged, 2 replica(s)\n"
        before = server.replicas()
        assert len(before) == 2 and server.health() == {
            "status": "ok", "model": "tree_transformer averaged", "replicas": 2, "waiting": 0,
        }  # fmt: skip
        answers = answers_while_killing(server, LINES, before[0])
        assert len(answers) >= 18 and all(answer == expected for answer in answers)
        assert before[0] not in server.replicas() and before[1] in server.replicas()
    finally:
        server.end()
