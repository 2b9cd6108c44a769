"""Each module copied alone into an empty folder and used by the short program of its docstring, as a person who came
for it would; and who imports whom."""

import ast
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from checkpoints import write_checkpoint, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
ALONE = ("model", "colocate", "sharded", "rewards", "data")


def program(module: str) -> str:
    """The first indented block of the docstring; blank lines belong to it."""
    lines = ast.get_docstring(ast.parse((ROOT / f"{module}.py").read_text())).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return textwrap.dedent("\n".join(lines[start:end]))


@pytest.mark.parametrize("module", ALONE)
def test_module_alone(tmp_path, module):
    shutil.copy(ROOT / f"{module}.py", tmp_path)
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", "qwen2-untied", vocab_size=320)
    write_tokenizer(tmp_path / "model")
    (tmp_path / "program.py").write_text(program(module))
    assert "\nassert " in program(module) or "\n    assert " in program(module)
    launcher = TORCHRUN if module == "colocate" else []
    done = subprocess.run([sys.executable, *launcher, "program.py"], capture_output=True, text=True, cwd=tmp_path,
                          timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def imports(module: str) -> tuple[set, set]:
    """Our modules that it imports: when it is imported itself, and inside functions."""
    ours = {path.stem for path in ROOT.glob("*.py")}
    tree = ast.parse((ROOT / f"{module}.py").read_text())

    def named(nodes):
        found = set()
        for node in nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module)
        return found & ours

    return named(tree.body), named(ast.walk(tree)) - named(tree.body)


def test_who_imports_whom():
    graph = {path.stem: imports(path.stem) for path in ROOT.glob("*.py")}
    assert graph.pop("minigrpo") == (
        {"config", "model", "colocate", "sharded", "checkpoint", "rewards", "data"}, {"engines", "tiny"})
    assert graph.pop("engines") == ({"model", "colocate"}, set()) and graph.pop("tiny") == ({"model", "data"}, set())
    assert graph.pop("colocate") == (set(), {"model"})  # its own program only
    assert all(found == (set(), set()) for found in graph.values()), graph


def test_the_options_need_no_torch():
    program = "import sys, config; config.check(config.parse([])); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
