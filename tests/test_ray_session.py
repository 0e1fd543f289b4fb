"""A note of a dead cluster must not keep an embedded Ray from starting."""

import socket

import pytest

from treeproc.ray_session import _cluster_is_running


def test_only_a_cluster_that_answers_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not _cluster_is_running()
    note = tmp_path / "ray" / "ray_current_cluster"
    note.parent.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        note.write_text(f"127.0.0.1:{port}")
        assert _cluster_is_running()
    assert not _cluster_is_running()


@pytest.mark.parametrize("content", ["", "nonsense", "127.0.0.1:notaport"])
def test_a_broken_note_counts_as_none(tmp_path, monkeypatch, content):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text(content)
    assert not _cluster_is_running()
