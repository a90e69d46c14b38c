"""The live page in a real browser: figures, playground, keyboard, colours, and hostile texts."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import uvicorn

from forerun.engine.asynchronous import AsyncEngine
from forerun.engine.engine import Engine
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
    engine = Engine.load("zoo:code-11m", draft="zoo:code-2m", dtype="float32", max_batch=4)
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


def test_figures_of_a_request_are_shown(page, address):
    text = complete(address, "import os\n\ndef first(path):", 64)
    shown(page, "#tau").to_have_text(re.compile(r"\d"))
    shown(page, "#rate").to_have_text(re.compile(r"\d"))
    shown(page, "#chart-positions svg").to_have_attribute("aria-label", re.compile("position 1"))
    shown(page, "#chart-rate path.line, #chart-rate circle").not_to_have_count(0)
    newest = page.locator(".request").first
    playwright.expect(newest.locator("summary")).to_contain_text("64 tokens")
    playwright.expect(newest.locator(".origin.accepted")).not_to_have_count(0)
    pieces = newest.locator(".origin:not(.prompt)")
    assert "".join(pieces.all_text_contents()) == text


def test_the_playground_finds_that_the_texts_agree(page):
    page.fill("#max-tokens", "40")
    page.fill("#temperature", "0.8")
    page.click("#run")
    shown(page, "#agreement").to_contain_text("The texts agree")
    texts = [page.locator(f"#text-{side}").text_content() for side in ("auto", "off")]
    assert texts[0] == texts[1]
    assert texts[0]
    for side in ("auto", "off"):
        shown(page, f"#figures-{side}").to_contain_text("40 tokens in")
    shown(page, "#run").to_be_enabled()


def test_the_playground_names_a_refusal(page):
    page.fill("#max-tokens", "4096")
    with page.expect_response("**/v1/completions") as answer:
        page.click("#run")
    if answer.value.ok:  # a server with a long context continues instead
        page.click("#stop")
    shown(page, "#agreement").to_have_text(re.compile(r"Not answered: .{10}|Stopped"))


def test_texts_of_prompts_are_never_markup(page, address):
    complete(address, HOSTILE, 8)
    shown(page, ".request .origin.prompt >> nth=0").to_contain_text("<script>")
    page.fill("#prompt", HOSTILE)
    page.fill("#max-tokens", "8")
    page.click("#run")
    shown(page, "#agreement").to_contain_text("The texts agree")
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "forerun"


def test_everything_is_reached_by_keyboard(page):
    focused = []
    for _ in range(40):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("() => document.activeElement.id"))
    order = ("theme", "prompt", "max-tokens", "temperature", "seed", "run", "text-auto", "text-off")
    places = [focused.index(name) for name in order]
    assert places == sorted(places)
    page.fill("#max-tokens", "4")
    page.focus("#prompt")
    page.keyboard.press("Control+Enter")
    shown(page, "#agreement").to_contain_text("The texts agree")


def test_every_control_has_a_name(page):
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, svg[role=img], pre')]
            .filter((node) => !node.closest('[hidden], .request'))
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
  for (const node of document.querySelectorAll('h1,h2,h3,p,span,label,button,a,pre')) {
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
    complete(address, "class Node:", 32)
    shown(page, ".request .origin.accepted >> nth=0").to_be_attached()
    assert page.evaluate("() => document.documentElement.dataset.theme") == scheme
    assert page.evaluate(CONTRAST) == []


def test_the_choice_of_colours_is_kept(page):
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    page.reload()
    shown(page, "#theme").to_have_text("Dark")


@pytest.mark.parametrize("width", [320, 390, 768])
def test_small_screens_need_no_sideways_scrolling(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_a_lost_server_is_reported(browser, address):
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{address}/")
    playwright.expect(page.locator("#setup")).to_contain_text("code-11m")
    page.route("**/live", lambda route: route.abort())
    playwright.expect(page.locator("#state")).to_contain_text("no answer")
    page.unroute("**/live")
    playwright.expect(page.locator("#state")).to_contain_text("idle")
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
