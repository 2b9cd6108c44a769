"""report.py: the page holds the numbers of the files, is harmless whatever a model wrote, and says what is damaged."""

import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import tokenizers
from checkpoints import write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)><!--<script>\u2028\ud83d"


class Page(HTMLParser):
    """Checks nesting; collects attributes and the text of scripts."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.scripts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        self.open += [tag] * (tag != "meta")
        self.scripts += [""] * (tag == "script")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open[-1:] == ["script"]:
            self.scripts[-1] += text


def metric(step, **values):
    names = ("reward", "eval/accuracy", "completions/mean_length", "logprob_gap/mean", "entropy", "time/wake",
             "time/generate", "time/eval", "time/sleep", "time/reward", "time/update", "time/step")
    return {"step": step, **dict.fromkeys(names), "loss": 0.5, **values}


def rollout(slot, **values):
    return {"slot": slot, "prompt": "1+1=", "prompt_ids": [3], "completion_ids": [75, 76], "weight_version": 1,
            "sampler_logps": [-0.1234567890123, -2.5], "completion": "hi", "truncated": False, "reward": 1.0,
            "parts": {"gsm8k": 1.0, "length": None}, "advantage": 0.30000000000000004, **values}


def lines(objects):
    return "".join(json.dumps(o) + "\n" for o in objects)


def write_run(folder, rows, rollouts=None, **options):
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model": "nowhere", "num_generations": 2, **options}))
    (folder / "metrics.jsonl").write_text(lines(rows))
    for step, completions in (rollouts or {}).items():
        (folder / f"rollouts/step_{step}.jsonl").write_text(lines(completions))
    return folder


ROWS = [metric(0, **{"reward": 0.1, "eval/accuracy": 0.25, "entropy": float("nan"), "time/step": 3.0}),
        metric(1, **{"reward": None, "logprob_gap/mean": 1.324549742936129e-07, "time/step": 1.0, "time/eval": 0.5}),
        metric(2, **{"eval/accuracy": 0.75})]


def make(tmp_path, *arguments, script=ROOT / "report.py"):
    out = tmp_path / "page.html"
    command = [sys.executable, script, *arguments, "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    return done, out.read_text(encoding="utf-8") if out.exists() else ""


def embedded(tmp_path, *arguments):
    done, text = make(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(Page(text).scripts[0])


def test_numbers_are_those_of_the_files_and_null_stays_null(tmp_path):
    run = write_run(tmp_path / "run", ROWS, {7: [rollout(0), rollout(1, trainer_logps=[-0.1, float("nan")])]})
    [shown] = embedded(tmp_path, run)["runs"]
    for name in shown["metrics"]:
        assert shown["metrics"][name] == [None if row[name] != row[name] else row[name] for row in ROWS]
    assert set(shown["metrics"]) == set(metric(0)) - {"loss"}
    assert shown["results"] == {"first accuracy": 0.25, "last accuracy": 0.75, "steps": 2, "median time/step (s)": 2.0}
    [[first, second]] = shown["rollouts"][0]["groups"]
    assert all(first[key] == rollout(0)[key] for key in first.keys() & rollout(0).keys())
    assert first["trainer_logps"] is None and second["trainer_logps"] == [-0.1, None]


def test_two_runs_are_two_series_with_the_options_that_differ(tmp_path):
    runs = [write_run(tmp_path / name, ROWS[:n], seed=n, same=5, reward=[name]) for name, n in (("a", 2), ("b", 3))]
    data = embedded(tmp_path, *runs)
    assert [run["metrics"]["step"] for run in data["runs"]] == [[0, 1], [0, 1, 2]]
    assert data["differ"] == {"seed": [2, 3], "reward": [["a"], ["b"]]}
    assert [run["name"] for run in data["runs"]] == [str(run) for run in runs]


def test_page_is_whole_and_reaches_for_nothing(tmp_path):
    text = make(tmp_path, write_run(tmp_path / "run", ROWS, {1: [rollout(0)]}))[1]
    assert text.startswith("<!doctype html>") and "link" not in Page(text).tags
    assert not [name for name, value in Page(text).attributes if name in ("src", "href") and value != "#"]
    assert not [word for word in ("url(", "@import", "fetch(", "XMLHttp", "innerHTML", "import(") if word in text]


def test_hostile_text_stays_text(tmp_path):
    hostile = rollout(0, completion=HOSTILE, prompt=[{"role": "user", "content": HOSTILE}], parts={HOSTILE: 1.0})
    run = write_run(tmp_path / "<img src=x>", ROWS, {1: [hostile]}, system_prompt=HOSTILE)
    done, text = make(tmp_path, run, write_run(tmp_path / "other", ROWS))
    assert done.returncode == 0, done.stderr
    assert Page(text).tags.count("script") == 2 and "img" not in Page(text).tags
    assert "</script><script>alert" not in text and "<img" not in text and "<!--" not in text
    shown = json.loads(Page(text).scripts[0])["runs"][0]["rollouts"][0]["groups"][0][0]
    assert shown["completion"] == HOSTILE and shown["prompt"][0]["content"] == HOSTILE and HOSTILE in shown["parts"]


def test_last_steps_and_whole_groups_are_embedded(tmp_path):
    rollouts = {step: [rollout(slot) for slot in range(8)] for step in (1, 2, 9, 10)}
    run = write_run(tmp_path / "run", ROWS, rollouts)
    [shown] = embedded(tmp_path, run, "--steps", "2", "--completions", "5")["runs"]
    assert [r["step"] for r in shown["rollouts"]] == [9, 10]
    assert [[c["slot"] for c in group] for group in shown["rollouts"][0]["groups"]] == [[0, 1], [2, 3]]
    assert "2 of 4 recorded steps, 8 of their 16 completions" in shown["note"]
    assert embedded(tmp_path, run, "--steps", "0")["runs"][0]["rollouts"] == []


def test_texts_of_tokens(tmp_path):
    run = write_run(tmp_path / "run", ROWS)
    write_tokenizer(tmp_path)
    (tmp_path / "model").mkdir(), (run / "latest").mkdir()
    shutil.move(tmp_path / "tokenizer.json", tmp_path / "model")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    text = "aé中😀 b" * 20 + "\n"
    ids = [*tokenizer.encode(text).ids, 1]
    wanted = [piece for c in text for piece in [""] * (len(c.encode()) - 1) + [c]] + ["<|im_end|>"]
    (run / "rollouts/step_1.jsonl").write_text(lines(
        [rollout(0, completion_ids=ids, sampler_logps=[-1.0] * len(ids)),
         rollout(1, completion_ids=ids[:3], sampler_logps=[-1.0] * 3),
         rollout(2, completion_ids=ids[:5], sampler_logps=[-1.0] * 5)]))
    [shown] = embedded(tmp_path, run)["runs"]
    assert "No tokenizer" in shown["note"] and shown["rollouts"][0]["groups"][0][0]["texts"] is None
    (run / "config.json").write_text(json.dumps({"model": "model", "num_generations": 1}))
    texts = [group[0]["texts"] for group in embedded(tmp_path, run)["runs"][0]["rollouts"][0]["groups"]]
    assert texts == [wanted, ["a", "", "é"], ["a", "", "é", "", "\ufffd"]]  # the last was cut within 中
    shutil.move(tmp_path / "model/tokenizer.json", run / "latest")
    assert embedded(tmp_path, run)["runs"][0]["rollouts"][0]["groups"][0][0]["texts"] == wanted


def test_half_a_last_line_is_a_run_at_work(tmp_path):
    run = write_run(tmp_path / "run", ROWS, {1: [rollout(0), rollout(1)]})
    for file in ("metrics.jsonl", "rollouts/step_1.jsonl"):
        (run / file).write_text((run / file).read_text() + '{"step": 3, "rew')
    [shown] = embedded(tmp_path, run)["runs"]
    assert shown["metrics"]["step"] == [0, 1, 2] and len(shown["rollouts"][0]["groups"][0]) == 2


@pytest.mark.parametrize("file, text, said", [
    ("metrics.jsonl", None, "metrics.jsonl"),
    ("config.json", None, "config.json"),
    ("config.json", '{"model": ', "config.json is damaged"),
    ("config.json", '{"model": "m"}', "num_generations is missing"),
    ("metrics.jsonl", lines(ROWS[:1]) + '{"step": 1, "re\n' + lines(ROWS[1:]), "metrics.jsonl, line 2"),
    ("metrics.jsonl", lines([*ROWS, metric(3, reward="x")]), "metrics.jsonl, line 4"),
    ("metrics.jsonl", lines([metric(None)]), "metrics.jsonl, line 1"),
    ("metrics.jsonl", "[1]\n", "metrics.jsonl, line 1"),
    ("metrics.jsonl", "[" * 100000 + "\n", "metrics.jsonl, line 1"),
    ("rollouts/step_1.jsonl", lines([rollout(0), {"slot": 1}]), "step_1.jsonl, line 2"),
    ("rollouts/step_1.jsonl", lines([rollout(0, completion_ids=[1, -1])]), "step_1.jsonl, line 1"),
    ("rollouts/step_1.jsonl", "\xff\n", "step_1.jsonl, line 1")])
def test_damage_is_named(tmp_path, file, text, said):
    run = write_run(tmp_path / "run", ROWS, {1: [rollout(0)]})
    (run / file).unlink() if text is None else (run / file).write_bytes(text.encode("latin-1"))
    done, page = make(tmp_path, run)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not page
    assert str(run) in done.stderr and said in done.stderr


def test_real_run_with_the_module_copied_alone(tmp_path):
    command = [sys.executable, ROOT / "minigrpo.py", "--max_steps", "3", "--eval_steps", "1", "--out", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (tmp_path / "alone").mkdir()
    script = shutil.copy(ROOT / "report.py", tmp_path / "alone")
    done, text = make(tmp_path / "alone", tmp_path / "run", script=script)
    assert done.returncode == 0, done.stderr
    [shown] = json.loads(Page(text).scripts[0])["runs"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(values == [row[name] for row in rows] for name, values in shown["metrics"].items())
    assert shown["results"]["steps"] == 3 and len(shown["rollouts"]) == 3
    for completion in (c for r in shown["rollouts"] for group in r["groups"] for c in group):
        texts = [text for text in completion["texts"] if text not in ("<eos>", "<pad>")]
        assert "".join(texts) == completion["completion"]
