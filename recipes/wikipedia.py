"""A hundred articles of the English Wikipedia (2016), which come with gensim as test data."""

from __future__ import annotations

import bz2
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from softs_lightning.recipes.text import EXTRA

__all__ = ["articles", "plain"]

DUMP = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"

# What is left out whole: comments, notes, what is no text.
OUT = re.compile(
    r"<!--.*?-->|<ref[^<>]*/>|<ref\b.*?</ref>|<(math|gallery|timeline|code|source|table)\b.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
LINK = re.compile(r"\[\[(?:[^\[\]|:]*\|)?([^\[\]|]*)\]\]")
PICTURE = re.compile(r"\[\[[^\[\]]*\]\]")
ADDRESS = re.compile(r"\[https?:\S+ ?([^\]]*)\]")
TAG = re.compile(r"<[^<>]*>")
MARKED = frozenset("[]{}|=")


@cache
def articles() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Titles with their paragraphs of prose; articles that only point to another are left out.

    Raises:
        ModuleNotFoundError: where gensim is not installed, saying how to.
    """
    spec = find_spec("gensim")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"this recipe reads Wikipedia from the package gensim: {EXTRA}")
    packed = (Path(spec.origin).parent / "test" / "test_data" / DUMP).read_bytes()
    found = []
    for page in ElementTree.fromstring(bz2.decompress(packed)).findall("{*}page"):
        paragraphs = plain(page.findtext("{*}revision/{*}text") or "")
        if page.findtext("{*}ns") == "0" and page.find("{*}redirect") is None and paragraphs:
            found.append((page.findtext("{*}title") or "", paragraphs))
    return tuple(found)


def plain(markup: str) -> tuple[str, ...]:
    """The paragraphs of ten words or more in an article's source, without its markup.

    >>> plain("{{Stub}}\\n'''Ada''' was the first of all [[computer|programmers]] to see what such machines could do.")
    ('Ada was the first of all programmers to see what such machines could do.',)
    """
    text, nested = OUT.sub("", markup), 1
    while nested:
        text, nested = INNERMOST.subn("", text)
    text = PICTURE.sub("", LINK.sub(r"\1", text))
    text = TAG.sub("", ADDRESS.sub(r"\1", text)).replace("&nbsp;", " ")
    lines = (" ".join(line.split()) for line in re.sub("'{2,}", "", text).splitlines())
    return tuple(line for line in lines if _prose(line))


def _prose(line: str) -> bool:
    return (
        line[:1].isalnum()
        and line.endswith((".", '."'))
        and len(line.split()) >= 10
        and not MARKED & set(line)
    )
