"""The page at /: what it may load, and what a reader sees of it in Chromium."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from rag_jax.citation import Citation
from rag_jax.serving import page, results
from rag_jax.serving.results import Ask, Choice, Chunks, Completion
from rag_jax.types import Answer, Evidence

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
TOKENS = ["Li", "ma", "</s>"]
# Answers, with a passage for each and the sentence of it in which the answer stands.
SCRIPTS = {"Lim": ("Lima is far. Lim is not. Limbo is.", "Lim is not."),
           "利马": ("水稻生长。首都是利马市。雨很少。", "首都是利马市。"),
           "リマ": ("米を作る。首都はリマである。雨は少ない。", "首都はリマである。"),
           "Li": ("首都是Li市。雨很少。", "首都是Li市。"),
           "เมืองหลวง": ("กรุงเทพเป็นเมืองหลวงของไทย", "กรุงเทพเป็นเมืองหลวงของไทย"),
           "राम": ("रामायण लंबी है। राम आया। रामी नहीं।", "राम आया।"),
           "한국": ("물이 깊다. 한국은 동쪽에 있다.", "한국은 동쪽에 있다."),
           "cafe": ("Two cafe\u0301s closed. One cafe is left.", "One cafe is left."),
           "5": ("It is 3.5 m long. It is 5,000 m high. They are 5. And 15 left.", "They are 5."),
           "1,500": ("There were 11,500 men. Then 1,500 came.", "Then 1,500 came."),
           "๕": ("มี ๑๕ คน. มี ๕ คน.", "มี ๕ คน."), "٥": ("طوله ٣٫٥ متر. هم ٥.", "هم ٥."),
           "café": ("One is far. The cafe\u0301 is near.", "The café is near.")}


class Tokenizer:
    end = 2

    def decode(self, ids):
        return "".join(TOKENS[i] for i in ids if i < 2)

    decode_settled = decode


def evidence():
    text = f"Rice grows there. The capital is Lima. Rain is rare. {HOSTILE}"
    return [Evidence("p/1", HOSTILE, text, 0.25, 0.9,
                     source=Citation("my atlas.pdf", (0, 9), (3, 4), ("Peru", "Cities"))),
            Evidence("p/2", "Chile", "Santiago lies inland.", 0.75, 0.1)]


def choices(question):
    rows = [[0.9, 0.1], [0.95, 0.05], [0.85, 0.15]]
    best = Answer("Lima", [0, 1, 2], -0.1, evidence(), [-0.04, -0.03, -0.03], rows, certified=True,
                  tokens=TOKENS, alternatives=[])
    if (answer := question.removesuffix("?")) in SCRIPTS:
        first, second = best.passages
        first = first._replace(text=SCRIPTS[answer][0])
        best = best._replace(text=answer, passages=[first, second])
    other = best._replace(text="Li", log_prob=-3.0, certified=False)
    return [Choice(best, "stop", 2), Choice(other, "stop", 2)]


SERVER = {"ready": True, "model": "rag_token", "current": "2018", "open": ["2016", "2018"],
          "there": ["2014", "2016", "2018"], "answers": 2, "programs": ["search"]}


def stub(asked, gates=(), server=SERVER):
    """The server that the page asks, of one scripted model; notes what it was asked.

    gates: an event that a slow answer has begun, and one that lets it go on.
    server: what it says of itself.
    """
    async def chat(request):
        body = await request.json()
        asked.append((request.headers.get("authorization"), body))
        if "?" not in body["messages"][0]["content"]:
            return JSONResponse({"error": {"message": f"no question {HOSTILE}"}}, 422)
        question = body["messages"][0]["content"]
        made = Completion("rag_token", "2018:1", 3, "Zebra" not in question, False, Tokenizer(),
                          lambda answer: [])
        lines = [*map(json.dumps, Chunks(made, Ask(n=2), False).rest(choices(question))), "[DONE]"]
        if "fails?" in question:
            lines = [lines[0], json.dumps({"error": {"message": f"too late {HOSTILE}"}})]

        def sent():
            for number, line in enumerate(lines):
                if number == 2 and "Slow?" in question:
                    begun, gate = gates
                    begun.set()
                    gate.wait(60)
                yield f"data: {line}\n\n"

        return StreamingResponse(sent(), media_type="text/event-stream")

    async def ready(request):
        if server["ready"] is None:
            return HTMLResponse("<html><h1>502 Bad Gateway</h1></html>", 502)
        return JSONResponse({"ready": server["ready"], "compiled": 1, "programs": 2},
                            200 if server["ready"] else 503)

    async def memory(request):
        return JSONResponse({name: value for name, value in server.items() if name != "ready"})

    async def models(request):
        return JSONResponse({"data": [{"id": server["model"]}]})

    async def retrieve(request):
        asked.append(await request.json())
        return JSONResponse({"version": "2018:1", "matched": False,
                             "passages": [results.passage(each) for each in evidence()]})

    return Starlette(routes=[
        *page.routes(), Route("/ready", ready), Route("/memory", memory),
        Route("/v1/models", models), Route("/retrieve", retrieve, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"])])


def files():
    client = TestClient(stub([]))
    return {name: client.get(f"/{path}") for path, (name, _) in page.FILES.items()}


def test_a_browser_may_load_nothing_but_the_three_files():
    for name, response in files().items():
        assert response.status_code == 200
        assert response.headers["content-type"].startswith(dict(page.FILES.values())[name])
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy and "*" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?:|@import|url\(|[\"'(]//", response.text), name


def test_nothing_that_is_sent_becomes_html():
    texts = {name: response.text for name, response in files().items()}
    script, html = texts["page.js"], texts["page.html"]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|"
                         r"\beval\b|\bFunction\(|setAttribute\([\"']on|\.href|\.src\b", script)
    assert not re.search(r"<script>|\son\w+=|style=|javascript:", html)
    named = set(re.findall(r'\$\("(\w+)"\)', script))
    assert len(named) > 15 and named <= set(re.findall(r'\bid="(\w+)"', html))


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_small_probabilities_are_short():
    """1e-38 was shown with all its zeros."""
    script = files()["page.js"].text
    begin = script[script.index("const digits ="):script.index("const sentences =")]
    shown = subprocess.run(["node", "-e", begin + (
        "console.log([0, 1e-38, 9e-6, 1e-5, 0.12345, 1].map(percent).join(' '))")],
        capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["0%", "<0.001%", "<0.001%", "0.001%", "12.3%", "100%"]
    assert "digits.format" not in script.replace(begin, ""), "it is shown so everywhere"


def test_answers_are_not_said_to_be_ordered_by_what_a_penalty_may_outweigh():
    assert "<h3>Answers, best first</h3>" in files()["page.html"].text


@contextlib.contextmanager
def running(app):
    """The address of an application that listens."""
    listening = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=web.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    finally:
        web.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def chromium():
    sync_api = pytest.importorskip("playwright.sync_api")
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def asked():
    return []


@pytest.fixture
def gates():
    return threading.Event(), threading.Event()


@pytest.fixture
def server():
    return dict(SERVER)


@pytest.fixture
def opened(chromium, asked, gates, server):
    """The page, of a phone's width; nothing may be said in its console but refused requests."""
    said = []
    with running(stub(asked, gates, server)) as address:
        tab = chromium.new_page(viewport={"width": 360, "height": 740})
        tab.on("console", lambda told: said.append(told.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(address)
        tab.wait_for_selector("#ask:enabled")
        yield tab
        tab.close()
    assert [each for each in said if not re.search("status of (422|50[23])", each)] == []


def test_a_question_is_asked_by_keyboard_and_its_evidence_shown_as_text(opened, asked):
    opened.keyboard.type("Which capital?")  # the field has the focus
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#passages li")
    assert opened.text_content("#answer") == "Lima"
    assert "certified" in opened.text_content("#facts")
    first, second = opened.query_selector_all("#passages li")
    assert f"1. {HOSTILE}" in first.text_content()
    assert "my atlas.pdf, pages 3 to 4, Peru to Cities" in first.text_content()
    assert opened.title() == "rag_jax" and opened.query_selector("img") is None
    assert first.query_selector("mark").text_content() == "The capital is Lima."
    assert [share.text_content() for share in second.query_selector_all("output")] == ["75%", "10%"]
    opened.focus("summary")
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#map tbody td")
    assert opened.text_content("#map tbody tr td") == "90"
    opened.click("#alternatives li:nth-child(2) button")
    assert opened.text_content("#answer") == "Li"
    assert opened.evaluate("document.documentElement.scrollWidth") <= 360
    (token, body), = asked
    assert token is None and body["n"] == 2
    assert "memory" not in body, "after a swap, the earlier one would have been asked"


def test_an_index_is_chosen_and_a_refusal_shown_as_text(opened, asked):
    assert [each.is_disabled() for each in opened.query_selector_all("option")] == [
        True, False, False]
    opened.select_option("#memory", "2016")
    opened.fill("#question", "no mark")
    opened.click("#ask")
    opened.wait_for_selector("#problem:not([hidden])")
    assert opened.text_content("#problem") == f"no question {HOSTILE}"
    assert opened.title() == "rag_jax" and asked[0][1]["memory"] == "2016"
    opened.fill("#question", "What fails?")  # in the middle of a stream
    opened.click("#ask")
    opened.wait_for_selector("#problem:not([hidden])")
    assert opened.text_content("#problem") == f"too late {HOSTILE}"


def test_a_memory_that_was_chosen_stays_when_the_server_is_asked_again(opened):
    """Who left the field of the token was answered from another memory than the chosen one."""
    opened.select_option("#memory", "2016")
    opened.evaluate("document.querySelector('option').dataset.before = 1")
    opened.evaluate("document.getElementById('token').dispatchEvent(new Event('change'))")
    opened.wait_for_selector("option[data-before]", state="detached")
    assert opened.input_value("#memory") == "2016"


def test_the_memory_that_has_answered_is_shown_where_none_was_chosen(opened):
    """After a swap, the field still named the earlier one."""
    opened.evaluate("document.getElementById('memory').value = '2016'")  # which was the current one
    opened.fill("#question", "Which?")
    opened.click("#ask")
    opened.wait_for_selector("#memory option:checked[value='2018']", state="attached")


def test_a_token_that_no_request_can_carry_is_told(opened, asked):
    """Whoever pasted an ellipsis read that the server had ended."""
    opened.evaluate("document.getElementById('tokens').hidden = false")
    opened.fill("#token", "s3cret…")
    opened.fill("#question", "Which?")
    opened.click("#ask")
    opened.wait_for_selector("#problem:not([hidden])")
    assert 'The token has "…"' in opened.text_content("#problem") and not asked


@pytest.mark.parametrize("answer", SCRIPTS)
def test_the_sentence_of_the_answer_is_marked_in_every_script(opened, answer):
    """Where no spaces part words, a letter stands beside every answer, and none was marked."""
    opened.fill("#question", f"{answer}?")
    opened.click("#ask")
    opened.wait_for_selector("#passages mark")
    assert [each.text_content() for each in opened.query_selector_all("mark")] == [
        SCRIPTS[answer][1]]


def test_an_earlier_answer_is_read_while_the_next_one_comes(opened, gates):
    """The next one's text stood above the passages of the earlier, whose place it then took; and
    one that was shown no more was still marked."""
    opened.fill("#question", "First?")
    opened.click("#ask")
    opened.wait_for_selector("#history button[aria-pressed=true]")
    opened.fill("#question", "no mark")
    opened.click("#ask")
    opened.wait_for_selector("#problem:not([hidden])")
    assert opened.query_selector("#history button[aria-pressed=true]") is None
    opened.fill("#question", "Slow?")
    opened.click("#ask")
    begun, gate = gates
    assert begun.wait(60)
    opened.click("#history button")
    assert opened.is_hidden("#problem") and opened.text_content("#asked") == "First?"
    assert opened.get_attribute("#answer", "aria-busy") == "false", "another one is being written"
    focused = "document.activeElement.closest('#history li').textContent"
    assert opened.evaluate(focused).startswith("First?")
    gate.set()
    opened.wait_for_selector("#history li:nth-child(2)")
    assert opened.evaluate(focused).startswith("First?")
    assert opened.text_content("#asked") == "First?" and opened.text_content("#answer") == "Lima"
    opened.click("#history li:nth-child(1) button")
    assert opened.text_content("#asked") == "Slow?"


def test_a_question_that_is_stopped_while_another_is_read_is_named(opened, gates):
    """"Stopped." stood above the whole answer of the earlier one; and the focus was gone."""
    opened.fill("#question", "First?")
    opened.click("#ask")
    opened.wait_for_selector("#history button[aria-pressed=true]")
    opened.fill("#question", "Slow?")
    opened.click("#ask")
    begun, gate = gates
    assert begun.wait(60)
    assert opened.get_attribute("#answer", "aria-busy") == "true"
    opened.click("#history button")
    opened.focus("#stop")
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#problem:not([hidden])")
    gate.set()
    assert opened.text_content("#problem") == "Slow?: Stopped."
    assert opened.evaluate("document.activeElement.id") == "question"


def test_an_open_page_notes_that_another_server_answers(opened, asked, server):
    """Until it was loaded again, it asked for too many answers, for a model and a memory that were
    gone, or for passages alone."""
    opened.select_option("#memory", "2016")
    server.update(open=["2018"], there=["2018"], model="other", answers=1)
    opened.fill("#question", "Which?")
    opened.click("#ask")
    opened.wait_for_selector("#problem:not([hidden])")
    assert opened.text_content("#problem") == (
        "The memory 2016 is not open any more: choose another.")
    opened.click("#ask")
    opened.wait_for_selector("#history button")
    (_, body), = asked
    assert (body["n"], body["model"], body.get("memory")) == (1, "other", None)
    assert opened.input_value("#memory") == "2018"
    opened.click("summary")
    opened.wait_for_selector("#map tbody td")
    server["programs"] = ["retrieve"]
    opened.fill("#question", "Which else?")
    opened.click("#ask")
    opened.wait_for_selector("#history li:nth-child(2)")
    assert asked[1:] == [{"question": "Which else?"}]
    assert opened.text_content("#ask") == "Find passages"
    assert opened.text_content("#facts").startswith("passages: 2 · no passage has a word of this")
    server["programs"] = ["search"]
    opened.click("#ask")
    opened.wait_for_selector("#history li:nth-child(3)")
    assert opened.text_content("#ask") == "Ask" and opened.text_content("#answer") == "Lima"


def test_a_server_that_was_started_anew_is_waited_for(opened, asked, server):
    """The page said only where others may see when it is ready; and behind a proxy, that the
    proxy's page is no JSON."""
    server["ready"] = False
    opened.fill("#question", "Which?")
    opened.focus("#ask")
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#state:not([hidden])")
    assert opened.text_content("#state") == "The model is being compiled: 1 of 2 programs."
    assert opened.evaluate("document.activeElement.id") == "ask"
    opened.click("#stop")
    opened.wait_for_selector("#problem:not([hidden])")
    assert opened.text_content("#problem") == "Stopped." and opened.is_hidden("#state")
    opened.select_option("#memory", "2016")
    opened.click("#ask")
    opened.wait_for_selector("#state:not([hidden])")
    opened.select_option("#memory", "2018")
    server["ready"] = True
    opened.wait_for_selector("#history button")
    assert opened.is_hidden("#state") and opened.is_hidden("#problem")
    (_, body), = asked
    assert body["memory"] == "2016", "which was chosen when it was asked"
    server["ready"] = None
    opened.click("#ask")
    opened.wait_for_selector("#problem:not([hidden])")
    assert opened.text_content("#problem") == "The server answered with status 502."


def test_a_memory_whose_folder_is_gone_is_shown_while_it_is_open(opened, server):
    """Another one was shown as the chosen one."""
    server["there"] = ["2018"]
    opened.select_option("#memory", "2016")
    opened.fill("#question", "Which?")
    opened.click("#ask")
    opened.wait_for_selector("#history button")
    assert opened.input_value("#memory") == "2016"


def test_the_focus_does_not_leave_with_the_oldest_answer(opened):
    """The focus was gone with the button."""
    for number in range(100):
        opened.fill("#question", f"{number}?")
        opened.keyboard.press("Enter")
        opened.wait_for_selector(f"#history li:nth-child({number + 1})")
    opened.focus("#history li:last-child button")
    opened.evaluate("document.getElementById('form').requestSubmit()")
    opened.wait_for_selector("#question:focus")
    assert len(opened.query_selector_all("#history li")) == 100


def test_passages_that_no_word_has_found_are_said_to_be_so(opened, asked):
    opened.fill("#question", "  ")
    opened.keyboard.press("Enter")
    opened.evaluate("document.querySelector('#question').value = 'Zebra\u2028?'")
    opened.keyboard.press("Enter")
    opened.wait_for_selector("#passages li")
    assert "no passage has a word of this question" in opened.text_content("#facts")
    assert [body["messages"][0]["content"] for _, body in asked] == ["Zebra\u2028?"]
    assert opened.evaluate("document.querySelector('#question').matches(':valid')")
    opened.fill("#question", "  ")
    assert opened.evaluate("document.querySelector('#question').matches(':invalid')")
