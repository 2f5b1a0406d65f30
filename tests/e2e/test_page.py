"""The web page at /: its headers by plain HTTP, and what it does in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from selenium.webdriver import Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from rvllm.api.page import policy
from tests.fixtures.browser import chromium
from tests.fixtures.commands import LIMIT_S
from tests.fixtures.engines import until
from tests.fixtures.models import EOS, Options, TinyModel, chain_model, loop_model
from tests.fixtures.servers import Server, serving, starting

EVIL = "<img src=x onerror=document.title='evil'>"
ANSWER = (EVIL, "\n```js\n", "let a = 1;", "\n```\n", "done", EOS)
KEY = "a-secret"
ASK = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its answer to a chat is HTML, code and a word; it has two names."""
    model = chain_model(tmp_path_factory.mktemp("model"), ANSWER)
    names = ("--served-model-name", "m1", "--served-model-name", "m2")
    with serving(model.folder, *names, "--max-model-len", "1024", folder=tmp_path_factory.mktemp("server")) as started:
        yield started


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return loop_model(tmp_path_factory.mktemp("endless"), options=Options(max_positions=100_000))


@pytest.fixture(scope="module")
def keyed(endless: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It wants a key, writes a without end, is mounted at /llm, and has two fronts."""
    flags = ("--api-key", KEY, "--root-path", "/llm", "--api-server-count", "2")
    with serving(endless.folder, *flags, folder=tmp_path_factory.mktemp("keyed")) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    with chromium() as made:
        yield made


def one(browser: Chrome, selector: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, selector)


def text(browser: Chrome, selector: str) -> str:
    """The whole text, as it is in the document; nothing where there is no such element."""
    found: str = browser.execute_script(
        "const found = document.querySelectorAll(arguments[0]);"
        "return found.length ? found[found.length - 1].textContent : ''",
        selector,
    )
    return found


def soon(condition: Callable[[], Any]) -> None:
    until(lambda: bool(condition()), LIMIT_S)


def state(browser: Chrome) -> str:
    return str(one(browser, "body").get_attribute("data-state"))


def opened(browser: Chrome, server: Server, path: str = "/", expected: str = "ready") -> None:
    """The page, without what earlier ones left."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)
    browser.get(f"http://127.0.0.1:{server.port}{path}")
    soon(lambda: state(browser) == expected)


def say(browser: Chrome, words: str) -> None:
    one(browser, "#prompt").send_keys(words, Keys.ENTER)


def asked_urls(browser: Chrome) -> list[str]:
    """Where the page has sent requests since it was opened."""
    told = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [one["params"]["request"]["url"] for one in told if one["method"] == "Network.requestWillBeSent"]


# --- By plain HTTP


def test_the_page_is_html_that_may_load_nothing_and_be_framed_by_nobody(server: Server) -> None:
    page = server.send("GET", "/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.strip().split(" ", 1) for rule in page.headers["content-security-policy"].split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["frame-ancestors"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["img-src"] == "data:"
    assert all(rules[kind].startswith("'sha256-") for kind in ("style-src", "script-src"))
    assert "unsafe" not in page.headers["content-security-policy"]
    assert (page.headers["x-content-type-options"], page.headers["referrer-policy"]) == ("nosniff", "no-referrer")
    assert len(page.body) < 25_600
    head = server.send("HEAD", "/")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(page.body)))


def test_the_page_is_sent_again_only_when_it_has_changed(server: Server) -> None:
    etag = server.send("GET", "/").headers["etag"]
    for known in (etag, f'"other", W/{etag}', "*"):
        again = server.send("GET", "/", headers={"if-none-match": known})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag), known
    assert server.send("GET", "/", headers={"if-none-match": '"other"'}).status == 200


def test_the_page_is_at_the_root_and_nowhere_else(server: Server) -> None:
    for path in ("/nothing", "//", "/page.html", "/index.html", "/v1/"):
        assert server.send("GET", path).status == 404, path
    assert server.send("POST", "/", {}).status == 405


def test_the_page_needs_no_key_and_all_else_does(keyed: Server) -> None:
    for path in ("/", "/llm/"):
        assert keyed.send("GET", path).status == 200, path
    for path in ("/metrics", "/v1/models", "/version", "/load", "/nothing"):
        assert keyed.send("GET", path).status == 401, path


def test_without_the_page_there_is_nothing_at_the_root(endless: TinyModel, tmp_path: Path) -> None:
    with starting(endless.folder, "--disable-web-page", folder=tmp_path / "server") as bare:
        assert bare.send("GET", "/").status == 404


def test_another_script_has_another_hash() -> None:
    page = "<style>a</style><script>{}</script>"
    assert policy(page.format("b")) != policy(page.format("c")) == policy(page.format("c"))


# --- In a browser


def test_a_chat_is_streamed_as_text_and_all_requests_go_to_the_server(server: Server, browser: Chrome) -> None:
    opened(browser, server)
    browser.execute_script(
        "window.lengths = new Set(); new MutationObserver(() => {"
        "  const answer = document.querySelector('.answer'); if (answer) lengths.add(answer.textContent.length);"
        "}).observe(document.getElementById('log'), {subtree: true, childList: true, characterData: true})"
    )
    one(browser, "#temperature").send_keys("0")
    say(browser, "hi")
    soon(lambda: "tokens" in text(browser, ".meta"))
    plain = server.post("/v1/chat/completions", **ASK).json["choices"][0]["message"]["content"]
    assert plain == "".join(ANSWER[:-1])
    parts = [(part.tag_name, text(browser, f".answer > :nth-child({place + 1})")) for place, part in
             enumerate(browser.find_elements(By.CSS_SELECTOR, ".answer > *"))]  # fmt: skip
    assert parts == [("div", EVIL), ("pre", "let a = 1;"), ("div", "done")]
    assert not browser.find_elements(By.CSS_SELECTOR, "#log img") and browser.title == "m1 · rvllm"
    assert len(browser.execute_script("return [...lengths]")) >= 2
    assert "6 tokens · " in text(browser, ".meta") and "first after" in text(browser, ".meta")
    assert {urlsplit(url).netloc for url in asked_urls(browser) if not url.startswith("data:")} == {
        f"127.0.0.1:{server.port}"
    }
    assert browser.get_log("browser") == []


def test_the_next_turn_brings_those_before_and_a_new_chat_none(server: Server, browser: Chrome) -> None:
    opened(browser, server)
    browser.execute_script(
        "window.bodies = []; const plain = fetch; window.fetch = (path, how) => {"
        "  if (how.body) bodies.push(JSON.parse(how.body)); return plain(path, how); }"
    )
    one(browser, "#system").send_keys("Be brief.")
    one(browser, "#max_tokens").send_keys("1")
    assert one(browser, "#model").is_displayed()
    one(browser, "#model").send_keys("m2")
    for words in ("one", "two"):
        say(browser, words)
        soon(lambda: "limit" in text(browser, ".turn:last-child .meta"))
    one(browser, "#fresh").click()
    assert one(browser, "#hello").is_displayed() and text(browser, ".turn") == ""
    say(browser, "three")
    soon(lambda: "limit" in text(browser, ".meta"))
    bodies = browser.execute_script("return bodies")
    said = [[message["content"] for message in body["messages"]] for body in bodies]
    assert said == [["Be brief.", "one"], ["Be brief.", "one", EVIL, "two"], ["Be brief.", "three"]]
    assert {body["model"] for body in bodies} == {"m2"} and {body["max_tokens"] for body in bodies} == {1}


def test_a_wrong_request_is_told_and_may_be_sent_again(server: Server, browser: Chrome) -> None:
    opened(browser, server)
    one(browser, "#top_p").send_keys("7")
    say(browser, "once more")
    soon(lambda: "top_p" in text(browser, ".error"))
    assert one(browser, "#prompt").get_attribute("value") == "once more" and state(browser) == "ready"


def test_the_card_and_the_chart_show_what_the_server_does(server: Server, browser: Chrome) -> None:
    opened(browser, server)
    for name, value in (("context", "1,024 tokens"), ("device", "cpu"), ("weights", "bf16"), ("computes-in", "f32")):
        assert text(browser, f"#card-{name}") == value
    figures = server.send("GET", "/metrics").body.decode()
    size, blocks = (int(re.findall(rf'{name}="(\d+)"', figures)[0]) for name in ("block_size", "num_gpu_blocks"))
    assert text(browser, "#card-kv-room") == f"{size * blocks:,} tokens"
    say(browser, "hi")
    soon(lambda: float(one(browser, "#chart-generated").get_attribute("data-top") or 0) > 1)
    soon(lambda: float(one(browser, "#chart-prompt").get_attribute("data-top") or 0) > 1)
    assert browser.find_elements(By.CSS_SELECTOR, "#chart-generated path.line")
    soon(lambda: "tokens/s" in text(browser, "#card-speed"))


def test_counters_that_fall_leave_a_gap_and_no_spike(server: Server, browser: Chrome) -> None:
    opened(browser, server)
    shown = browser.execute_script(
        "polling++; points.length = 0; last = null; let now = 1000; performance.now = () => now;"
        "const told = n => new Map([['vllm:generation_tokens_total', [{labels: {}, value: n}]]]);"
        "for (const n of [50000, 50010, 50020, 3, 8]) { follow(told(n)); now += 1000; }"
        "now += 60000; follow(told(90000));"
        "return points.map(one => one.generated)"
    )
    assert shown == [None, 10, 10, None, 5, None]
    assert one(browser, "#chart-generated").get_attribute("data-top") == "10"
    assert len(browser.find_elements(By.CSS_SELECTOR, "#chart-generated path.line")) == 2


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(keyed: Server, browser: Chrome) -> None:
    opened(browser, keyed, "/llm/", "key")
    assert browser.switch_to.active_element == one(browser, "#key") and "key" in text(browser, "#notice")
    one(browser, "#key").send_keys("wrong", Keys.ENTER)
    soon(lambda: text(browser, "#state") == "the key is wrong")
    one(browser, "#key").clear()
    one(browser, "#key").send_keys(KEY, Keys.ENTER)
    soon(lambda: state(browser) == "ready")
    assert text(browser, "#notice") == ""
    kept = browser.execute_script("return [{...sessionStorage}, {...localStorage}, location.href, document.cookie]")
    assert kept[:2] == [{"rvllm-key": KEY}, {}] and KEY not in kept[2] and kept[3] == ""
    urls = asked_urls(browser)
    assert not any(KEY in url for url in urls)
    assert {urlsplit(url).path for url in urls if not url.startswith("data:")} >= {"/llm/", "/llm/metrics"}


@pytest.mark.parametrize("by", ["button", "escape"])
def test_a_stopped_answer_frees_its_request_and_stays(keyed: Server, browser: Chrome, by: str) -> None:
    browser.get(f"http://127.0.0.1:{keyed.port}/llm/")
    browser.execute_script("sessionStorage.setItem('rvllm-key', arguments[0])", KEY)
    opened(browser, keyed, "/llm/")
    say(browser, "hi")
    soon(lambda: len(text(browser, ".answer")) > 20)
    assert keyed.stats().load.running == 1 and not one(browser, "#send").is_displayed()
    if by == "button":
        one(browser, "#stop").click()
    else:
        one(browser, "#prompt").send_keys(Keys.ESCAPE)
    soon(lambda: "stopped" in text(browser, ".meta"))
    soon(lambda: keyed.stats().load.running == 0)
    assert set(text(browser, ".answer")) == {"a"} and one(browser, "#send").is_displayed()
    assert browser.switch_to.active_element == one(browser, "#prompt")


def answered(browser: Chrome, *pieces: str) -> None:
    """Ask, and have the page read these pieces of a stream in place of the server's."""
    browser.execute_script(
        "window.plain ??= fetch; const pieces = arguments[0]; window.fetch = (path, how) => {"
        "  if (!how.body) return plain(path, how);"
        "  const body = new ReadableStream({async start(to) { for (const piece of pieces) {"
        "    to.enqueue(new TextEncoder().encode(piece)); await new Promise(done => setTimeout(done, 5)); } to.close(); }});"
        "  return Promise.resolve(new Response(body)); }",
        pieces,
    )
    say(browser, "hi")
    soon(lambda: one(browser, "#send").is_displayed() and text(browser, ".turn:last-child .meta") != "")


def delta(**more: Any) -> str:
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": more, "finish_reason": None}]}) + "\n\n"


def test_thoughts_and_calls_are_shown_apart_however_a_stream_is_cut(server: Server, browser: Chrome) -> None:
    opened(browser, server)
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at":'}}
    whole = (
        delta(role="assistant", content="")
        + delta(reasoning="<b>hm", reasoning_content="<b>hm")
        + ": nothing yet\n\n"
        + delta(content="yes")
        + delta(tool_calls=[call])
        + delta(tool_calls=[{"index": 0, "function": {"arguments": ' "x"}'}}])
        + "data: [DONE]\n\n"
    )
    answered(browser, *(whole[at : at + 7] for at in range(0, len(whole), 7)))
    assert text(browser, ".thoughts div") == "<b>hm" and not one(browser, ".thoughts").get_attribute("open")
    assert (text(browser, ".answer"), text(browser, ".calls")) == ("yes", 'look({"at": "x"})')
    assert not browser.find_elements(By.CSS_SELECTOR, ".error")


@pytest.mark.parametrize(
    ("end", "told"),
    [("", "the connection broke off"), ('data: {"error": {"message": "the engine died"}}\n\n', "the engine died")],
)
def test_a_stream_that_ends_badly_keeps_what_came_and_says_why(
    server: Server, browser: Chrome, end: str, told: str
) -> None:
    opened(browser, server)
    answered(browser, delta(content="half"), end)
    assert (text(browser, ".answer"), text(browser, ".error")) == ("half", told)


def children(pid: int) -> list[int]:
    """Those that run a program of their own: one stopped before would hold up its parent, which waits for that."""
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]
    ours = Path(f"/proc/{pid}/cmdline").read_bytes()
    return [child for child in found if Path(f"/proc/{child}/cmdline").read_bytes() not in (ours, b"")]


def test_a_page_that_was_there_before_the_model_waits_for_it(
    endless: TinyModel, tmp_path: Path, browser: Chrome
) -> None:
    with starting(endless.folder, folder=tmp_path / "server") as early:
        early.told("listening")
        soon(lambda: children(early.process.pid))
        engines = children(early.process.pid)
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        try:
            opened(browser, early, expected="loading")
            assert not one(browser, "#send").is_enabled() and "load" in text(browser, "#state")
        finally:  # a process that is stopped would outlive the server
            for engine in engines:
                os.kill(engine, signal.SIGCONT)
        soon(lambda: state(browser) == "ready")
        assert one(browser, "#send").is_enabled() and text(browser, "#card-context") == "100,000 tokens"


def test_a_server_that_went_away_is_told_and_its_successor_is_found(
    endless: TinyModel, tmp_path: Path, browser: Chrome
) -> None:
    with serving(endless.folder, folder=tmp_path / "first") as ending:
        opened(browser, ending)
        port = ending.port
        ending.process.kill()
        soon(lambda: state(browser) == "away")
        assert not one(browser, "#send").is_enabled()
    with serving(endless.folder, "--port", str(port), folder=tmp_path / "second"):
        soon(lambda: state(browser) == "ready")


def test_a_narrow_page_shows_the_chat_or_the_details(server: Server) -> None:
    with chromium("--window-size=520,800") as narrow:
        opened(narrow, server)
        assert one(narrow, "#prompt").is_displayed() and not one(narrow, "#card").is_displayed()
        one(narrow, "#more").click()
        assert one(narrow, "#card").is_displayed() and one(narrow, "#more").get_attribute("aria-expanded") == "true"
        wide = narrow.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0
