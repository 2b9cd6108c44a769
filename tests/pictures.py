"""The README's pictures, from the measured runs in results/:  python tests/pictures.py"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from plan_table import shape

from model import memory_plan

RESULTS = ROOT / "results"
COLOURS = {"weights": "#4c78a8", "optimizer": "#9ecae9", "CUDA and graphs": "#bab0ac", "gradients": "#f58518",
           "activations": "#ffbf79", "logits": "#ffdfb8", "engine weights": "#54a24b", "KV cache": "#b5dfae"}


def svg(width: int, height: int, body: list[str]) -> str:
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
            + "\n".join(body) + "\n</svg>\n")


def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def memory(row: dict) -> str:
    """Who holds what of a GPU over one step: bars as planned, lines as measured. row: of the 7B run."""
    halves = memory_plan(shape("7B"), size=2, ranks=row["gpus"], micro_batch=17408, sequence=1152, cache_tokens=64 * 1152,
                         engine_limit=0.3 * 141e9, recompute=True, compiled=True)
    halves = {name: {part: size / 2**30 for part, size in half.items()} for name, half in halves.items()}
    always = {part: halves["training"][part] for part in ("weights", "optimizer", "CUDA and graphs")}
    engine = {part: halves["generating"][part] for part in ("engine weights", "KV cache")}
    loaded = always | {"engine weights": engine["engine weights"]}
    stages = [  # name, parts, what was measured there
        ("wake: push", loaded, None), ("generate", always | engine, row["awake_gib"]),
        ("sleep", always, row["memory/asleep_gib"]), ("reward", always, None), ("advantage", always, None),
        ("update", halves["training"], row["memory/peak_gib"]), ("record", always, None)]
    left, base, wide, scale, body = 50, 300, 82, 2.5, []
    for gib in range(0, 101, 20):
        body += [f'<line x1="{left}" x2="{left + 7 * wide}" y1="{base - gib * scale}" y2="{base - gib * scale}" '
                 'stroke="#e5e5e5"/>', text(left - 6, base - gib * scale + 4, str(gib), "end")]
    body.append(text(left - 6, base - 100 * scale - 14, "GiB", "end"))
    for i, (name, parts, measured) in enumerate(stages):
        x, y = left + i * wide + 8, float(base)
        for part, size in parts.items():
            y -= size * scale
            body.append(f'<rect x="{x}" y="{y:.1f}" width="{wide - 16}" height="{size * scale:.1f}" '
                        f'fill="{COLOURS[part]}"/>')
        body.append(text(x + wide / 2 - 8, base + 18, f"{i + 1}. {name}"))
        if measured:
            y = base - measured * scale
            body += [f'<line x1="{x - 6}" x2="{x + wide - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="black" stroke-width="2"/>',
                     text(x + wide / 2 - 8, y - 5 if measured > 50 else y + 14, f"{measured:.1f}", colour="black")]
    for i, (part, colour) in enumerate(COLOURS.items()):
        x, y = left + i % 4 * 150, base + 40 + i // 4 * 20
        body += [f'<rect x="{x}" y="{y}" width="12" height="12" fill="{colour}"/>', text(x + 18, y + 11, part, "start")]
    body.append(text(left, base + 98, "Bars: the memory plan. Black: measured. 7B, full fine-tuning, 2 H200s, "
                     "--recompute, 64 completions of 1,024 tokens a GPU.", "start"))
    return svg(720, 410, body)


def learning(ours: list[list[dict]], theirs: list[dict]) -> str:
    """Reward over seconds of training; each run's held-out accuracy at its end."""
    left, base, wide, high, longest, body = 50, 260, 520, 220, 140, []
    place = lambda seconds, reward: (left + seconds / longest * wide, base - reward * high)
    for reward in (0, 0.25, 0.5, 0.75, 1):
        y = place(0, reward)[1]
        body += [f'<line x1="{left}" x2="{left + wide}" y1="{y}" y2="{y}" stroke="#e5e5e5"/>',
                 text(left - 6, y + 4, f"{reward:g}", "end")]
    body += [text(place(s, 0)[0], base + 18, f"{s} s") for s in range(0, longest + 1, 20)]
    runs = [("#f58518", run["step_time"], run["reward"], run["after"]) for run in theirs]
    for rows in ours:
        steps = [row for row in rows if row["time/step"] is not None]
        seconds = [row["time/step"] - (row["time/eval"] or 0) for row in steps]
        runs.append(("#4c78a8", seconds, [row["reward"] for row in steps], rows[-1]["eval/accuracy"]))
    for colour, seconds, rewards, accuracy in runs:
        points, now = [], 0.0
        for took, reward in zip(seconds, rewards):
            now += took
            points.append(place(now, reward))
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        x, y = place(now, accuracy)
        body += [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3"/>',
                 f'<circle cx="{x + 6:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>']
    body += [text(left, 22, "SmolLM2-135M-Instruct on sums, 60 steps of 256 completions, 1 H200, three seeds each: reward; "
                  "dots: held-out accuracy", "start"),
             text(left + 150, base - 20, "minigrpo", "start", "#4c78a8"), text(left + 400, base - 20, "TRL 1.16", "start",
                                                                               "#f58518")]
    return svg(720, 290, body)


def main() -> None:
    read = lambda name: json.loads((RESULTS / name).read_text())
    rows = lambda name: [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    (RESULTS / "memory.svg").write_text(memory(read("7b-2xH200.json")))
    (RESULTS / "learning.svg").write_text(learning(
        [rows(f"smollm2-sums-seed{seed}-1xH200.jsonl") for seed in range(3)],
        [read(f"smollm2-sums-seed{seed}-1xH200-trl.json") for seed in range(3)]))


if __name__ == "__main__":
    main()
