"""Run folders as one HTML page: curves, where the time went, and completions with their tokens tinted.

    python report.py runs/a runs/b --out report.html         # then open it: no server, no network
    python report.py runs/a --steps 10 --completions 512     # embeds more of the rollouts

The page holds its data as JSON, unrounded. Tokens have texts where the package tokenizers and the run's
tokenizer.json are found. The page does not follow a run at work, smooths nothing, and omits other metrics.
"""

import argparse
import json
import statistics
import sys
from array import array
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path

CURVES = {
    "reward": "mean of a step",
    "eval/accuracy": "share of 1",
    "completions/mean_length": "tokens",
    "logprob_gap/mean": "nats",
    "entropy": "nats",
}
STAGES = ("time/wake", "time/generate", "time/eval", "time/sleep", "time/reward", "time/update")
# What the page needs of config.json, of a line of metrics.jsonl and of a line of rollouts/step_N.jsonl.
NUMBER = int | float | None
OPTIONS = {"model": str, "num_generations": int}
METRICS = {"step": int, **dict.fromkeys([*CURVES, *STAGES, "time/step"], NUMBER)}
ROLLOUT = {
    "slot": int,
    "prompt": str | list,
    "completion": str,
    "completion_ids": list,
    "truncated": NUMBER,
    "sampler_logps": list,
    "trainer_logps": list | None,
    "reward": NUMBER,
    "parts": dict | None,
    "advantage": NUMBER,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, default="report.html", help="the page (default %(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="recorded steps to embed (default %(default)s)")
    parser.add_argument("--completions", type=int, default=64, help="of each step (default %(default)s)")
    args = parser.parse_args()
    try:
        data = page_data(args.runs, args.steps, args.completions)
        # A completion may hold </script>, which would end the data.
        text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
        page = PAGE.replace("@DATA@", text)
        # Half a surrogate pair, which a model may write, has no UTF-8: it stays the escape that it was.
        args.out.write_text(page, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"{args.out}: {len(args.runs)} runs, {len(text) / 1e6:.1f} MB")


def page_data(folders, steps, completions):
    """All that the page shows."""
    runs = []
    options = []
    differ = {}
    for folder in folders:
        config = folder / "config.json"
        options.append(read_object(config.read_bytes(), OPTIONS, config))
        runs.append(read_run(folder, options[-1], steps, completions))
    for name in sorted(set().union(*options)):
        values = [of_run.get(name) for of_run in options]
        if any(value != values[0] for value in values):
            differ[name] = values
    return {"runs": runs, "differ": differ, "curves": CURVES, "stages": STAGES}


def read_run(folder, options, steps, completions):
    """The metrics of a run, and the first completions of its last recorded steps."""
    rows = read_lines(folder / "metrics.jsonl", METRICS)
    metrics = {}
    for key in METRICS:
        metrics[key] = [row.get(key) for row in rows]
    accuracy = [value for value in metrics["eval/accuracy"] if value is not None] or [None]
    times = [value for value in metrics["time/step"] if value is not None]
    results = {
        "first accuracy": accuracy[0],
        "last accuracy": accuracy[-1],
        "steps": len(times),
        "median time/step (s)": statistics.median(times) if times else None,
    }
    rollouts, note = read_rollouts(folder, options, steps, completions)
    return {"name": str(folder), "metrics": metrics, "results": results, "rollouts": rollouts, "note": note}


def read_rollouts(folder, options, steps, completions):
    """The groups of completions of the last `steps` recorded steps, and how many of all these are."""
    group_size = options["num_generations"]
    if completions > group_size:
        completions -= completions % group_size  # whole groups, where one fits
    decode = find_decoder(folder, options["model"])
    paths = folder.glob("rollouts/step_*.jsonl")
    files = {int(path.stem.removeprefix("step_")): path for path in paths}
    rollouts = []
    shown = 0
    recorded = 0
    for step in sorted(files)[max(0, len(files) - steps):]:
        lines = read_lines(files[step], ROLLOUT)
        recorded += len(lines)
        kept = []
        for line in lines[:completions]:
            completion = {key: line.get(key) for key in ROLLOUT}
            completion["texts"] = decode and token_texts(line["completion_ids"], decode)
            kept.append(completion)
        shown += len(kept)
        groups = groupby(kept, key=lambda completion: completion["slot"] // group_size)
        rollouts.append({"step": step, "groups": [list(group) for _, group in groups]})
    note = (f"In this page: {len(rollouts)} of {len(files)} recorded steps, "
            f"{shown} of their {recorded} completions (--steps, --completions).")
    if decode is None:
        note += " No tokenizer was found."
    return rollouts, note


def read_lines(path, types):
    """The objects of a file, one a line. Half a last line, which a run is still writing, is omitted."""
    *lines, last = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        rows.append(read_object(line, types, f"{path}, line {number},"))
    with suppress(ValueError):
        rows.append(read_object(last, types, path))
    return rows


def read_object(text, types, where):
    """The JSON object whose keys have values of these types; ValueError where it is none.

    NaN, which browsers refuse in JSON, becomes None."""
    problem = ""
    try:
        row = json.loads(text, parse_constant=lambda name: None)
        for key, allowed in types.items():
            if not isinstance(row.get(key), allowed):
                problem = f"{key} is missing, or no value of a run"
        # On other ids than these the tokenizer would fail, without naming the line.
        array("I", row.get("completion_ids", []))
    except Exception as error:  # whatever the damage made of it
        problem = error
    if problem:
        raise ValueError(f"{where} is damaged ({problem}): remove it")
    return row


def find_decoder(folder, model):
    """ids -> text with special tokens, by the run's tokenizer; None without one, or without its package."""
    for place in (folder / "latest", folder / model, Path(model)):
        with suppress(Exception):  # no file, or a broken one: the library raises nothing more precise
            from tokenizers import Tokenizer
            tokenizer = Tokenizer.from_file(str(place / "tokenizer.json"))
            return partial(tokenizer.decode, skip_special_tokens=False)


def token_texts(ids, decode):
    """decode(ids[:i + 1]) minus decode(ids[:i]) for each i: the token that completes a character has it,
    those before are empty. None where these do not add up to the text."""
    texts = []
    for i in range(len(ids)):
        start = max(0, i - 16)  # 16 tokens before it are enough for spaces and half characters
        before = decode(ids[start:i]).rstrip("\ufffd")
        text = decode(ids[start:i + 1]).rstrip("\ufffd")
        texts.append(text[len(before):])
    whole = decode(ids)
    known = "".join(texts)
    if not whole.startswith(known):
        return None
    if texts:
        texts[-1] += whole[len(known):]  # a last character may be cut
    return texts


PAGE = r"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minigrpo report</title><style>
:root { color-scheme: light dark; --dim: #667080; --line: #dcdfe4; --card: #f6f7f9 }
@media (prefers-color-scheme: dark) { :root { --dim: #99a3b1; --line: #3a3f48; --card: #1e2126 } }
body { max-width: 84em; margin: auto; padding: 1em; font: 15px/1.4 sans-serif; overflow-wrap: anywhere }
.dim, figcaption, th { color: var(--dim) } label, .key { display: inline-block; margin-right: 1em }
td, th { padding: 2px 18px 2px 0; text-align: left; font-weight: 400; border-bottom: 1px solid var(--line) }
.key::before { content: "■ "; color: var(--colour) } figure div { min-height: 4em }
.grid { display: grid; gap: 1em; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25em), 1fr)) }
figure { margin: 0 } svg { fill: none; stroke-linecap: round } text { fill: var(--dim); font-size: 12px }
article, pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: 9px }
.text, pre { font: 13px/1.6 monospace; white-space: pre-wrap; max-height: 24em; overflow: auto }
</style></head><body><h1>Runs</h1><table id="table" style="border-collapse: collapse"></table><h2>Curves</h2>
<div id="curves" class="grid"></div><h2>Seconds of each step</h2><div id="times" class="grid"></div>
<h2>Completions</h2><p><label>run <select id="run"></select></label>
<label>step <select id="step"></select></label><label>prompt <select id="group"></select></label>
<label>tint by <select id="tint"></select></label></p><p id="note" class="dim"></p><pre id="prompt"></pre>
<p id="scale"></p><div id="cards" class="grid"></div>
<script id="data" type="application/json">@DATA@</script><script>
const id = name => document.getElementById(name), {runs, ...data} = JSON.parse(id("data").textContent);
const COLOURS = ["#3b82d6", "#dd7a1c", "#2a9d66", "#d6497f", "#8b6be0", "#169fb5", "#8a8f98", "#a8860f"];
const colour = i => COLOURS[i % COLOURS.length], LEFT = 60, WIDE = 370, TOP = 10, HIGH = 170;  // of the axes
const show = v => typeof v === "string" ? v : typeof v !== "number" ? v == null ? "–" : JSON.stringify(v)
  : Number.isInteger(v) ? String(v) : Math.abs(v) < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
function make(parent, tag, attributes = {}, text = "") {  // text goes in as text, never as HTML
  const space = /^(svg|path|text)$/.test(tag) ? "2000/svg" : "1999/xhtml";
  const node = parent.appendChild(document.createElementNS("http://www.w3.org/" + space, tag));
  for (const name in attributes) node.setAttribute(name, attributes[name]);
  return Object.assign(node, {textContent: text});
}
const key = (box, colour, text) => make(box, "span", {class: "key", style: `--colour: ${colour}`}, text);
const extent = list => list.filter(v => v !== null).reduce(  // null is no value, not 0
  ([low, high], v) => [Math.min(low, v), Math.max(high, v)], [Infinity, -Infinity]);
function ticks(low, high, finest) {
  const raw = (high - low) / 4, ten = 10 ** Math.floor(Math.log10(raw));
  const size = Math.max(finest, ten * ([5, 2].find(m => m * ten <= raw) ?? 1)), from = Math.ceil(low / size);
  return Array.from({length: Math.floor(high / size) - from + 1}, (_, i) => (from + i) * size);
}
const [first, last] = extent(runs.flatMap(run => run.metrics.step)), span = last - first + 1;
const x = step => LEFT + (step - first + 0.5) / span * WIDE, names = runs.map(run => run.name);
const nearest = (step, values, to) => step.reduce((best, s, k) =>  // the row with a value nearest to a step
  values[k] === null || Math.abs(step[best] - to) < Math.abs(s - to) ? best : k, -1);
// Axes, which draw(svg, y) fills, and the values under the mouse of series: [name, colour, steps, values].
function chart(box, title, [bottom, top], series, draw) {
  const figure = make(id(box), "figure"), caption = make(figure, "figcaption", {}, title);
  if (!(top >= bottom)) return caption.append(": not measured");
  if (top - bottom <= 1e-9 * Math.abs(top)) [bottom, top] = [bottom - 0.5, top + 0.5];
  const svg = make(figure, "svg", {viewBox: "0 0 440 215"}), read = make(figure, "div");
  const y = v => TOP + HIGH * Math.max(0, (top - v) / (top - bottom));
  const label = (x, y, anchor, text) => make(svg, "text", {x, y, "text-anchor": anchor}, text);
  for (const v of ticks(bottom, top, 0)) {
    make(svg, "path", {d: `M${LEFT} ${y(v)}h${WIDE}`, stroke: "var(--line)"});
    label(LEFT - 6, y(v) + 4, "end", show(v));
  }
  for (const step of ticks(first, last, 1)) label(x(step), TOP + HIGH + 15, "middle", step);
  label(LEFT + WIDE / 2, TOP + HIGH + 31, "middle", "step");
  draw(svg, y);
  const rule = make(svg, "path", {stroke: "var(--dim)"});
  svg.onmousemove = event => {
    const {left, width} = svg.getBoundingClientRect(), at = (event.clientX - left) / width * 440 - LEFT;
    const to = Math.max(first, Math.min(last, Math.floor(first + at / WIDE * span)));
    rule.setAttribute("d", `M${x(to)} ${TOP}v${HIGH}`);
    read.replaceChildren(`step ${to}: `);
    for (const [name, colour, steps, values] of series) {  // null: the nearest value, and where it is
      const k = nearest(steps, values, to), where = steps[k] === to ? "" : ` (step ${show(steps[k])})`;
      key(read, colour, `${name} ${show(values[k])}${where}`);
    }
  };
  svg.onmousemove({clientX: Infinity});  // the last step
}
for (const [name, unit] of Object.entries(data.curves)) {
  const rare = name === "eval/accuracy", range = extent(runs.flatMap(run => run.metrics[name]));
  const series = runs.map(({metrics: m}, i) => [names[i], colour(i), m.step, m[name]]);
  chart("curves", `${name} (${unit})`, range, series, (svg, y) => series.forEach(([, stroke, steps, of]) => {
    const rows = [...steps.keys()].filter(k => !rare || of[k] !== null);  // what is rare is joined
    const pen = n => n && of[rows[n - 1]] !== null ? "L" : "M";  // null is a gap
    const d = rows.map((k, n) => of[k] === null ? "" : `${pen(n)}${x(steps[k])} ${y(of[k])}h0`).join("");
    make(svg, "path", {d, stroke, "stroke-width": 2});
    if (rare) make(svg, "path", {d: d.replaceAll("L", "M"), stroke, "stroke-width": 6});  // dots
  }));
}
runs.forEach(({metrics: {step, ...m}, results}, i) => {
  const sum = (stages, k) => stages.reduce((total, stage) => total + m[stage][k], 0);  // null adds nothing
  m["rest of time/step"] = step.map((_, k) => Math.max(0, m["time/step"][k] - sum(data.stages, k)));
  const layers = [...data.stages, "rest of time/step"], most = extent(step.map((_, k) => sum(layers, k)))[1];
  const top = Math.min(most, 3 * results["median time/step (s)"] || most);  // the first step may be slow
  const series = layers.map((name, j) => [name, colour(j), step, m[name]]);
  chart("times", `${names[i]} (seconds, at most ${show(most)})`, [0, top], series, (svg, y) => {
    for (let j = layers.length; j; j--) {  // from the axis to the top of each layer, the highest first
      const tops = step.map((s, k) => `V${y(sum(layers.slice(0, j), k))}H${x(s + 0.5)}`).join("");
      make(svg, "path", {d: `M${x(step[0] - 0.5)} ${y(0)}${tops}V${y(0)}z`, fill: colour(j - 1)});
    }
  });
});
const facts = Object.keys(runs[0].results).map(name => [name, runs.map(run => run.results[name])]);
for (const [i, [name, values]] of [["", names], ...facts, ...Object.entries(data.differ)].entries()) {
  const line = make(id("table"), "tr");
  [name, ...values].forEach((cell, j) => make(line, i && j ? "td" : "th", {}, show(cell)));
}
const TINTS = {"advantage (blue above 0, orange below)": c => c.advantage ?? NaN,  // that tints token k
  "1 - probability in the sampler": (c, k) => 1 - Math.exp(c.sampler_logps[k] ?? NaN),
  "|trainer_logps - sampler_logps|": (c, k) => (c.trainer_logps?.[k] ?? NaN) - (c.sampler_logps[k] ?? NaN)};
const words = p => [p].flat().map(m => m?.content ? `${m.role}: ${show(m.content)}` : show(m)).join("\n");
function offer(name, texts, chosen = 0) {
  id(name).replaceChildren(...texts.map(text => new Option(text)));
  Object.assign(id(name), {selectedIndex: chosen, onchange: () => browse(name)});
}
function browse(changed) {  // offers anew what depends on the choice that changed, then shows the group
  const {rollouts, note} = runs[id("run").selectedIndex], tint = id("tint").selectedIndex;
  if (changed === "run") offer("step", rollouts.map(rollout => rollout.step), rollouts.length - 1);
  const groups = rollouts[id("step").selectedIndex]?.groups ?? [];
  const prompts = groups.map(([c], i) => `${i + 1}: ${words(c.prompt)}`);
  if (changed === "run" || changed === "step") offer("group", prompts.map(text => text.slice(0, 40)));
  const at = id("group").selectedIndex, group = groups[at] ?? [], value = Object.values(TINTS)[tint];
  const all = group.flatMap(c => c.completion_ids.map((_, k) => Math.abs(value(c, k)))).filter(isFinite);
  const most = tint === 1 ? 1 : extent(all)[1], scale = `Strongest at ${all.length ? show(most) : "–"}.`;
  const alpha = v => Math.round(16 + 144 * Math.sqrt(Math.abs(v) / most)).toString(16);  // 10 to a0
  const shade = v => v && most ? `background: ${colour(tint ? 4 : +(v < 0))}${alpha(v)}` : "";
  for (const [k, t] of Object.entries({note, scale, prompt: prompts[at], cards: ""})) id(k).textContent = t;
  for (const c of group) {
    const card = make(id("cards"), "article"), ids = c.completion_ids, parts = Object.entries(c.parts ?? {});
    make(card, "b", {}, `reward ${show(c.reward)}, advantage ${show(c.advantage)}`);
    const facts = [...parts.map(part => part.map(show).join(" ")), `${ids.length} tokens`];
    make(card, "div", {class: "dim"}, facts.join(", ") + (c.truncated ? ", truncated" : ""));
    const text = make(card, "div", {class: "text"});
    if (!c.texts) make(text, "span", {style: tint ? "" : shade(c.advantage)}, c.completion + "\n");
    if (c.texts || tint) ids.forEach((token, k) => make(text, "span", {style: shade(value(c, k)), title:
      `token ${token}: sampler ${show(c.sampler_logps[k])}, trainer ${show(c.trainer_logps?.[k])}`},
      c.texts?.[k] || "▯"));  // no text: unknown, or a part of a character
  }
}
offer("tint", Object.keys(TINTS)), offer("run", names), browse("run");
</script></body></html>
"""

if __name__ == "__main__":
    main()
