"""Secrets in addresses are used, and written nowhere; nobody else chooses who reads the text."""

import re
import shutil
import threading
from base64 import b64encode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hostile_files import make_job, one_line
from hypothesis import given
from hypothesis import strategies as st

from treeproc.common.errors import without_credentials
from treeproc.common.files import json_bytes
from treeproc.common.settings import UserError, dump_settings, load_settings
from treeproc.online.line_encoder import LineEncoder
from treeproc.parsers import ParserConfig, describe_parser
from treeproc.shards.store import read_index
from treeproc.stages.preprocess import PreprocessConfig, write_settings_once

SECRET = "hunter2"


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def test_addresses_of_servers_are_http_and_their_secrets_are_not_written(tmp_path):
    endpoint = f"http://user:{SECRET}@localhost:9000"
    config = load_settings(PreprocessConfig, None, ["parser.name=corenlp", f"parser.endpoint={endpoint}"])
    assert config.parser.endpoint == endpoint  # used
    assert SECRET not in dump_settings(config) + repr(config) + config.model_dump_json()
    (tmp_path / "config.yaml").write_text(dump_settings(config))
    again = load_settings(PreprocessConfig, tmp_path / "config.yaml")
    assert again.parser.endpoint == "http://localhost:9000" and dump_settings(again) == dump_settings(config)
    for bad in ("file:///etc/passwd", "ftp://host", "localhost:9000", "http://", f"http://a b:{SECRET}@host",
                f"http://host:9000/?token={SECRET}", f"http://user:{SECRET}@host:port", f"gopher://u:{SECRET}@h"):  # fmt: skip
        with pytest.raises(UserError, match="parser.endpoint.* must be http://HOST:PORT or https://HOST:PORT") as error:
            load_settings(PreprocessConfig, None, [f"parser.endpoint={bad}"])
        one_line(error.value)
        assert SECRET not in str(error.value)


def test_a_server_gets_the_user_and_password_of_its_address(monkeypatch):
    monkeypatch.delenv("CORENLP_HOME", raising=False)

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            good = self.headers["Authorization"] == "Basic " + b64encode(f"user:{SECRET}".encode()).decode()
            self.send_response(200 if good else 401)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        config = ParserConfig(name="corenlp", endpoint=f"http://user:{SECRET}@{host}")
        assert describe_parser(config)["library"] == "CoreNLP server"
        with pytest.raises(UserError, match=f"no server answers at http://{host} and") as error:
            describe_parser(ParserConfig(name="corenlp", endpoint=f"http://user:{SECRET}x@{host}"))
        assert SECRET not in str(error.value)
        server.shutdown()


@pytest.mark.parametrize(
    "override",
    [
        f"parser=http://user:{SECRET}@host",
        f"parser.endpoint.x=http://user:{SECRET}@host",
        f"parser.endpoint=[http://user:{SECRET}@{'h' * 200}]",
        f"parser.endpoint={{a: http://user:{SECRET}@host",
        f"splits.train.source=http://user:{SECRET}@host/x",
        f"parsed=s3://key:{SECRET}@bucket/data",
        f"parsed=s3:/key:{SECRET}@bucket/data",
        f"http://user:{SECRET}@host",
    ],
)
def test_no_message_repeats_a_secret(override):
    with pytest.raises(UserError) as error:
        load_settings(PreprocessConfig, None, [override])
    one_line(error.value)
    assert SECRET not in str(error.value)


def test_messages_hide_these_secrets():
    assert without_credentials("no server at http://a:b@h:1/x, s3://k:s@b") == "no server at http://***@h:1/x, s3://***@b"
    assert without_credentials("'https://h/x?token=t' failed") == "'https://h/x?***' failed"
    assert without_credentials("http://a:b@h/x?token=t") == "http://***@h/x?***"
    assert without_credentials("a@b http://h/x c@d") == "a@b http://h/x c@d"
    assert without_credentials("://" * 10**6) == "://" * 10**6  # in the time of one reading


@given(st.text("a:/@? '", max_size=30) | st.lists(st.sampled_from(["://", "@", "?", "a", " ", "'"]), max_size=15).map("".join))
def test_a_uri_hides_up_to_its_last_at_and_after_its_question_mark(text):
    hidden = re.sub(r"(?<=://)[^\s'\"]*@", "***@", text)
    assert without_credentials(text) == re.sub(r"(://[^\s'\"?]*\?)[^\s'\"]+", r"\1***", hidden)


def test_a_data_set_does_not_choose_who_reads_the_text(job, tmp_path, monkeypatch):
    data = tmp_path / "data"
    shutil.copytree(job, data)
    index = read_index(data / "encoded")
    settings = index["parser_settings"] | {"name": "corenlp", "endpoint": "http://elsewhere.example:9000"}
    parser = {"library": "CoreNLP server"}
    (data / "encoded" / "index.json").write_bytes(json_bytes(index | {"parser_settings": settings, "parser": parser}))
    monkeypatch.setattr("treeproc.online.line_encoder.describe_parser", lambda config: parser)
    with pytest.raises(UserError, match="a CoreNLP server at http://elsewhere.example:9000 parsed .*, and would now read"):
        LineEncoder(data)
    monkeypatch.setenv("CORENLP_ENDPOINT", "file:///etc")
    with pytest.raises(UserError, match=r"\$CORENLP_ENDPOINT must be http"):
        LineEncoder(data)


def test_the_server_of_a_job_may_move(tmp_path):
    old, new, german = (
        load_settings(PreprocessConfig, None, ["parser.name=corenlp", *more])
        for more in ([], ["parser.endpoint=http://node8:9000"], ["parser.endpoint=http://node8:9000", "parser.language=de"])
    )
    for config in (old, new):
        write_settings_once(config, tmp_path)
    with pytest.raises(UserError, match=r"belongs to other settings \(parser.language: 'en' -> 'de'\)"):
        write_settings_once(german, tmp_path)


def test_settings_that_are_borrowed_name_no_server(job, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(job, data)
    text = (data / "config.yaml").read_text()
    text = text.replace("name: words", "name: corenlp").replace("http://localhost:9000", "http://elsewhere.example:9000")
    (data / "config.yaml").write_text(text)
    files = {"source": [data / "x"], "target": [data / "y"]}
    config = PreprocessConfig.model_validate({"vocab_from": str(data), "splits": {"test": files}})
    assert config.parser.name == "corenlp" and config.parser.endpoint == "http://localhost:9000"
