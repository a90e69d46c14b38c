"""Takes the picture of the live page in the README from a run: requests over HTTP, real Chromium.

python recipes/docs/live_page.py --out docs/images/live-page.png
"""

from __future__ import annotations

import argparse
import shutil
import threading
import time
from pathlib import Path

import httpx
import uvicorn
from playwright.sync_api import expect, sync_playwright

from forerun.doctor.live import PageDiagnosis
from forerun.engine.engine import Engine
from forerun.engine.thread import AsyncEngine
from forerun.models.catalog import held_out_prompts
from forerun.server.app import create_app

WIDTH, HEIGHT = 1200, 1250
NUM_CLIENTS = 2
MAX_TOKENS = 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="zoo:code-40m")
    parser.add_argument("--draft", default="zoo:code-2m-for-40m")
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--scheme", choices=("light", "dark"), default="light")
    parser.add_argument("--out", type=Path, default=Path("docs/images/live-page.png"))
    options = parser.parse_args()
    engine = Engine.load(options.target, draft=options.draft, max_batch=8)
    app = create_app(AsyncEngine(engine), options.target, diagnose=PageDiagnosis())
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    over = threading.Event()
    clients = [
        threading.Thread(target=request, args=(address, number, over))
        for number in range(NUM_CLIENTS)
    ]
    for client in clients:
        client.start()
    picture(address, options.seconds, options.scheme, options.out)
    over.set()
    for client in clients:
        client.join()
    server.should_exit = True


def request(address: str, number: int, over: threading.Event) -> None:
    """Ask for completions one after the other, with pauses in which other clients are alone."""
    prompts = [prompt.text for prompt in held_out_prompts()]
    count = number
    while not over.is_set():
        body = {
            "prompt": prompts[count % len(prompts)],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
        }
        httpx.post(f"{address}/v1/completions", json=body, timeout=120.0).raise_for_status()
        count += NUM_CLIENTS
        over.wait(0.4 * number)


def picture(address: str, seconds: float, scheme: str, out: Path) -> None:
    """Open the page, wait, and write what it shows."""
    browser_path = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))))
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.wait_for_timeout(1000 * seconds)
        expect(page.locator("#speedup")).not_to_have_text("–", timeout=30_000)
        page.screenshot(path=out)
        browser.close()
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
