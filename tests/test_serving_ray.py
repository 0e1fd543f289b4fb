"""The server as a whole: Ray Serve, HTTP, a killed replica, and the page in a browser."""

import json
import re
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest
from commands import run_here

pytest.importorskip("uvicorn", reason="needs the extra [serve]")
from axe import NO_AXE, WIDTHS, violations
from browser import MISSING, browser
from search_runs import SEARCH_WORDS
from serving_process import Server, answers_while_killing, run
from waiting import wait_for

from treenet.translation.line_translator import LineTranslator
from treenet.translation.settings import TranslateSettings
from treeproc.online.raw_lines import RawLine

pytestmark = [pytest.mark.slow, pytest.mark.long]

__all__ = ["run"]  # a fixture

LINES = [" ".join(SEARCH_WORDS[i % 7 : i]) for i in range(1, 12)]
HOSTILE = "<script>document.title='bad'</script><img src=x onerror=\"document.title='bad'\">"


@pytest.fixture(scope="module")
def expected(run) -> list[str]:
    translate = LineTranslator(TranslateSettings(), [run])
    return translate([RawLine(line.encode()) for line in LINES], 0).text.splitlines()


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    server = Server(run, tmp_path_factory.mktemp("server") / "log", "request_bytes=200000")
    yield server
    server.end()


def test_translations_are_those_of_translate_and_bad_lines_stand_alone(server, expected):
    assert server.model == "tree_transformer averaged, 1 replica(s)\n"
    assert [line["translation"] for line in server.ask(LINES)] == expected
    found = {}

    def ask(number: int) -> None:
        found[number] = server.ask([LINES[number], "ba\x01"], num_best=1 + number % 3, attention=number % 2 == 0)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(LINES))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i][0]["translation"] for i in range(len(LINES))] == expected
    assert all("control character U+0001" in found[i][1]["error"] for i in found)


def test_a_killed_replica_loses_no_accepted_request(server, expected):
    """There is no other: requests wait until the new one runs."""
    [replica] = server.replicas()
    assert all(answer == expected for answer in answers_while_killing(server, LINES, replica))
    assert replica not in server.replicas()


def test_requests_whose_clients_left_hold_nobody_up(server):
    """They were computed, and a small request waited for all of them. Now it waits for what had begun."""
    lines = [" ".join((SEARCH_WORDS * 40)[:150])] * 40
    began = time.monotonic()
    server.ask(lines)
    one_s = time.monotonic() - began
    body = json.dumps({"lines": lines}).encode()
    host, port = urlsplit(server.address).hostname, urlsplit(server.address).port
    head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    clients = [socket.create_connection((host, port)) for _ in range(12)]
    for client in clients:
        client.sendall(head.encode() + body)
    while server.health()["waiting"] < 12:
        time.sleep(0.01)
    for client in clients:
        client.close()
    began = time.monotonic()
    server.ask(["ba"])
    assert time.monotonic() - began < 6 * one_s and server.health()["waiting"] == 0


@pytest.fixture(scope="module")
def window(server, tmp_path_factory):
    if MISSING:
        pytest.skip(MISSING)
    with browser(tmp_path_factory.mktemp("browser") / "profile") as window:
        window.visit(server.address)
        yield window


def type_and_send(window, text: str) -> None:
    window.run(
        "document.getElementById('text').value = arguments[0]; document.getElementById('status').textContent = 'sent';"
        "document.getElementById('send').click()",
        text,
    )
    wait_for(lambda: not window.run("return document.getElementById('send').disabled"), seconds=60)


def test_in_a_browser_a_sentence_has_its_tree_and_its_words_shade_it(window, server):
    [line] = server.ask(["ba bebe bi"], num_best=3, attention=True)
    type_and_send(window, "ba bebe bi")
    assert window.run("return document.querySelector('.translation').textContent") == line["translation"]
    tree = line["tree"]
    names = window.run("return [...document.querySelectorAll('svg.tree .name')].map((one) => one.textContent)")
    assert names == [leaf["piece"].lstrip("▁") for leaf in tree["leaves"]] + [node["label"] for node in tree["nodes"]]
    others = window.run("return [...document.querySelectorAll('.others li')].map((one) => one.firstChild.textContent)")
    assert others == [one["text"] for one in line["hypotheses"]] and len(others) == 3
    shades = "return [...document.querySelectorAll('svg.tree .fill')].map((one) => Number(one.getAttribute('fill-opacity')))"
    weights = line["attention"]["weights"]
    mean = [sum(column) / len(column) for column in zip(*weights, strict=True)]
    assert window.run(shades) == pytest.approx([share**0.5 for share in mean], abs=2e-3)
    words = window.run("return [...document.querySelectorAll('.tokens button')]")
    window.click(words[-1])  # the end of the sentence
    assert window.run(shades) == pytest.approx([share**0.5 for share in weights[-1]], abs=2e-3)
    chosen = window.run("return [...document.querySelectorAll('[aria-checked=true]')].map((one) => one.textContent)")
    assert chosen == ["end"] and window.run("return document.querySelectorAll('.readout li').length") > 2


@pytest.mark.parametrize("text", [HOSTILE, "שלום עולם \u202egnp.exe", "😀 👩‍👩‍👧 ba", "&lt;b&gt; \"'`"])
def test_in_a_browser_hostile_text_stays_text(window, text):
    type_and_send(window, text)
    assert window.run("return document.querySelector('.source').textContent") == text
    assert window.run("return document.title") == "Tree attention"
    assert window.run("return document.querySelectorAll('#answers script, #answers img, #answers b').length") == 0


def test_in_a_browser_text_that_is_too_long_is_refused_in_words(window):
    type_and_send(window, "x" * 100_000)
    assert "at most 2000 characters" in window.run("return document.getElementById('status').textContent")
    type_and_send(window, "x" * 300_000)
    assert "may have 200,000 bytes" in window.run("return document.getElementById('status').textContent")
    type_and_send(window, " \n ")
    assert window.run("return document.getElementById('status').textContent") == "Type a sentence first."
    type_and_send(window, "ba\nbe\n\nbi")
    assert window.run("return document.querySelectorAll('#answers section').length") == 3


def test_in_a_browser_nothing_fails_and_nothing_comes_from_elsewhere(window, server):
    errors = [entry["message"] for entry in window.log("browser") if entry["level"] != "INFO"]
    assert all("/translate" in message and re.search("413|422", message) for message in errors), errors
    asked = {address for address in window.requests() if re.match("(http|ws)s?:", address)}  # not those of its first tab
    assert asked and all(address.startswith(server.address) for address in asked)
    window.resize(320, phone=True)
    type_and_send(window, "ba be bi bo ba be bi bo ba be bi bo")
    wide = "return [...document.querySelectorAll('body *')].filter((one) => one.getBoundingClientRect().right > 321 "
    wide += "&& !one.closest('.box')).map((one) => one.outerHTML.slice(0, 200))"
    deadline = time.monotonic() + 10  # the browser lays the page out anew after the window has changed
    while window.run("return document.documentElement.scrollWidth") > 320:
        assert time.monotonic() < deadline, window.run(wide)
        time.sleep(0.05)


@pytest.mark.skipif(bool(NO_AXE), reason=NO_AXE)
@pytest.mark.parametrize("width", WIDTHS)
def test_in_a_browser_axe_finds_nothing(window, width):
    type_and_send(window, "ba bebe bi\nba\x01")
    assert violations(window, width) == []


def test_a_run_that_cannot_be_loaded_is_one_line(tmp_path):
    done = run_here("serve.py", "--out", tmp_path, "port=0")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"error: .*averaged/model.safetensors is missing; train to the end, .*\n", done.stderr)
