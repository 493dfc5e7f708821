"""The status page's style and script: all that it needs, so that it asks no other host."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --ink: #1b1c1e; --quiet: #5b6067; --rule: #dfdfda; --raised: #ffffff;
  --bar: #9db4d6; --accent: #1f5aa8; --ok: #17703b; --warn: #8a5200; --bad: #ab221b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131416; --ink: #e9e9e6; --quiet: #a2a7ae; --rule: #2d3033; --raised: #1a1c1e;
    --bar: #3f5f8c; --accent: #8ab4f5; --ok: #62c98c; --warn: #e2ab52; --bad: #ff8f86;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
main, footer { max-width: 62rem; margin: 0 auto; padding: 0 1.25rem; }
main { padding-top: 2rem; }
h1, h2, p, dl, dd, figure, table { margin: 0; padding: 0; }
h1 { font-size: .9375rem; font-weight: 500; color: var(--quiet); }
h2 { font-size: .8125rem; font-weight: 600; color: var(--quiet); margin: 2.25rem 0 .625rem; }
b { font-weight: 600; }
code { font: .8125rem/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
a { color: var(--accent); }
.quiet { color: var(--quiet); }
.now { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; align-items: baseline; }
.now p { font-size: 1.875rem; line-height: 1.3; letter-spacing: -.01em; }
.now .label { font-size: 1.0625rem; letter-spacing: 0; }
.state { font-weight: 600; white-space: nowrap; }
.state::before {
  content: ""; display: inline-block; width: .55em; height: .55em; margin-right: .4em;
  border-radius: 50%; background: currentColor; vertical-align: .06em;
}
.ok { color: var(--ok); } .busy { color: var(--accent); }
.warn { color: var(--warn); } .bad { color: var(--bad); }
.trouble { margin-top: 1.25rem; padding: .75rem 1rem; border-left: 3px solid var(--bad);
  background: var(--raised); }
.trouble ul { margin: 0; padding: 0; list-style: none; }
.figures { display: flex; flex-wrap: wrap; justify-content: space-between; gap: .75rem 1.5rem;
  margin-top: 1.75rem; padding: .75rem 0; border: solid var(--rule); border-width: 1px 0; }
dt { font-size: .8125rem; color: var(--quiet); }
dd { font-size: 1.0625rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr));
  gap: 1.5rem 2rem; }
figcaption { display: flex; justify-content: space-between; gap: 1rem; font-size: .875rem; }
.top { font-size: .75rem; line-height: 1.2; color: var(--quiet); min-height: .9rem; }
svg { display: block; width: 100%; height: 7rem; }
svg line { stroke: var(--rule); stroke-width: 1; }
.bar { fill: var(--bar); } .bar:last-of-type, .bar:hover { fill: var(--accent); }
.ends { display: flex; justify-content: space-between; gap: 1rem; font-size: .75rem;
  color: var(--quiet); min-height: 1.2rem; }
table { width: 100%; border-collapse: collapse; font-size: .875rem; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th { text-align: left; font-weight: 500; color: var(--quiet); font-size: .8125rem; }
th, td { padding: .375rem 1.5rem .375rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: baseline; }
td:last-child, th:last-child { padding-right: 0; }
.number { text-align: right; white-space: nowrap; }
.at { margin-top: 2.25rem; font-size: .8125rem; }
.lost { color: var(--bad); }
.lost:not(:empty) { margin-bottom: .5rem; }
footer { padding-top: .25rem; padding-bottom: 2rem; font-size: .8125rem; color: var(--quiet); }
@media (max-width: 44rem) {
  main { padding-top: 1.25rem; }
  .figures { display: grid; grid-template-columns: 1fr 1fr; }
  thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  table, tbody { display: block; }
  tr { display: flex; flex-wrap: wrap; gap: .125rem 1rem; padding: .5rem 0;
    border-bottom: 1px solid var(--rule); }
  td { border: 0; padding: 0; min-width: 0; }
  td:empty { display: none; }
  td::before { content: attr(data-label) " "; color: var(--quiet); font-size: .75rem; }
  .number { text-align: left; white-space: normal; }
}
"""

# Only what differs is put into the page, so that a reader's place and selection stay.
SCRIPT = """
"use strict";
const main = document.querySelector("main"), lost = document.getElementById("lost");
let answered = Date.now();
function show(sections) {
  for (const fresh of [...sections]) {
    const old = document.getElementById(fresh.id);
    if (old === null) main.append(fresh);
    else if (old.outerHTML !== fresh.outerHTML) old.replaceWith(fresh);
  }
  document.title = document.getElementById("now").dataset.title;
}
async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("status/fragment",
        { cache: "no-store", signal: AbortSignal.timeout(10000) });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      show(new DOMParser().parseFromString(text, "text/html").body.children);
      answered = Date.now();
      lost.textContent = "";
    } catch (error) {
      const age = Math.round((Date.now() - answered) / 1000);
      lost.textContent = `The server does not answer; this was so ${age} s ago.`;
    }
  }
  setTimeout(look, 1000);
}
setTimeout(look, 1000);
"""
