"""Each module copied alone into an empty folder and used by a short program, as a person who came for it would."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_checkpoint, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]

README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = {program.split()[1].rstrip(":"): program for program in re.findall(r"```python\n(# \w+\.py.*?)```", README, re.S)}


def test_every_module_has_an_example():
    assert PROGRAMS.keys() == {path.name for path in ROOT.glob("*.py")} - {"minigrpo.py", "report.py"}


@pytest.mark.parametrize("module", PROGRAMS)
def test_module_alone(tmp_path, module):
    shutil.copy(ROOT / module, tmp_path)
    (tmp_path / "model").mkdir()
    write_checkpoint(tmp_path / "model", "qwen2-untied", vocab_size=320)
    write_tokenizer(tmp_path / "model")
    (tmp_path / "program.py").write_text(PROGRAMS[module])
    launcher = TORCHRUN if module == "colocate.py" else []
    done = subprocess.run([sys.executable, *launcher, "program.py"], capture_output=True, text=True, cwd=tmp_path,
                          timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "\nassert " in PROGRAMS[module]
