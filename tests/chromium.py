"""What a browser makes of a page: Chromium without a window looks at it in a frame of a given width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1600,1200",
    "--virtual-time-budget=10000",
)

# A frame with srcdoc has the origin of the page around it, which may therefore look inside.
PAGE = """<!DOCTYPE html><meta charset="utf-8">{frames}<pre id="found"></pre><script>{check}</script>"""
FRAME = """<iframe style="border:0;width:{width}px;height:1000px" srcdoc="{page}"></iframe>"""

CHECK = r"""
const look = frame => {
  const view = frame.contentWindow, page = view.document, width = view.innerWidth;
  page.querySelectorAll("details").forEach(one => one.open = true);
  const problems = [], say = (what, one) => problems.push(what + ": " + (one.outerHTML || one.data).slice(0, 120));
  if (page.documentElement.scrollWidth > width) problems.push("the page is " + page.documentElement.scrollWidth + " wide");
  const images = [...page.images];
  for (const image of images) {
    if (!image.complete || !image.naturalWidth) { say("broken image", image); continue; }
    const canvas = document.createElement("canvas");
    canvas.width = image.naturalWidth; canvas.height = image.naturalHeight;
    const paint = canvas.getContext("2d");
    paint.drawImage(image, 0, 0);
    const seen = new Set(new Uint32Array(paint.getImageData(0, 0, canvas.width, canvas.height).data.buffer));
    if (seen.size < 8) say("empty image", image);
    if (image.getBoundingClientRect().width < 100) say("tiny image", image);
  }
  // What is wider than a box that scrolls can be reached all the same, as long as the box itself is whole.
  const scroller = one => one.closest("main *") &&
    (["auto", "scroll"].includes(view.getComputedStyle(one).overflowX) ? one : scroller(one.parentElement));
  for (const one of page.querySelectorAll("th, td")) {
    for (const style of [one, ...one.children].flatMap(part => [null, "::before"].map(p => view.getComputedStyle(part, p))))
      if (style.overflowWrap !== "normal" || !["normal", "keep-all"].includes(style.wordBreak)) {
        say("words may be split", one); break;
      }
  }
  const texts = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  for (let node; node = texts.nextNode();) {
    if (!node.data.trim() || view.getComputedStyle(node.parentElement).display === "none") continue;
    const range = page.createRange();
    if (node.parentElement.closest("th, td")) {
      for (const word of node.data.matchAll(/[^\s-]+/g)) {
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top)));
        if (lines.size > 1) { say("a broken word, " + word[0] + ", in", node); break; }
      }
    }
    range.selectNodeContents(node);
    const inside = scroller(node.parentElement);
    for (let box of range.getClientRects()) {
      if (inside) {
        const around = inside.getBoundingClientRect(), from = around.left - inside.scrollLeft;
        if (box.left < from - 0.5 || box.right > from + inside.scrollWidth + 1) { say("cut text", node); break; }
        if (box.right > around.right) box = around;
      }
      if (box.right > width + 0.5 || box.left < -0.5) { say("text outside the page", node); break; }
      for (let one = inside || node.parentElement; one !== page.body; one = one.parentElement) {
        const around = one.getBoundingClientRect(), shown = view.getComputedStyle(one).display;
        if (shown !== "inline" && shown !== "contents" && box.width && box.right > around.right + 1) {
          say("text outside its box", node); break;
        }
      }
    }
  }
  for (const one of page.querySelectorAll("main *"))
    if (one.clientWidth && one.scrollWidth > one.clientWidth + 1 && scroller(one) !== one) {
      // A box in one that scrolls shows what is wider than itself, unless it cuts it off.
      if (!scroller(one) || view.getComputedStyle(one).overflowX !== "visible") say("cut", one);
    }
  const ink = view.getComputedStyle(page.body);
  return {
    problems, width, images: images.length, ink: ink.color, background: ink.backgroundColor,
    tables: [...page.querySelectorAll("table")].map(one => one.querySelectorAll("tbody tr").length),
    pictures: images.map(one => one.alt),
  };
};
window.addEventListener("load", () => {
  document.getElementById("found").textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(look));
});
"""


def look(page: str, *widths: int, dark: bool = False) -> list[dict[str, Any]]:
    """What is wrong with an HTML page at each width (`problems`), and what is on it.

    Skips the test where no Chromium is installed.
    """
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("no Chromium is installed (apt-get install chromium): pages cannot be looked at")
    frames = "".join(FRAME.format(width=width, page=html.escape(page)) for width in widths)
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder, "frame.html")
        file.write_text(PAGE.format(frames=frames, check=CHECK), encoding="utf-8")
        done = subprocess.run(
            [program, *FLAGS, *scheme, f"--user-data-dir={folder}/profile", "--dump-dom", file.as_uri()],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    said = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert said is not None, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(html.unescape(said[1]))
    return found
