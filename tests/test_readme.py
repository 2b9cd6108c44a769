"""The README against the project: its commands, its options, its files and its figures."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pictures
import plan_table
import pytest

import bench
import config
import minigrpo

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MODULES = re.findall(r"^\| `(\w+\.py)` \| .* \| (\d+) \|$", README, re.M)
COMMANDS = [command for block in re.findall(r"```bash\n(.*?)```", README, re.S)
            for command in block.replace("\\\n", " ").splitlines()] + re.findall(
                r"`((?:torchrun|python|\./train\.sh|MINIGRPO_\w+=\d+) [^`]*)`", README)


def json_of(name):
    return json.loads((ROOT / "results" / name).read_text())


def test_the_modules_and_about_how_long_they_are():
    assert {name for name, _ in MODULES} == {path.name for path in ROOT.glob("*.py")}
    for name, lines in MODULES:
        assert abs(int(lines) / len((ROOT / name).read_text().splitlines()) - 1) < 0.1, name
    whole = int(re.search(r"^\| minigrpo \| ([\d,]+), over torch and vLLM", README, re.M)[1].replace(",", ""))
    assert abs(whole / sum(len((ROOT / name).read_text().splitlines()) for name, _ in MODULES) - 1) < 0.1
    lines = (ROOT / "minigrpo.py").read_text().splitlines()
    assert next(i for i, line in enumerate(lines, 1) if line.startswith("def train(")) < 400


@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_a_command_can_be_given(command, monkeypatch):
    """All options exist and go together. What the commands do is in the other tests, or marked with its GPUs."""
    words = [word for word in shlex.split(command, comments=True) if not re.match(r"[A-Z_]+=\d+$", word)]
    script = next((i for i, word in enumerate(words) if word.endswith((".py", ".sh"))), None)
    if script is None:
        assert not words or words[0] in ("export", "ruff") or words == ["torchrun", "--max-restarts=3"]
        return
    assert (ROOT / words[script]).exists(), command
    flags = words[script + 1:]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    if words[script] == "minigrpo.py":
        config.check(config.parse(flags))
    elif words[script] == "tests/bench.py":
        assert bench.parser().parse_args(flags).model == "MODEL"
    elif words[script:script + 2] == ["./train.sh", "test"]:
        files = [word for word in words[script + 2:] if word.startswith("tests/")]
        assert all((ROOT / file).exists() for file in files)


def test_options_are_options():
    ours = {f"--{name}" for name in config.Config.__dataclass_fields__}
    others = {"--nproc_per_node", "--nnodes", "--rdzv-backend", "--rdzv-endpoint", "--max-restarts"}  # torchrun's
    bench_flags = {flag for action in bench.parser()._actions for flag in action.option_strings}
    assert not {*re.findall(r"--\w[\w-]*", README)} - ours - others - bench_flags


def test_the_table_of_options_names_every_one_of_the_method():
    """What changes the loss, the advantages or the sampling is said when to use."""
    table = README[README.index("| option | when |"):README.index("## Is the engine")]
    for name in ("epsilon_high", "delta", "importance_sampling_level", "baseline", "scale_rewards", "beta",
                 "dynamic_sampling_rounds", "mask_truncated_completions", "optimizer_offload", "recompute", "replay",
                 "report_to", "log_completions", "eval_num_generations"):
        assert f"--{name}" in table, name
    assert "`--num_iterations` and `--num_minibatches`" in README


def test_functions_named_beside_formulas_exist():
    import model
    import sharded
    table = README[README.index("| formula | function |"):README.index("Denominators are of the whole")]
    for name in re.findall(r"\| `([\w.]+)` \|$", table, re.M):
        module, _, function = name.rpartition(".")
        assert hasattr({"": minigrpo, "model": model, "sharded": sharded}[module], function), name


def test_every_file_of_results_is_mentioned_and_every_one_mentioned_is_there():
    names = re.findall(r"`(?:results/)?([\w.*-]+)`|\(results/([\w.-]+)\)", README)
    patterns = {name for pair in names for name in pair if "H200" in name or "CPU" in name or name.endswith(("-*", "svg"))}
    found = {pattern: {path.name for path in (ROOT / "results").glob(pattern)} for pattern in patterns | {"smollm2-sums-seed*"}}
    assert all(found.values()), [pattern for pattern in found if not found[pattern]]
    assert {path.name for path in (ROOT / "results").iterdir()} == set.union(*found.values())


def test_no_path_of_a_machine_in_results():
    for path in (ROOT / "results").iterdir():
        assert not re.search(r"(?<![\w.])/(?:tmp|root|home|work)/", path.read_text(encoding="utf-8")), path


def test_the_plan_table_is_what_the_plan_says():
    assert plan_table.table() in README


def test_pictures_are_drawn_from_the_results(tmp_path, monkeypatch):
    drawn = {name: (ROOT / "results" / name).read_text() for name in ("memory.svg", "learning.svg")}
    for path in (ROOT / "results").glob("*.json*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(pictures, "RESULTS", tmp_path)
    pictures.main()
    assert drawn == {name: (tmp_path / name).read_text() for name in drawn}


@pytest.mark.parametrize("name, words", [
    ("reference-job-2xH200-d.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}; again"),
    ("reference-job-2xH200-e.json", "; again {step:.1f} s | 17.0 s | 0.66"),
    ("reference-job-1xH200-d.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f} and"),
    ("reference-job-1xH200-e.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}; then"),
    ("reference-job-1xH200-d.json", "a wake adds {wake_extra:.0f} MiB"),
    ("reference-job-2xH200-d.json", "an MFU of {mfu:.0%}"),
    ("reference-job-2xH200-d.json", "and {mtok:.1f} s in those of one length"), ("ragged-2xH200-d.json", "cost {mtok:.1f} s in ragged"),
    ("reference-job-2xH200-a.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}"),
    ("reference-job-2xH200-c.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}"),
    ("reference-job-4xH200.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}"),
    ("reference-job-1xH200.json", "{step:.1f} s = generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}"),
    ("reference-job-recompute-2xH200.json", "{step:.1f} s (two of the four steps"),
    ("ragged-2xH200.json", "{step:.1f} s | 40.0 s"),
    ("split-2xH200.json", "{step:.1f} s = {generate:.1f} + {update:.1f} + {rest:.1f}"),
    ("split-4xH200.json", "{step:.1f} s = {generate:.1f} + {update:.1f} + {rest:.1f}"),
    ("7b-2xH200.json", "{step:.1f} s a step: generate {generate:.1f} + update {update:.1f} + the rest {rest:.1f}"),
    ("7b-2xH200.json", "{mfu:.0%} MFU; {peak:.1f} GiB at most"),
    ("0.5b-1xH200.json", "0.5B {wake:.0f} + {push:.0f} + {kv:.0f} + {sleep:.0f} ms"),
    ("reference-job-1xH200.json", "1.5B {wake:.0f} + {push:.0f} + {kv:.0f} + {sleep:.0f}"),
    ("7b-2xH200.json", "7B {wake:.0f} + {push:.0f} + {kv:.0f} + {sleep:.0f}"),
    ("reference-job-1xH200-cold.json", "{first_rollout:.0f} s with nothing compiled yet (the engine {engine:.0f} of"),
    ("0.5b-1xH200.json", "/ {peak:.1f} | 11.5 / {awake:.1f} |"),
    ("reference-job-1xH200.json", "98.8 / {peak:.1f} | 29.2 / {awake:.1f} |"),
    ("reference-job-4xH200.json", "85.8 / {peak:.1f} | 16.3 / {awake:.1f} |"),
    ("7b-2xH200.json", "99.2 / {peak:.1f} | 77.4 / {awake:.1f} |")])
def test_a_figure_is_that_of_its_file(name, words):
    row = json_of(name)
    parts = row["parts_s"]
    rest = sum(parts.values()) - parts["generate"] - parts["update"]
    milliseconds = {key: 1000 * parts[key] for key in ("wake", "push", "kv", "sleep")}
    said = words.format(step=row["step_s"], generate=parts["generate"], update=parts["update"], rest=rest, mfu=row["mfu"] or 0,
                        peak=row["memory/peak_gib"], awake=row["awake_gib"] or 0, first_rollout=row["first_rollout_s"] or 0,
                        engine=row["engine_start_s"] or 0, wake_extra=row.get("wake_extra_mib") or 0,
                        mtok=row["seconds_per_million_trained_tokens"], **milliseconds).replace("%", " %")
    assert said in README.replace("\n", " "), said


def test_what_smollm2_learned():
    ours, theirs, seconds, trl_seconds = [], [], [], []
    for seed in range(3):
        rows = [json.loads(line) for line in open(ROOT / f"results/smollm2-sums-seed{seed}-1xH200.jsonl")]
        ours.append(100 * rows[-1]["eval/accuracy"])
        seconds.append(sum(row["time/step"] - (row["time/eval"] or 0) for row in rows[:-1]))
        trl = json_of(f"smollm2-sums-seed{seed}-1xH200-trl.json")
        theirs.append(100 * trl["after"])
        trl_seconds.append(trl["seconds"])
    assert "{:.1f}, {:.1f}, {:.1f} % in {:.0f} to {:.0f} s".format(*ours, min(seconds), max(seconds)) in README
    assert "TRL {:.1f}, {:.1f}, {:.1f} % in {:.0f} to {:.0f} s".format(*theirs, min(trl_seconds), max(trl_seconds)) in README
    assert statistics.mean(ours) > statistics.mean(theirs) - 2 and max(seconds) < min(trl_seconds) / 3
