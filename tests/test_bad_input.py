"""Everything a person can get wrong ends in one line that names it (E1): malformed inputs through main().

Each is made by an edit with a fixed seed. What must be refused starts no engine and changes nothing that was
there: the folder of inputs and, with --fresh, an earlier run in --out. What may be repaired, or happens to be
valid, may also finish. Neither shows a traceback nor takes longer than LIMIT.
"""

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file

import minigrpo
import rewards
from config import REFUSED, Config
from model import ModelConfig, Policy
from tiny import write_digits_tokenizer

LIMIT = 200  # seconds for one case; the longest takes one or two where the machine is not busy
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a thousand folders: no disk needs to see them
NAN, INF = float("nan"), float("inf")
SMALL = dict(architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", vocab_size=14, hidden_size=32,
             intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False, eos_token_id=12)
ROWS = [json.dumps({"prompt": f"{i}+{i + 1}=", "answer": str(2 * i + 1)}) for i in range(8)]
LINES = "\n".join(ROWS) + "\n"
WRONG_JSON = ("", "{", "null", "[]", "5", '"text"', "\0", "[" * 100_000, '{"a": 1}}', "NaN", b"\xff\xfe{}")


class Hang(BaseException):
    """The case took longer than LIMIT."""


class EngineStarted(BaseException):
    """An engine was about to be built for an input that must be refused before."""


@dataclasses.dataclass
class Case:
    """edit(folder, rng) makes the input; flags follow the usual ones, {} being the folder.

    words: what the message must hold; empty where the input may be valid. late: only seen when it is used."""

    edit: object = lambda folder, rng: None
    words: tuple = ()
    flags: tuple = ()
    late: bool = False
    seed: int = 0


# ---- Running one case --------------------------------------------------------------------------------------

def started(*_):
    raise EngineStarted


def attempt(monkeypatch, flags, engine=minigrpo.build_engine) -> tuple[int, str, str]:
    """main() in this process: (exit code, the error's message, everything that it printed)."""
    def too_long(*_):
        raise Hang(f"over {LIMIT} s: {flags}")

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(minigrpo, "build_engine", engine)
    monkeypatch.setattr(sys, "argv", ["minigrpo.py", *map(str, flags)])
    monkeypatch.setattr(sys, "path", sys.path[:])
    out, err, code = io.StringIO(), io.StringIO(), 0
    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), ranks.signals_kept():
            minigrpo.main()
    except SystemExit as error:
        code = error.code
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    printed = out.getvalue() + err.getvalue()
    errors = re.findall(r"^error: (.*(?:\n.*)*)", err.getvalue(), re.MULTILINE)
    assert len(errors) == (code != 0) and "Traceback" not in printed, (code, printed)
    assert not errors or "\n" not in errors[0].strip(), errors
    return code, "".join(errors), printed


def snapshot(folder: Path) -> dict:
    """Every path below the folder with what it is; the lock is the program's own, __pycache__ python's."""
    def state(path):
        if path.is_symlink():
            return os.readlink(path)
        return "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return {str(p.relative_to(folder)): state(p) for p in sorted(folder.rglob("*"))
            if p.name != "lock" and "__pycache__" not in p.parts}


def changed(before: dict, after: dict) -> list:
    return sorted(k for k in before | after if before.get(k) != after.get(k))


def usual(folder: Path, **changes) -> list:
    options = dict(model=folder / "in/model", data=folder / "in/data.jsonl", out=folder / "out", prompts_per_step=2,
                   num_generations=2, max_completion_length=3, max_prompt_length=8, max_steps=1, reward_workers=0,
                   eval_steps=0) | changes
    return [part for name, value in options.items() for part in (f"--{name}", value)]


@functools.cache
def made(name: str) -> Path:
    """A folder that lasts as long as this process."""
    kept = tempfile.TemporaryDirectory(prefix=f"bad-input-{name}-", dir=MEMORY)
    atexit.register(kept.cleanup)
    return Path(kept.name)


@functools.cache
def good_input() -> Path:
    """model/, data.jsonl and reward.py, all in order."""
    folder = made("good")
    write_digits_tokenizer(folder / "model")
    write(folder / "model/config.json", SMALL)
    torch.manual_seed(0)
    Policy(ModelConfig.from_folder(folder / "model")).save(folder / "model")
    write(folder / "data.jsonl", LINES)
    write(folder / "reward.py", "def f(completions, **columns):\n    return [float(len(c)) for c in completions]\n")
    return folder


@pytest.fixture
def folder():
    """in/ holds the good input."""
    with tempfile.TemporaryDirectory(prefix="bad-input-", dir=MEMORY) as name:
        shutil.copytree(good_input(), Path(name) / "in")
        yield Path(name)


@pytest.fixture
def run(folder):
    return shutil.copytree(stopped_run(), folder / "run", symlinks=True)


# ---- Edits -------------------------------------------------------------------------------------------------

def write(path: Path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def puts(name: str, content):
    return lambda folder, rng: write(folder / name, content)


def both(*edits):
    return lambda folder, rng: [edit(folder, rng) for edit in edits]


def garbage(rng, depth=0):
    """A JSON value of any shape."""
    if depth > 3 or rng.random() < 0.3:
        return rng.choice([None, True, -1, 10**25, 1.5, NAN, -INF, "", "\0", "1+1=", "\ud800", "ü\u2028", {}, []])
    inside = [garbage(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
    keys = ["prompt", "answer", "role", "content", "messages", "nums", "target", "completions", "a.b"]
    return inside if rng.random() < 0.5 else {rng.choice(keys): value for value in inside}


def garbage_rows(folder, rng):
    rows = [{"prompt": "1+1=", rng.choice("abc"): garbage(rng)} if rng.random() < 0.8 else garbage(rng) for _ in "123"]
    write(folder / "data.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def changes(name: str, change):
    """change(bytes, rng) → bytes"""
    return lambda folder, rng: (folder / name).write_bytes(change((folder / name).read_bytes(), rng))


def cut(name: str):
    """Truncated, never at the end of a line."""
    return changes(name, lambda data, rng: data[:rng.choice(
        [n for n in range(1, len(data) - 3) if data[n - 1:n + 1] not in (b"\n{", b"}\n")])])


def flip(name: str):
    """Up to four bytes become others."""
    def change(data, rng):
        data = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(data)
    return changes(name, change)


def not_utf8(name: str):
    return changes(name, lambda data, rng: rng.choice([b"\xff", b"\xc3\x28", b"\xe9"]).join(
        (data[:(place := rng.randrange(len(data)))], data[place:])))


def no_file(name: str, kind: str):
    """The file is gone, a folder, a link to nothing or to itself, or one that cannot be read (root reads all)."""
    def edit(folder, rng):
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "folder":
            path.mkdir()
        elif kind != "gone":
            path.symlink_to({"dangling": "nowhere", "loop": path.name, "unreadable": "/proc/self/mem"}[kind])
    return edit


KINDS = ("gone", "folder", "dangling", "loop", "unreadable")


def seeds(name: str, count: int, edit, *words) -> dict:
    return {f"{name} seed {n}": Case(edit, words, seed=n) for n in range(count)}


# ---- (a) Data files ----------------------------------------------------------------------------------------

def data(content, *words, name="data.jsonl", flags=()):
    return Case(puts(name, content), (name, *words) if words else (), ("--data", "{}/" + name, *flags))


def with_row(row):
    return LINES.replace(ROWS[2], row if isinstance(row, str) else json.dumps(row))


USER, TOO_BIG = {"role": "user", "content": "1+1="}, "1" * 5000
BAD_PROMPTS = [5, True, None, [], ["1+1="], {"a": 1}, " \n", [{"content": "1"}], [{"role": "user", "content": 5}], "a+b=",
               [USER, {"role": "assistant", "content": "2"}], '[{"role": "user", "content": ', "\ud800"]
BAD_ROWS = ("5", "null", "{", "{}", "{'prompt': '1'}", f'{{"prompt": {TOO_BIG}}}', '{"prompt": "1\0"', "[" * 100_000)
BAD_FILES = {
    "d.jsonl": ("", "\ufeff", "[1, 2]", "\0" * 500, '{"promt": "1+1="}\n'),
    "d.json": ("", "[]", "[5]", '[{"prompt": "1+1="}', "[" * 100_000, '{"data": [{"prompt": "1+1="}]}'),
    "d.csv": ("", "prompt,answer\n", 'prompt,answer\n"1+1=,2\n', "prompt\n1+1=,2\n", "promt,answer\n1+1=,2\n",
              "prompt\n" + "1" * 200_000, "nums,target\nx,3\n", b"\xff\n"),
    "d.parquet": ("", "PAR1garbagePAR1")}
DATA = {
    **{f"{column} {value!r:.60}": data(with_row({column: value}), "line 3" if column == "prompt" else "line ")
       for column, values in (("prompt", BAD_PROMPTS), ("messages", BAD_PROMPTS[::4])) for value in values},
    **{f"row {row:.20}": data(with_row(row), "line 3") for row in BAD_ROWS},
    **{f"{name} {text[:15]!r}": data(text, " ", name=name) for name, texts in BAD_FILES.items() for text in texts},
    **{f"may run {text[:15]!r}": data(text, name="d.csv") for text in (
        "prompt,prompt\n1+1=,2+2=\n", "prompt,completions\n1+1=,2\n", "nums,target\n[1e999],3\n", "\nprompt\n\n1+1=\n")},
    "suffix": data(LINES, ".jsonl", name="data.txt"),
    "--prompt_column": data(LINES, "--prompt_column", "'x.y'", flags=("--prompt_column", "x.y")),
    "--answer_column": data(LINES, "--answer_column", "'gold'", flags=("--answer_column", "gold")),
    "too long": data('{"prompt": "1+1=1+1=1+1="}', "--max_prompt_length 8"),
    "name too long": Case(words=("xxxxx",), flags=("--data", "x" * 3000 + ".jsonl")),
    "a prompt for a file": Case(words=("What is 1+1?",), flags=("--data", "What is 1+1? " * 40)),
    "huge answer": data(with_row({"prompt": "1+1=", "answer": 10**400})),
    "deep column": data('{"prompt": "1+1=", "answer": "2", "a": ' + "[" * 400 + "]" * 400 + "}"),
    "half a surrogate in a role": data(json.dumps({"prompt": [{"role": "\ud800", "content": "1+1="}], "answer": "2"})),
    "duplicate keys": data('{"prompt": "1+1=", "prompt": "2+2=", "answer": "4", "answer": 4}'),
    **{f"is {kind}": Case(no_file("data.jsonl", kind), ("data.jsonl",)) for kind in KINDS[:2]},
    **{f"--eval_data is {kind}": Case(both(puts("e.jsonl", LINES), no_file("e.jsonl", kind)), ("e.jsonl",),
                                      ("--eval_data", "{}/e.jsonl")) for kind in KINDS[2:]},
    "--eval_data": Case(puts("e.jsonl", with_row({"prompt": 5})), ("e.jsonl", "line 3"), ("--eval_data", "{}/e.jsonl")),
    **seeds("truncated", 2, cut("data.jsonl"), "data.jsonl, line"),
    **seeds("not utf-8", 2, not_utf8("data.jsonl"), "data.jsonl, line", "UTF-8"),
    **seeds("bytes", 3, flip("data.jsonl")),
    **seeds("garbage", 5, garbage_rows),
}


# ---- (b) Model folders -------------------------------------------------------------------------------------

def config(*words, drop=(), **other):
    """config.json with other values; the message must name it and the first key, or the words."""
    content = {k: v for k, v in {**SMALL, **other}.items() if k not in drop}
    return Case(puts("model/config.json", content), ("config.json", *(words or [*other, *drop][:1])))


def tensors(change, *words):
    """change(tensors of model.safetensors by name) in place."""
    def edit(folder, rng):
        values = load_file(folder / "model/model.safetensors")
        change(values)
        save_file(values, folder / "model/model.safetensors")
    return Case(edit, words)


def header(change):
    """change(the JSON header of model.safetensors) in place, or what to write for it."""
    def edit(data, rng):
        size = struct.unpack("<Q", data[:8])[0]
        head = json.loads(data[8:8 + size])
        head = change(head) or head
        text = head if isinstance(head, bytes) else json.dumps(head).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + size:]
    return Case(changes("model/model.safetensors", edit), ("model.safetensors",))


def file(name, content, *words):
    return Case(puts(f"model/{name}", content), (name, *words))


def template(text, *words):
    return Case(both(puts("model/chat_template.jinja", text), puts("data.jsonl", {"messages": [USER]})), words)


def tokenizer(change):
    def edit(text, rng):
        change(raw := json.loads(text), rng)
        return json.dumps(raw).encode()
    return changes("model/tokenizer.json", edit)


def prune(raw, rng):
    """Takes something out of the JSON, or puts garbage in its place."""
    while isinstance(raw, (dict, list)) and raw:
        key = rng.choice(list(raw) if isinstance(raw, dict) else range(len(raw)))
        if not isinstance(raw[key], (dict, list)) or not raw[key] or rng.random() < 0.3:
            raw[key] = garbage(rng)
            if rng.random() < 0.4:
                del raw[key]
            return
        raw = raw[key]


def bigger_vocabulary(raw, rng):
    """Another model's: the digits stand past the end of the embedding."""
    raw["model"]["vocab"] = {token: i + 100 for token, i in raw["model"]["vocab"].items()}
    for token in raw["added_tokens"]:
        token["id"] += 100


def wider_model(folder, rng):
    """Ids from 14 on are nobody's token; the policy emits them, and they decode to nothing."""
    write(folder / "model/config.json", {**SMALL, "vocab_size": 300})
    Policy(ModelConfig.from_folder(folder / "model")).save(folder / "model")


UP, ROPE = "model.layers.1.mlp.up_proj.weight", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
SIZES = [k for k, v in SMALL.items() if type(v) is int and k != "eos_token_id"]
WEIGHTS = "model/model.safetensors"
MODEL = {
    # Every file with one kind of broken JSON, and every kind in one of the files.
    **{f"{name} {text[:9]!r}": file(name, text) for name, text in [*zip((
        "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "special_tokens_map.json"), WRONG_JSON[1:]), *(("config.json", text) for text in WRONG_JSON)]},
    **{f"{name} is {kind}": Case(no_file(f"model/{name}", kind), (name,)) for name, kind in zip(
        ("config.json", "model.safetensors", "tokenizer.json", "config.json", "model.safetensors"), KINDS)},
    **{f"{key} {value!r:.12}": config(**{key: value}) for key, value in zip(
        SIZES * 2, (-1, 0, 10**15, 2.5, "four", [4], NAN, True, 10**15, -1, True, "four"))},
    **{f"without {key}": config(drop=[key]) for key in ("vocab_size", "rms_norm_eps")},
    **{f"{key} null": config(**{key: None}) for key in ("hidden_size", "rms_norm_eps")},
    **{f"{key} {value!r}": config(**{key: value}) for key, value in (
        ("rms_norm_eps", -1.0), ("rms_norm_eps", NAN), ("rope_theta", INF), ("rope_theta", "x"), ("rope_theta", 0))},
    **{f"architectures {value!r}": config("supported", architectures=value) for value in (
        None, "LlamaForCausalLM", ["MixtralForCausalLM"], [5])},
    **{f"{key} {value}": config(**{key: value}) for key, value in dict(
        num_experts=8, vision_config={"a": 1}, hidden_act="gelu", rope_scaling=5, rope_parameters=["x"],
        tie_word_embeddings="no", attention_bias="yes", mlp_bias=[], quantization_config={"bits": 4}).items()},
    "sliding window": config("sliding window", use_sliding_window=True),
    **{f"rope {value!r:.50}": config("rope", rope_scaling=value) for value in (
        {"rope_type": "yarn"}, {"rope_type": 5}, {"rope_type": ["x"]}, {"type": "llama3"})},
    **{f"llama3 {key} {value}": config(key, rope_scaling={**ROPE, key: value}) for key in list(ROPE)[1:]
       for value in (("x", None) if key == "factor" else (NAN,))},
    "heads do not divide": config(num_key_value_heads=3), "more kv heads": config(num_key_value_heads=8),
    "odd head_dim": config(head_dim=7),
    "no head_dim": config("num_attention_heads", num_attention_heads=5, drop=["head_dim"]),
    "other width": Case(config(hidden_size=64).edit, ("model.safetensors", "(14, 64)")),
    "other vocabulary": Case(config(vocab_size=16).edit, ("model.safetensors", "(16, 32)")),
    "huge": Case(config(vocab_size=10**6, hidden_size=10**6).edit, ("model.safetensors", "(1000000, 1000000)")),
    **{f"tensor {dtype}": tensors(lambda t, dtype=dtype: t.update({UP: torch.ones(48, 32).to(dtype)}), UP, "quantized")
       for dtype in (torch.int8, torch.float8_e4m3fn)},
    "tensor missing": tensors(lambda t: t.pop(UP), UP, "lacks"), "tensors none": tensors(lambda t: t.clear(), "lacks"),
    "tensor extra": tensors(lambda t: t.update({"x.weight": torch.ones(2)}), "model.safetensors", "x.weight"),
    **{f"tensor {shape}": tensors(lambda t, shape=shape: t.update({UP: torch.ones(shape)}), UP, str(shape))
       for shape in ((32, 48), ())},
    "tensor full of NaN": tensors(lambda t: t.update({UP: torch.full((48, 32), NAN)})),
    **{f"header {new!r:.60}": header(lambda h, new=new: h[UP].update(new)) for new in (
        dict(dtype="F4", shape=[96, 128]), dict(dtype="BOGUS"), dict(data_offsets=[0, 10**12]), dict(shape=[2**62, 2**62]))},
    **{f"header {text[:5]!r}": header(lambda h, text=text: text) for text in (b"[1]", b"[" * 5000)},
    **{f"header length {n}": Case(changes(WEIGHTS, lambda data, rng, n=n: struct.pack("<Q", n) + data[8:]),
                                  ("model.safetensors",)) for n in (0, 2**64 - 1)},
    **{f"index {value!r:.30}": file("model.safetensors.index.json", {"weight_map": value}) for value in (
        5, None, {UP: 5}, {UP: "a\0b"}, {UP: "x" * 3000})},
    **{f"index {value!r}": Case(puts("model/model.safetensors.index.json", {"weight_map": value}), words) for value, words in (
        ({UP: "model-9.safetensors"}, ("model-9.safetensors",)), ({UP: "."}, ("model",)), ({}, ("lacks",)))},
    "bin weights": Case(lambda folder, rng: (folder / WEIGHTS).rename(folder / "model/pytorch_model.bin"), (".bin",)),
    **{f"eos_token_id {value!r}": file("generation_config.json", {"eos_token_id": value}, "eos_token_id")
       for value in ("12", 1.5, -1, [12, "x"], True, 10**30)},
    "no eos": Case(both(puts("model/tokenizer_config.json", {}), config(drop=["eos_token_id"]).edit), ("EOS", "eos_token_id")),
    "eos past the end": Case(both(puts("model/tokenizer_config.json", {}), config(eos_token_id=14).edit), ("eos_token_id", "14")),
    **{f"eos_token {value!r}": Case(puts("model/tokenizer_config.json", {"eos_token": value})) for value in (
        5, {"content": 5}, "nowhere")},
    **{f"chat_template {value!r}": file("tokenizer_config.json", {"chat_template": value}, "chat_template") for value in (
        5, ["x"], [{"name": "default", "template": 5}])},
    **{f"template {text[:30]!r}": template(text, "template") for text in (
        "{% for %}", "{{ x.y.z }}", "{% include 'x' %}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ " + "(" * 2000 + " }}", "{% for i in range(10**9) %}x{% endfor %}")},
    "template without tokens": template("{{ '' }}", "data.jsonl, line 1", "no tokens"),
    "--chat_template nowhere": Case(words=("--chat_template nowhere.jinja",), flags=("--chat_template", "nowhere.jinja")),
    "--chat_template bytes": Case(puts("t.jinja", b"\xff"), ("t.jinja", "UTF-8"), ("--chat_template", "{}/t.jinja")),
    **{f"--model {name}": Case(lambda folder, rng: (folder / "empty").mkdir(), (word,), ("--model", name)) for name, word in (
        ("{}/reward.py", "--model"), ("nowhere", "--model nowhere"), ("{}/empty", "config.json"), ("", "--model"))},
    **seeds("config truncated", 2, cut("model/config.json"), "config.json"),
    **seeds("config bytes", 2, flip("model/config.json")),
    **seeds("tokenizer truncated", 1, cut("model/tokenizer.json"), "tokenizer.json"),
    **seeds("tokenizer pruned", 7, tokenizer(prune)),
    **seeds("tokenizer of another model", 1, tokenizer(bigger_vocabulary), "tokenizer.json", "vocab_size 14"),
    **seeds("vocabulary wider than the tokenizer", 1, wider_model),
    **seeds("weights truncated", 2, cut(WEIGHTS), "model.safetensors"),
    **seeds("weights bytes", 2, flip(WEIGHTS)),
}

# ---- (c) Option values -------------------------------------------------------------------------------------

CHOICES = [f.name for f in dataclasses.fields(Config) if f.metadata.get("choices")]
OPTIONS = {
    # One mechanism checks all numbers: some of them, each with another wrong value.
    **{f"{name} {value}": ((f"--{name}",), f"--{name}={value}") for name, value in (
        ("learning_rate", "nan"), ("temperature", "-inf"), ("epsilon", "text"), ("beta", ""), ("max_grad_norm", "1_"), ("delta", 1e31),
        ("min_lr_rate", 1.0), ("prompts_per_step", 10**30), ("num_generations", 1), ("seed", -10**30), ("save_steps", "1.5"),
        ("eval_steps", -1), ("max_steps", 0), ("reward_workers", 1025))},
    "num_train_epochs nan": (("--num_train_epochs",), "--num_train_epochs=nan", "--max_steps=-1"),
    # At the edges of what is allowed: refused, or it runs.
    **{f"{name} {value}": ((), f"--{name}={value}") for name, value in (
        ("learning_rate", 1e30), ("temperature", 1e30), ("timeout_minutes", 1e6), ("max_grad_norm", 1e-300), ("adam_epsilon", 1e30),
        ("prompts_per_step", 2**31), ("num_generations", 2**20), ("micro_batch_tokens", 1), ("seed", -2**31), ("reward_workers", 1024),
        ("save_steps", 2**31), ("warmup_steps", 10**6), ("eval_steps", 1), ("num_minibatches", 2), ("max_skipped", 1), ("delta", 1e30))},
    **{f"{name} nonsense": ((f"--{name}",), f"--{name}=nonsense") for name in CHOICES},
    **{name: ((f"--{name}",), f"--{name}", "1") for name in (*list(REFUSED)[::4], "nonsense")},
    **{" ".join(flags): (flags[:1], *flags) for flags in (
        ("--reward_weights", "1", "2"), ("--reward_weights", "nan"), ("--reward_weights", "x"), ("--reward",), ("--colocate",),
        ("--reward", "math", "math"), ("--colocate", "--split"), ("--split",),
        ("--max_completion_length", "60"), ("--max_prompt_length", "1"), ("--reward", "gsm9k"),
        ("--stop",), ("--stop", ""), ("--stop", "a", ""), ("--chat_template_kwargs", "{"), ("--chat_template_kwargs", '{"enable_thinking": 1}'))},
    "stray word": (("word",), "--fresh", "word"),
    "system prompt not in the vocabulary": (("data.jsonl, line 1", "Think"), "--system_prompt", "Think"),
}
OPTIONS = {name: Case(words=words, flags=tuple(flags)) for name, (words, *flags) in OPTIONS.items()}


# ---- (d) Reward files --------------------------------------------------------------------------------------

def reward(text, *words, late=False):
    """Refused before an engine is started; late: after the first batch."""
    return Case(puts("r.py", text), words, ("--reward", "{}/r.py:f"), late)


CALL = "def f(completions, **k):\n    "
REWARDS = {
    **{f"is {kind}": Case(both(puts("r.py", ""), no_file("r.py", kind)), ("--reward", "r.py"), ("--reward", "{}/r.py:f"))
       for kind in KINDS},
    **{name: Case(words=("--reward", name), flags=("--reward", "{}/" + name)) for name in ("reward.py", "model:f", "data.jsonl:f")},
    **{f"import {text[:20]!r}": reward(text, "--reward", "r.py", "line") for text in (
        "x = 1\ndef f(:\n", "import no_such_module_of_anybody\n", "1 / 0\n", "import sys\nsys.exit(3)\n", "@undefined\ndef f(): 1")},
    **{f"content {text[:20]!r}": reward(text, "--reward", "r.py") for text in (
        "", "def g(): pass\n", "f = 5\n", b"x = '\xff'\n", "x = '\0'\n", "if 1:\n\tx = 1\n        y = 2\n", "x = " + "(" * 300)},
    **{f"call {text[:60]!r}": reward(text, "--reward", "r.py:f", late=True) for text in (
        "def f(): return []\n", "def f(completions, nonsense): return []\n", CALL + "raise KeyError('x')\n", "class f: pass\n",
        CALL + "raise SystemExit\n", CALL + "return f(completions)\n", "f = len\n", CALL + "yield 1\n    1 / 0\n",
        "async " + CALL + "1 / 0\n")},
    **{f"returns {value}": reward(f"{CALL}return {value}\n", "--reward", "r.py:f", late=True) for value in (
        "[]", "None", "'text'", "['1'] * len(completions)", "[1.0] * 99", "[1j] * len(completions)")},
    **{f"may return {value}": reward(f"{CALL}return {value}\n", late=True) for value in (
        "[float('nan')] * len(completions)", "[None] * len(completions)", "[10**400] * len(completions)",
        "[1e308] * len(completions)", "(float(len(c)) for c in completions)")},
}
CASES = {f"{group}: {name}": case for group, cases in dict(data=DATA, model=MODEL, option=OPTIONS, reward=REWARDS).items()
         for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_input(monkeypatch, folder, case):
    case.edit(folder / "in", random.Random(case.seed))
    flags = [*usual(folder), *(flag.replace("{}", str(folder / "in")) for flag in case.flags)]
    early = case.words and not case.late
    if early:  # with --fresh, an earlier run in the same folder must live through the mistake
        shutil.copytree(stopped_run(), folder / "out", symlinks=True)
    before = snapshot(folder)
    code, said, _ = attempt(monkeypatch, [*flags, "--fresh"] if early else flags, started if early else minigrpo.build_engine)
    assert not changed(before, {k: v for k, v in snapshot(folder).items() if early or k in before or not k.startswith("out")})
    assert not case.words or code and all(word in said for word in case.words), said or "it went through"


@pytest.mark.parametrize("text, words", [
    ("import os\nos._exit(3)\n", "while importing"), ("while True: pass\n", "over 1 s"), ("def f(:\n", "line 1"),
    ("def f(completions, **k):\n    return []\n", "0 values"), ("def f(): pass\n", "unexpected")])
def test_rewards_in_a_worker(monkeypatch, folder, text, words):
    """What would take the trainer with it: the worker ends, and the run says why."""
    monkeypatch.setattr(rewards, "LOAD_SECONDS", 1)
    write(folder / "in/r.py", text)
    code, said, _ = attempt(monkeypatch, usual(folder, reward=folder / "in/r.py:f", reward_workers=1))
    assert code == 1 and "--reward" in said and "r.py" in said and words in said, said


@pytest.mark.parametrize("out", ["{}/file", "{}/file/run", "/proc/run", "{}/" + "x" * 300, "{}/in/model", "{}/other"])
def test_out_that_cannot_be(monkeypatch, folder, out):
    """Nothing of a folder that no run wrote is touched, with --fresh or without."""
    write(folder / "file", "mine")
    write(folder / "other/step_7/weights", "mine")
    before, out = snapshot(folder), out.replace("{}", str(folder))
    for more in ([], ["--fresh"]):
        code, said, _ = attempt(monkeypatch, [*usual(folder, out=out), *more], started)
        assert code == 1 and out in said and not changed(before, snapshot(folder)), said


# ---- (e) Run folders ---------------------------------------------------------------------------------------

STEPS = dict(max_steps=4, save_steps=1, learning_rate=1e-2)
SHARD, RUN_WEIGHTS = "latest/optimizer/00000.safetensors", "latest/model.safetensors"
NEEDED = {"config.json": "config.json", "latest/config.json": "config.json", "latest/trainer.json": "trainer.json",
          RUN_WEIGHTS: "model.safetensors", SHARD: "optimizer"}  # the run cannot go on without any; the word for each
OTHERS = ("metrics.jsonl", "rollouts/step_1.jsonl", "latest/tokenizer.json", "step_1/model.safetensors", "lock")


def continued(out: Path) -> list:
    return usual(out.parent, out=out, model=good_input() / "model", data=good_input() / "data.jsonl",
                 reward=f"{good_input()}/reward.py:f", **STEPS)


@functools.cache
def stopped_run() -> Path:
    """Two of four updates, with the checkpoints of both; then somebody stopped it."""
    run = made("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        def stop(_, row, rollouts):
            if row["step"] == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return []

        patch.setattr(minigrpo.Health, "check", stop)
        code, said, printed = attempt(patch, continued(run))
    assert code == 0 and "stopped after update 2" in printed, said
    return run


@functools.cache
def whole_run() -> dict:
    """What the undisturbed run is in the end."""
    run = made("whole") / "run"
    shutil.copytree(stopped_run(), run, symlinks=True)
    with pytest.MonkeyPatch.context() as patch:
        assert attempt(patch, continued(run))[0] == 0
    return result_of(run)


def result_of(run: Path) -> dict:
    """Weights, optimizer and last rollouts; of the metrics as many rows as there must be."""
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 3 and os.readlink(run / "latest") == "step_4"
    return {name: value for name, value in snapshot(run).items()
            if name.startswith("step_4/") and "trainer" not in name or "step_3.jsonl" in name}


def swap(one, other):
    def edit(run, rng):
        a, b = (run / one).read_bytes(), (run / other).read_bytes()
        write(run / one, b)
        write(run / other, a)
    return edit


def shard(**new):
    """new: what becomes of each tensor, None: it is left out."""
    def edit(run, rng):
        tensors = {k: new.get(k, lambda t: t) and new.get(k, lambda t: t)(v) for k, v in load_file(run / SHARD).items()}
        save_file({k: v.clone() for k, v in tensors.items() if v is not None}, run / SHARD)
    return edit


def every(change):
    return shard(**dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), change))


def relink(target):
    def edit(run, rng):
        (run / "latest").unlink()
        if target:
            (run / "latest").symlink_to(target)
    return edit


def latest_is_a_folder(run, rng):
    (run / "latest").unlink()
    (run / "step_2").rename(run / "latest")


def line(text, place):
    return changes("metrics.jsonl", lambda data, rng: b"".join(
        [*(lines := data.splitlines(keepends=True))[:place], text, *lines[place:]]))


def puts_each(*names, content=""):
    return both(*(puts(name, content) for name in names))


LATE = ("step_2", "the optimizer is not that of")  # found when the optimizer is read, after the engine
RUNS = {
    **{f"{name} {what}": Case(edit(name), tuple(NEEDED.get(name, "").split()))
       for number, name in enumerate((*NEEDED, *OTHERS)) for what, edit in list(dict(
           {kind: functools.partial(no_file, kind=kind) for kind in KINDS if kind != "loop"}, emptied=lambda n: puts(n, b""),
           garbage=lambda n: puts(n, b"\0\xff garbage\n")).items())[number % 2::2]},
    **{f"{name} {text[:9]!r}": Case(puts(name, text), (NEEDED[name],)) for name, text in zip(list(NEEDED)[:3] * 4, WRONG_JSON)},
    **{k: c for name in (*NEEDED, *OTHERS[:3]) for k, c in seeds(
        f"{name} truncated", 1, cut(name), *NEEDED.get(name, "").split()).items()},
    **{f"swap {one} {other}": Case(swap(one, other), words) for one, other, words in (
        (RUN_WEIGHTS, SHARD, ("model.safetensors",)), ("latest/trainer.json", "config.json", ("trainer.json",)),
        ("latest/config.json", "config.json", ("other options",)), ("latest/config.json", "latest/trainer.json", ("trainer.json",)),
        ("latest/config.json", "latest/tokenizer.json", ("config.json",)),
        ("metrics.jsonl", "rollouts/step_1.jsonl", ("metrics.jsonl, line 1",)), (RUN_WEIGHTS, "step_1/model.safetensors", LATE),
        (SHARD, "step_1/optimizer/00000.safetensors", LATE),
        ("latest/trainer.json", "step_1/trainer.json", ("trainer.json", "step 1", "step_2")))},
    "config of another model": Case(puts("latest/config.json", SMALL | {"rope_theta": 1e6}), ("config.json", "model")),
    **{f"shard {n}": Case(edit, ("00000.safetensors", "damaged")) for n, edit in enumerate((
        shard(exp_avg=lambda t: t[:-64]), shard(master=lambda t: t.view(-1, 64)), shard(master=lambda t: t.to(torch.int32)),
        shard(master=None), shard(exp_avg_sq=None), shard(step=None), shard(step=lambda t: torch.ones(3))))},
    **{f"shards {n}": Case(edit, ("optimizer", "elements")) for n, edit in enumerate((
        every(lambda t: t[:len(t) // 2]), every(lambda t: torch.cat([t, t])),
        lambda run, rng: shutil.copy(run / SHARD, run / SHARD.replace("0.", "1.")),
        lambda run, rng: (run / SHARD).rename(run / SHARD.replace("0.", "1.")),
        lambda run, rng: shutil.rmtree(run / "latest/optimizer")))},
    **{f"master {n}": Case(shard(master=change), LATE) for n, change in enumerate((lambda t: t * NAN, lambda t: t * 0))},
    **{f"trainer {new}": Case(puts("latest/trainer.json", {"step": 2, **new}), (*words, "step_2")) for new, words in (
        *(({"step": value}, ("trainer.json",)) for value in ("2", True, 3, None)),)},
    "trainer of other data": Case(puts("latest/trainer.json", {"step": 2, "data": "x"}), ("data.jsonl", "changed")),
    "latest is a folder": Case(latest_is_a_folder, ("trainer.json", "its folder is", "latest")),
    "latest is a file": Case(both(relink(None), puts("latest", "step_2")), ("latest",)),
    **{f"latest to {target}": Case(relink(target), ("trainer.json",)) for target in (".", "step_2/optimizer")},
    **{f"latest to {target} is mended": Case(relink(target)) for target in (None, "step_9", "step_1", "latest")},
    **{f"metrics {text!r:.20} in the middle": Case(line(text, 1), ("metrics.jsonl, line 2",)) for text in (
        b"garbage\n", b"5\n", b"{}\n", b'{"step": "x"}\n', b'{"step": 0, "rew', b"[" * 100_000 + b"\n")},
    **{f"metrics ends in {text!r:.20}": Case(line(text, 2)) for text in (
        b'{"step": 2, "rew', b"\0\0\0", b'{"step": 2, "reward": null}\n')},
    "rollouts is a file": Case(lambda run, rng: (shutil.rmtree(run / "rollouts"), write(run / "rollouts", "")), ("rollouts",)),
    "leftovers": Case(puts_each("step_3/x", "step_3.partial/x", "step_1.partial-old/x")),
    "somebody else's": Case(puts_each("step_notes/x", "step_2 copy/x", "step_²/x", "step_.partially/x",
                                      "rollouts/step_x.jsonl", "notes.txt", content="mine")),
    "pickles": Case(lambda run, rng: puts_each("optimizer.pt", "latest/optimizer.pt", "latest/optimizer/00001.pt",
                                               "latest/training_args.bin", content=evil(run.parent))(run, rng)),
}


@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS.keys())
def test_run_folder(monkeypatch, run, case):
    """Refused with everything left as it was, or the run ends bitwise as if nothing had been broken."""
    case.edit(run, random.Random(case.seed))
    before, inputs = snapshot(run), snapshot(good_input())
    engine = started if case.words and case.words != LATE else minigrpo.build_engine
    code, said, printed = attempt(monkeypatch, continued(run), engine)
    assert code or "continues after update" in printed
    assert not changed(inputs, snapshot(good_input())) and not (run.parent / "marker").exists()
    assert not case.words or code == 1 and all(word in said for word in case.words), said
    assert not changed(before, snapshot(run)) if code else result_of(run) == whole_run()
    mine = hashlib.sha256(b"mine").hexdigest()
    assert {n for n, v in before.items() if v == mine} == {n for n, v in snapshot(run).items() if v == mine}


def test_fresh_starts_anew_on_a_damaged_run(monkeypatch, run):
    for name in (*NEEDED, "metrics.jsonl"):
        write(run / name, b"\0garbage\n")
    assert attempt(monkeypatch, [*continued(run), "--fresh"])[0] == 0
    assert result_of(run) == whole_run()


def test_fresh_does_not_remove_the_model_that_it_starts_from(monkeypatch, run):
    before = snapshot(run)
    for model in (run / "latest", run / "step_1"):
        code, said, _ = attempt(monkeypatch, [*continued(run), "--model", model, "--fresh"], started)
        assert code == 1 and f"--model {model}" in said and "--out" in said and not changed(before, snapshot(run))


# ---- Code in what is loaded, bugs, and the program as it is started ----------------------------------------

def evil(folder: Path) -> bytes:
    """A pickle that leaves a file when it is loaded."""
    class Evil:
        def __reduce__(self):
            return Path.touch, (folder / "marker",)
    return pickle.dumps(Evil())


def test_nothing_that_is_loaded_runs_code(monkeypatch, folder):
    pickle.loads(evil(folder / "in"))
    (folder / "in/marker").unlink()  # it works
    model, bad = folder / "in/model", evil(folder)
    remote = {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.Tokenizer", None], "AutoConfig": "evil.Config"}
    write(model / "evil.py", f"open({str(folder / 'marker')!r}, 'w')\n")
    write(model / "config.json", SMALL | {"auto_map": remote, "trust_remote_code": True})
    write(model / "tokenizer_config.json", {"eos_token": "<eos>", "auto_map": remote, "tokenizer_class": "evil.Tokenizer"})
    puts_each("pytorch_model.bin", "optimizer.pt", "model.pt", "model.ckpt", "tokenizer.pkl", content=bad)(model, None)
    assert attempt(monkeypatch, usual(folder))[0] == 0
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        kept = (model / name).read_bytes()
        write(model / name, bad)
        code, said, _ = attempt(monkeypatch, usual(folder, out=folder / name), started)
        assert code == 1 and name in said
        write(model / name, kept)
    (model / "model.safetensors").unlink()
    code, said, _ = attempt(monkeypatch, usual(folder, out=folder / "last"), started)
    assert code == 1 and "convert the .bin" in said and not (folder / "marker").exists()


BUGS = [(minigrpo, "policy_loss"), (minigrpo, "step_metrics"), (minigrpo.Run, "record"), (minigrpo.ShardedAdamW, "step")]


def test_a_variable_shows_where_reading_failed(monkeypatch, folder):
    write(folder / "in/data.jsonl", "{")
    assert attempt(monkeypatch, usual(folder), started)[0] == 1
    monkeypatch.setenv("MINIGRPO_TRACEBACK", "1")
    with pytest.raises(ValueError, match="data.jsonl, line 1"):
        attempt(monkeypatch, usual(folder), started)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyError, ValueError])
@pytest.mark.parametrize("module, name", BUGS, ids=[name for _, name in BUGS])
def test_a_bug_after_reading_keeps_its_traceback(monkeypatch, run, module, name, error):
    def bug(*_, **__):
        raise error("planted")

    monkeypatch.setattr(module, name, bug)
    with pytest.raises(error, match="planted"):
        attempt(monkeypatch, continued(run))


@pytest.mark.parametrize("edit, words", [
    (cut("data.jsonl"), "data.jsonl, line"), (puts("model/config.json", "[]"), "config.json"), (cut(WEIGHTS), "model.safetensors"),
    (puts("reward.py", "def f(:"), "reward.py"), (puts("out/config.json", "{}"), "out holds config.json")],
    ids=["data", "config", "weights", "reward", "out"])
def test_as_a_command(folder, edit, words):
    edit(folder / "in", random.Random(0))
    flags = usual(folder, reward=f"{folder}/in/reward.py:f", out=folder / "in/out", reward_workers=1)
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([sys.executable, ranks.ROOT / "minigrpo.py", *map(str, flags)], capture_output=True, text=True,
                          timeout=600, env=clean)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and words in done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr + done.stdout
