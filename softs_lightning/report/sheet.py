"""The style sheet of every page: light and dark by the reader's choice, from the width of a telephone up."""

from __future__ import annotations

__all__ = ["SHEET"]

SHEET = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --page: #ffffff; --card: #f6f8fa;
  --line: #d0d7de; --good: #0a6b4b; --unclear: #8a5a00; --mark: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b1; --page: #0d1117; --card: #161b22; --line: #30363d;
    --good: #56d8a4; --unclear: #f0b849; --mark: #6cb8f0; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; font-size: 16px; }
main { max-width: 1240px; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
p { margin: .5rem 0; max-width: 75ch; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.verdict { border-left: 4px solid var(--soft); background: var(--card); padding: .6rem .9rem; margin: .6rem 0;
  border-radius: 0 6px 6px 0; max-width: none; }
.verdict.good { border-color: var(--good); }
.verdict.unclear { border-color: var(--unclear); }
.good b, td.good { color: var(--good); }
.unclear b, td.unclear { color: var(--unclear); }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; max-width: 100%; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .35rem .8rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: .9rem; vertical-align: bottom; }
tbody th { color: var(--ink); font-size: 1rem; vertical-align: top; }
th.text, td.text { text-align: left; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
.figures.wide { grid-template-columns: repeat(auto-fill, minmax(min(100%, 540px), 1fr)); }
figure { margin: 0; min-width: 0; }
img { display: block; max-width: 100%; height: auto; background: #fff; border-radius: 6px;
  border: 1px solid var(--line); }
figcaption { padding: .3rem 0; }
details { margin: .6rem 0; border: 1px solid var(--line); border-radius: 6px; padding: .4rem .8rem; }
summary { cursor: pointer; font-weight: 600; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0; font-size: .82rem; line-height: 1.4;
  font-family: ui-monospace, SFMono-Regular, Menlo, "Liberation Mono", monospace; }
code { font-family: ui-monospace, SFMono-Regular, Menlo, "Liberation Mono", monospace; font-size: .9em; }
a { color: var(--mark); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
@media (max-width: 900px) {
  table, tbody, tr, th, td { display: block; width: 100%; text-align: left; }
  thead { display: none; }
  tr { border: 1px solid var(--line); border-radius: 6px; padding: .4rem .7rem; margin: .5rem 0; }
  td, th, th:first-child, td:first-child { border: 0; padding: .12rem 0; text-align: left; }
  td, td.text { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 1rem; text-align: right; }
  td span { min-width: 0; max-width: 100%; overflow-x: auto; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; }
}
@media print { body { background: #fff; color: #000; } .scroll { overflow: visible; } figure, tr { break-inside: avoid; } }
""".strip()
