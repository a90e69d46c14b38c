"""The live page in a real browser: tabs, figures, chat, keyboard, colours, and hostile texts."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.thread import AsyncEngine
from forerun.server.app import create_app

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)
TIMEOUT_MS = 120_000
playwright.expect.set_options(timeout=TIMEOUT_MS)  # the machine may be busy
HOSTILE = (
    "<img src=x onerror=\"document.title='changed'\"><script>document.title='changed'</script>"
)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server over the shipped pair, on a free port of this machine."""
    # "auto" drafts only where that pays by the times of the machine.
    config = EngineConfig(max_batch=4, controller="fixed", num_speculative_tokens=4)
    engine = Engine.load("zoo:code-11m", draft="zoo:code-2m", dtype="float32", config=config)
    engine.tokenizer.use_chat_template("{{ messages | map(attribute='content') | join('\\n') }}")
    app = create_app(AsyncEngine(engine), "zoo:code-11m")
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(300.0)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield found
        found.close()


@pytest.fixture
def page(browser, address):
    """The page, loaded; any message of the console and any request elsewhere fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    opened = context.new_page()
    opened.set_default_timeout(TIMEOUT_MS)
    problems: list[str] = []
    opened.on("console", lambda message: problems.append(message.text))
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "request",
        lambda request: None if request.url.startswith(address) else problems.append(request.url),
    )
    opened.goto(f"{address}/")
    playwright.expect(opened.locator("#setup")).to_contain_text("code-11m")
    yield opened
    context.close()
    assert problems == []


def complete(address: str, prompt: str, max_tokens: int = 48) -> str:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60.0)
    answer.raise_for_status()
    return answer.json()["choices"][0]["text"]


def shown(page, selector: str):
    return playwright.expect(page.locator(selector))


def go_to(page, tab: str) -> None:
    page.click(f"#tab-{tab}")
    shown(page, f"#{tab}").to_be_visible()


def ask(page, text: str, **parameters: object) -> None:
    """Send a message in the chat."""
    go_to(page, "chat")
    if not page.locator("#system").is_visible():
        page.click("#settings summary")
    for name, value in parameters.items():
        page.fill("#" + name.replace("_", "-"), str(value))
    page.fill("#message", text)
    page.click("#send")


def test_figures_of_a_request_are_shown(page, address):
    text = complete(address, "import os\n\ndef first(path):", 64)
    for figure in ("tau", "rate", "ttft-p50", "ttft-p95", "gap-p50", "gap-p95", "prefix"):
        shown(page, f"#{figure}").to_have_text(re.compile(r"\d"))
    shown(page, "#chart-positions svg").to_have_attribute("aria-label", re.compile("position 1"))
    shown(page, "#chart-rate path.line, #chart-rate circle").not_to_have_count(0)
    go_to(page, "requests")
    newest = page.locator("tr.request").first
    playwright.expect(newest.locator("td").nth(4)).to_have_text("64")
    playwright.expect(newest.locator("td").nth(2)).to_have_text(re.compile(r"\d+ (s|min)"))
    playwright.expect(newest.locator(".head")).to_have_text("import os def first(path):")
    messages = [
        {"role": "system", "content": "You are of few words. " * 20},
        {"role": "user", "content": [{"type": "text", "text": "Which way?"}]},
        {"role": "assistant", "content": "Up."},
        {"role": "user", "content": "And then?"},
    ]
    body = {"messages": messages, "max_tokens": 3}
    httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60.0).raise_for_status()
    playwright.expect(page.locator(".head").first).to_have_text("And then?")
    newest = page.locator("tr.request").nth(1)
    newest.locator(".head").click()
    detail = page.locator("tr.detail").nth(1)
    playwright.expect(detail.locator(".origin.accepted")).not_to_have_count(0)
    pieces = detail.locator(".origin:not(.prompt)")
    assert "".join(pieces.all_text_contents()) == text


def test_one_tab_is_shown_at_a_time(page):
    for name in ("chat", "requests", "diagnosis", "live"):
        go_to(page, name)
        shown(page, "[role=tabpanel]:visible").to_have_count(1)
        shown(page, "[role=tab][aria-selected=true]").to_have_id(f"tab-{name}")
        assert page.url.endswith(f"#{name}")
    page.focus("#tab-live")
    page.keyboard.press("ArrowRight")
    shown(page, "#chat").to_be_visible()
    page.reload()
    shown(page, "#chat").to_be_visible()


def snapshot_with(page, **changes: object) -> None:
    """Show the server's snapshots with other figures."""

    def change(route):
        found = route.fetch().json()
        route.fulfill(json=found | changes)

    page.route("**/live", change)
    page.reload()


@pytest.mark.parametrize(
    ("low", "high", "kind"),
    [(1.2, 1.9, "faster"), (0.6, 3.1, "open"), (0.4, 0.9, "slower"), (None, None, "none")],
)
def test_the_speedup_is_one_figure_and_coloured_once_its_interval_clears_1(page, low, high, kind):
    value = None if low is None else (low + high) / 2
    times = {"num_steps": 9, "num_sequences": 1.0, "draft_s": 0.002, "verify_s": 0.007}
    estimate = {"estimate": value, "low": low, "high": high, "share_compared": 1.0}
    cause = {"label": "k_too_small", "score": 0.9, "what": "K is too small."}
    snapshot_with(
        page,
        speedup=value and estimate | {"plain_token_s": value * 0.01},
        token_times=times | {"other_s": 0.001},
        diagnosis={"verdict": "problem", "headline": "Problem.", "num_request_steps": 99}
        | {"causes": [cause], "changes": ["Raise K."]},
    )
    shown(page, "#speedup-tile").to_have_attribute("data-kind", kind)
    grey = page.evaluate("() => getComputedStyle(document.querySelector('.muted')).color")
    colour = page.locator("#speedup-tile .value").evaluate("(node) => getComputedStyle(node).color")
    assert (colour == grey) is (kind in ("open", "none"))
    shown(page, "#speedup").to_have_text("–" if value is None else f"{value:.2f}")
    shown(page, "#chart-step svg").to_have_attribute("aria-label", re.compile("10.0 ms"))
    bars = page.locator("#chart-step text").all_text_contents()
    milliseconds = [float(found[1]) for text in bars if (found := re.match(r"([\d.]+) ms", text))]
    assert milliseconds == ([10.0] if value is None else [10.0, pytest.approx(10 * value)])
    everything = page.locator("main").text_content()
    stated = set(re.findall(r"([\d.]+) ?×", everything))
    assert stated == (set() if value is None else {f"{value:.2f}"})


def test_charts_show_the_value_under_the_pointer(page):
    point = {"num_running": 1.0, "acceptance_length": 2.0, "num_speculative_tokens": 3.0}
    history = [
        point | {"age_s": float(age), "tokens_per_s": 10.0 * age, "methods": {"plain": 1}}
        for age in range(50, 0, -1)
    ]
    snapshot_with(page, history=history)
    shown(page, "#chart-rate text").to_contain_text(["0", "200", "400", "600"])  # ticks
    box = page.locator("#chart-rate").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 4 - (box["width"] - 48) / 3, box["y"] + 40)
    shown(page, "#chart-rate .pointer text").to_contain_text("200 per second, 20 s ago")
    page.mouse.move(2, 2)
    shown(page, "#chart-rate .pointer text").to_have_count(0)


def test_nothing_is_coloured_as_good_before_there_are_figures(page):
    none = dict.fromkeys(("speedup", "token_times", "acceptance_length", "diagnosis"))
    latency = dict.fromkeys(("ttft", "gap", "prompt_tokens_per_s", "prefix_hit_share"))
    totals = dict.fromkeys(("num_steps", "num_drafted", "num_accepted", "num_emitted"), 0)
    empty = {"history": [], "positions": [], "requests": [], "totals": totals, "latency": latency}
    snapshot_with(page, **none, **empty)
    shown(page, "#counts").to_contain_text("0 tokens in 0 steps")
    green = page.evaluate(
        """() => {
            const root = getComputedStyle(document.documentElement);
            const probe = document.body.appendChild(document.createElement('i'));
            probe.style.color = root.getPropertyValue('--accent');
            const accent = getComputedStyle(probe).color;
            probe.remove();
            return [...document.querySelectorAll('#live *')]
              .filter((node) => node.offsetParent && node.textContent.trim())
              .filter((node) => getComputedStyle(node).color === accent).length;
        }"""
    )
    assert green == 0
    assert page.locator("#live .bar, #live .area, #live .part-verify").count() == 0
    shown(page, "#speedup").to_have_text("–")


def test_the_chat_streams_tokens_coloured_by_origin(page):
    go_to(page, "chat")
    page.uncheck("#formatted")
    ask(page, "def first(path):", max_tokens=40, system="import os")
    turn = page.locator(".turn").first
    playwright.expect(turn.locator(".note")).to_contain_text("40 tokens in")
    sources = turn.locator(".answer .origin")
    assert "accepted" in {node.get_attribute("data-origin") for node in sources.all()}
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "and then", max_tokens=4)
    body = sent.value.post_data_json
    assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == turn.locator(".answer").text_content()


def test_output_is_bounded_by_the_context(page):
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "x = 1\n" * 100, max_tokens=1023)
    page.click("#stop")
    assert sent.value.post_data_json["max_tokens"] < 1023 - 100
    shown(page, ".turn .agreement >> nth=-1").to_have_text("Stopped.")
    shown(page, ".turn .note >> nth=-1").to_have_text("stopped")
    shown(page, "#send").to_be_enabled()
    assert page.locator("#max-tokens").get_attribute("max") == "1023"


def test_plain_decoding_beside_it_gives_the_same_text_and_alternates_the_order(page):
    first_sides = []
    go_to(page, "chat")
    page.check("#compare")
    for turn in range(2):
        ask(page, "class Node:", max_tokens=24, temperature=0.8)
        found = page.locator(".turn").nth(turn)
        playwright.expect(found.locator(".agreement")).to_contain_text("The texts agree")
        one, other = found.locator(".answer").all_text_contents()
        assert one == other != ""
        first_sides.append(found.locator("h3", has_text="ran first").text_content())
    assert first_sides == ["Plain, ran first", "With speculation, ran first"]


def test_no_pane_goes_on_running_after_an_error(page):
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            status=200,
            content_type="text/event-stream",
            body='data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
            'data: {"error": {"message": "the engine ended"}}\n\n',
        ),
    )
    go_to(page, "chat")
    page.check("#compare")
    ask(page, "class Node:")
    shown(page, ".agreement").to_have_text("Not answered: the engine ended")
    notes = page.locator(".turn .side .note").all_text_contents()
    assert sorted(notes) == ["ended by an error", "not run"]
    shown(page, "#send").to_be_enabled()
    assert page.input_value("#message") == "class Node:"  # to be sent again


def test_texts_are_never_markup(page, address):
    complete(address, HOSTILE, 8)
    go_to(page, "requests")
    shown(page, ".head >> nth=0").to_contain_text("<img")
    page.locator(".head").first.click()
    shown(page, "tr.detail .origin.prompt >> nth=0").to_contain_text("<script>")
    ask(page, HOSTILE, max_tokens=8, temperature=0)
    shown(page, ".turn .note >> nth=-1").to_contain_text("8 tokens in")
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "forerun"


def answer_with(page, text: str, source: str = "accepted") -> None:
    """Answer every chat with a text, two characters a token; a token with "!" is a plain step's."""
    parts = [text[at : at + 2] for at in range(0, len(text), 2)]
    deltas = [
        {
            "delta": {"content": part},
            "token_texts": [part],
            "token_sources": ["plain" if "!" in part else source],
        }
        for part in parts
    ]
    events = [json.dumps({"choices": [delta]}) for delta in deltas]
    usage = {"completion_tokens": len(parts)}
    lines = [*events, json.dumps({"choices": [], "usage": usage}), "[DONE]"]
    body = "".join(f"data: {line}\n\n" for line in lines)
    page.unroute("**/v1/chat/completions")
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(status=200, content_type="text/event-stream", body=body),
    )


MARKDOWN = """# A title

Some **bold**, *slanted __both__* and `code *as is*`; snake_case_name, 2 * 3 * 4, \\*no\\*.

1. one
   - inner
2. two

   ```python
   if a < b:
       pass
   ```
3. three

| a | b |
|---|---|
| 1 | **2** |

[site](https://a.example/x) [bad](javascript:alert(1)) [worse](data:text/html,x) http://b.example/y.

> said
> so

```
<b>open</b>
"""


@pytest.mark.parametrize("coloured", [True, False])
def test_markdown_becomes_elements(page, coloured):
    answer_with(page, MARKDOWN)
    go_to(page, "chat")
    page.set_checked("#coloured", coloured)
    ask(page, "Explain.")
    answer = page.locator(".answer")
    shown(page, ".turn .note").to_contain_text("tokens in")

    def texts(selector: str) -> list[str]:
        return answer.locator(selector).all_text_contents()

    assert texts("h3") == ["A title"]
    assert texts("strong") == ["bold", "both", "2"]
    assert texts("em") == ["slanted both"]
    assert texts("p code") == ["code *as is*"]
    assert texts("pre code") == ["if a < b:\n    pass\n", "<b>open</b>\n"]
    assert answer.locator("ol > li").count() == 3
    assert texts("ol ul > li") == ["inner"]
    assert texts("th, td") == ["a", "b", "1", "2"]
    assert texts("blockquote") == ["said\nso"]
    paragraph = texts("p")[0]
    assert "snake_case_name, 2 * 3 * 4, *no*." in paragraph
    links = answer.locator("a")
    assert [node.get_attribute("href") for node in links.all()] == [
        "https://a.example/x",
        "http://b.example/y",
    ]
    assert {node.get_attribute("rel") for node in links.all()} == {"noopener noreferrer nofollow"}
    assert "[bad](javascript:alert(1))" in texts("p")[-1]
    assert (answer.locator(".origin").count() > 0) is coloured
    page.uncheck("#formatted")
    assert answer.text_content() == MARKDOWN


HOSTILE_MARKDOWN = (
    f'{HOSTILE}\n\n```x"><script>\n{HOSTILE}\n```\n[a](https://x.example/"onmouseover=1) '
    "[b](JavaScript:alert(1)) ![c](https://y.example/p.png) <a href='javascript:1'>d</a>\n"
    "| <i> | b |\n|-|-|"
)


def test_an_answer_is_never_markup(page):
    answer_with(page, HOSTILE_MARKDOWN)
    ask(page, HOSTILE)
    shown(page, ".turn .note").to_contain_text("tokens in")
    assert page.locator("main img, main script, main i, main b").count() == 0
    names = page.evaluate(
        """() => [...document.querySelectorAll('.answer *')].flatMap((node) =>
            [...node.attributes].map((each) => each.name))"""
    )
    assert set(names) <= {"class", "data-origin", "data-language", "href", "rel", "target"}
    hrefs = [node.get_attribute("href") for node in page.locator(".answer a").all()]
    assert all(re.match(r"https?://", href) for href in hrefs)
    assert page.title() == "forerun"


@pytest.mark.parametrize(
    "mark", ["*a ", "**a ", "_a ", "`a ", "[a ", "[a](", "> ", "- ", "| ", "\\*"]
)
def test_long_answers_of_marks_are_formatted_in_bounded_time(page, mark):
    """The work is counted in calls for text, not in seconds."""
    found = page.evaluate(
        """async (text) => {
            const { markdown } = await import('/page/markdown.js');
            let drawn = 0;
            const made = markdown(text, (from, to) => {
                drawn += to - from;
                return [document.createTextNode(text.slice(from, to))];
            });
            return [drawn, made.textContent.length];
        }""",
        mark * 20_000,
    )
    assert found[0] <= len(mark) * 20_000
    assert found[1] <= len(mark) * 20_000


def test_tokens_of_plain_steps_are_named_by_the_server(page):
    answer_with(page, "aabbcc!!dd", source="bonus")
    ask(page, "Go.")
    shown(page, ".turn .note").to_contain_text("tokens in")
    pieces = page.locator(".answer .origin")
    assert pieces.all_text_contents() == ["aabbcc", "!!", "dd"]
    origins = [node.get_attribute("data-origin") for node in pieces.all()]
    assert origins == ["bonus", "plain", "bonus"]


def test_the_conversation_follows_unless_the_reader_scrolled_up(page):
    page.set_viewport_size({"width": 900, "height": 700})
    answer_with(page, "line\n\n" * 300)
    ask(page, "Go.")
    shown(page, ".turn .note").to_contain_text("tokens in")
    left = "(box) => box.scrollHeight - box.scrollTop - box.clientHeight"
    box = page.locator("#turns")
    assert box.evaluate(left) < 2
    box.evaluate("(box) => { box.scrollTop = 100; }")
    page.uncheck("#coloured")
    assert box.evaluate("(box) => box.scrollTop") == 100
    ask(page, "Again.")
    shown(page, ".turn .note >> nth=1").to_contain_text("tokens in")
    assert box.evaluate(left) < 2


def test_an_answer_is_copied(page):
    """Into a clipboard of the test's own: that of the browser may be out of reach."""
    page.evaluate(
        "() => Object.defineProperty(navigator, 'clipboard', {value: {"
        "writeText: async (text) => { window.copied = text; }}})"
    )
    answer_with(page, "**two** words")
    ask(page, "Go.")
    shown(page, ".turn .note").to_contain_text("tokens in")
    page.click("text=Copy")
    shown(page, "text=Copied").to_be_visible()
    assert page.evaluate("() => window.copied") == "**two** words"


def test_the_last_turn_is_answered_once_more(page):
    for number, answer in enumerate(("first", "second")):
        answer_with(page, answer)
        ask(page, f"Question {number}")
        shown(page, ".turn .note >> nth=-1").to_contain_text("tokens in")
    shown(page, ".again").to_have_count(1)
    answer_with(page, "third")
    page.fill("#message", "a draft")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.click(".again")
    shown(page, ".turn .note >> nth=-1").to_contain_text("tokens in")
    asked = [message["content"] for message in sent.value.post_data_json["messages"]]
    assert asked == ["Question 0", "first", "Question 1"]
    assert page.locator(".answer").all_text_contents() == ["first", "third"]
    assert page.input_value("#message") == "a draft"


def test_conversations_are_kept_until_they_are_cleared(page):
    answer_with(page, "**kept** text")
    ask(page, HOSTILE)
    shown(page, ".turn .note").to_contain_text("tokens in")
    page.reload()
    shown(page, "#setup").to_contain_text("code-11m")
    page.click("#past summary")
    shown(page, ".past-chat").to_have_text(HOSTILE)
    page.click(".past-chat")
    shown(page, ".answer strong").to_have_text("kept")
    shown(page, ".asked").to_have_text(HOSTILE)
    answer_with(page, "more")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "Go on.")
    roles = [message["role"] for message in sent.value.post_data_json["messages"]]
    assert roles == ["user", "assistant", "user"]
    shown(page, ".turn .note >> nth=-1").to_contain_text("tokens in")
    shown(page, ".past-chat").to_have_count(1)
    page.click("#clear")
    shown(page, ".turn").to_have_count(0)
    page.click("#forget")
    shown(page, "#past").to_be_hidden()
    assert page.evaluate("() => localStorage.getItem('forerun-chats')") is None


def test_kept_conversations_are_bounded(page):
    kept = page.evaluate(
        """async () => {
            const { saveChat, readChats } = await import('/page/history.js');
            const nums = [];
            const turn = (size) => ({ asked: 'x'.repeat(size), answers: [] });
            const chat = (id, size) => ({ id, at: 0, turns: [turn(size)] });
            for (let n = 0; n < 40; n += 1) saveChat(chat(`a${n}`, 10));
            nums.push(readChats().length, readChats()[0].id);
            for (let n = 0; n < 5; n += 1) saveChat(chat(`b${n}`, 300000));
            nums.push(readChats().map((each) => each.id).join());
            saveChat(chat('c', 5000000));
            nums.push(readChats().length, localStorage.getItem('forerun-chats').length < 1000001);
            localStorage.setItem('forerun-chats', '{"no": "list"');
            nums.push(readChats().length);
            return nums;
        }"""
    )
    assert kept == [30, "a39", "b4,b3,b2", 3, True, 0]


def test_everything_is_reached_by_keyboard(page):
    go_to(page, "chat")
    page.click("#settings summary")
    page.focus("#theme")
    focused = []
    for _ in range(16):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("() => document.activeElement.id"))
    order = ("tab-chat", "message", "send", "clear", "compare", "formatted", "coloured", "system")
    order += ("mode", "max-tokens", "temperature", "top-p", "seed")
    places = [focused.index(name) for name in order]
    assert places == sorted(places)
    page.fill("#max-tokens", "4")
    page.fill("#message", "a = ")
    page.focus("#message")
    page.keyboard.press("Enter")
    shown(page, ".turn .note").to_contain_text("4 tokens in")


def test_every_control_has_a_name(page):
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, select, textarea, svg[role], pre')]
            .filter((node) => !node.closest('#key-form[hidden], .detail, .asked'))
            .filter((node) => !(node.getAttribute('aria-label') || node.labels?.length
                || node.textContent.trim()))
            .map((node) => node.outerHTML)"""
    )
    assert unnamed == []


CONTRAST = """() => {
  const channel = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const weights = [0.2126, 0.7152, 0.0722];
  const luminance = (rgb) => rgb.map(channel).reduce((s, c, i) => s + c * weights[i], 0);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll('h1,h2,h3,p,span,label,button,a,pre,td,th,dt,dd')) {
    if (!node.textContent.trim() || !node.offsetParent) continue;
    const a = luminance(parse(getComputedStyle(node).color).slice(0, 3));
    const b = luminance(behind(node));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push([node.textContent.trim().slice(0, 30), ratio]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_suffices_in_both_colours(page, address, scheme):
    page.emulate_media(color_scheme=scheme)
    ask(page, "class Node:", max_tokens=32)
    shown(page, ".turn .note").to_contain_text("32 tokens in")
    go_to(page, "requests")
    newest = page.locator("tr.request").first
    playwright.expect(newest.locator("td").nth(4)).to_have_text("32")
    playwright.expect(newest.locator(".head")).to_have_text("class Node:")
    newest.locator(".head").click()
    shown(page, "tr.detail .origin.accepted >> nth=0").to_be_attached()
    assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
    for name in ("live", "chat", "requests", "diagnosis"):
        go_to(page, name)
        assert page.evaluate(CONTRAST) == []


def test_the_choice_of_colours_is_kept(page):
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    page.reload()
    shown(page, "#theme").to_have_text("Dark")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_small_screens_need_no_sideways_scrolling(page, address, width):
    page.set_viewport_size({"width": width, "height": 800})
    complete(address, "a_long_name = " * 20, 24)
    shown(page, "tr.request >> nth=0").to_be_attached()
    for name in ("live", "chat", "requests", "diagnosis"):
        go_to(page, name)
        assert page.evaluate("() => document.documentElement.scrollWidth") <= width
        outside = page.evaluate(
            """(width) => [...document.querySelectorAll('main *')]
                .filter((node) => node.offsetParent && node.getBoundingClientRect().right > width)
                .map((node) => node.outerHTML.slice(0, 80))""",
            width,
        )
        assert outside == []


def test_figures_are_dimmed_when_the_server_is_gone(browser, address):
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}/")
    playwright.expect(page.locator("#setup")).to_contain_text("code-11m")
    page.route("**/live", lambda route: route.abort())
    playwright.expect(page.locator("#state")).to_contain_text("no answer")
    playwright.expect(page.locator("#state")).to_contain_text(re.compile(r"figures are \d+ s old"))
    dimmed = "() => getComputedStyle(document.querySelector('#live')).opacity"
    assert float(page.evaluate(dimmed)) < 0.6
    page.unroute("**/live")
    playwright.expect(page.locator("#state")).to_contain_text("idle")
    assert float(page.evaluate(dimmed)) == 1.0
    context.close()


def test_a_key_is_asked_for_and_sent(browser, address):
    context = browser.new_context()
    page = context.new_page()

    def check(route):
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "a key is needed"}})

    page.route("**/live", check)
    page.goto(f"{address}/")
    playwright.expect(page.locator("#key-form")).to_be_visible(timeout=TIMEOUT_MS)
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#setup")).to_contain_text("code-11m")
    playwright.expect(page.locator("#key-form")).to_be_hidden()
    assert page.input_value("#key") == ""
    context.close()
