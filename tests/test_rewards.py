"""rewards.py: what each built-in reward gives, and that nothing a reward function does can stop a run.

Starting a worker takes 0.1 s, so tests share workers; none depends on how fast the machine is: where a function has to
be late, it never ends.
"""

import ast
import functools
import itertools
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from datetime import date
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import pytest

import rewards
from rewards import BUILTINS, Group, Scorer, countdown, gsm8k, length_reward, math_answer

MODULE = Path(rewards.__file__)
PATIENT = 100  # a time limit that only an endless function reaches


def one(function, completion, *golds):
    [reward] = function([completion], *[[gold] for gold in golds])
    return reward


def wrong(function, rows):
    """Those of the rows (completion, gold values, reward) whose reward is another one."""
    return [(row, got) for *row, reward in rows if (got := one(function, *row)) != reward]


def group(*completions, prompt="q", **columns):
    return Group(prompt, list(completions), [[1] * (i + 1) for i in range(len(completions))], columns)


def scored(scorer, *groups):
    """The rewards of each group."""
    return [scores.rewards for scores in scorer.score(list(groups))]


def wait_for(condition):
    end = time.monotonic() + PATIENT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def gone(pid):
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def write(tmp_path):
    """Writes a file of reward functions and returns its path."""

    def write(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


# ---- Built-ins ---------------------------------------------------------------------------------------------

GSM8K = [  # completion, gold, reward
    ("It is 72.", "48/2=<<48/2=24>>24\n#### 72", 1),
    (r"Claire will eat $\boxed{7}$ dozens of eggs in 4 weeks.", "#### 7", 1),
    (r"Claire will eat $\boxed{7}$ dozens of eggs in 4 weeks.", "#### 4", 0),
    ("#### 7\nThat is 7 in 4 weeks", "#### 7", 1),
    ("<answer>7 dozens</answer> (in 4 weeks)", "7", 1),
    (r"\boxed{7", "7", 0),  # cut off
    ("12", r"We have $5+7=12$, so \boxed{12}", 1),  # MATH's layout
    ("72.0", "#### 72", 1),
    ("#### 72", "72", 1),
    ("72", 72, 1),
    ("72", 72.0, 1),
    ("It is 72, not 73", "#### 72", 0),
    ("It costs $1,072.50", "1072.5", 1),
    ("1072", "#### 1,072", 1),
    ("1,2,72", "#### 72", 1),  # a list, not a thousands separator
    ("1,2345", "2345", 1),
    ("-72", "#### 72", 0),
    ("72", "#### -72", 0),
    ("It is -72.", "-72", 1),
    ("x = \u221272", "-72", 1),  # the typographic minus
    ("-$5", "-5", 1),
    ("100-28 = 72", "72", 1),
    ("20-5", "5", 1),  # a difference, not a sign
    ("x=-5", "5", 0),
    (".5", "0.5", 1),
    ("0.1", "0.1", 1),
    ("0.30000000000000004", "0.3", 0),
    ("9007199254740993", "9007199254740992", 0),  # equal as floats
    ("1e2", "100", 1),
    ("5e-1", "0.5", 1),
    ("9" * 5000, "9" * 5000, 1),  # more digits than int() takes
    ("1e999999999", "5", 0),
    ("no number", "72", 0),
    ("", "72", 0),
    ("72", "#### seventy-two", None),
    ("72", "", None),
    ("72", None, None),
    ("12", "10 to 12", None),
    ("72 dollars", "72 dollars", 1),
    # the first number of what is marked, as the authors of the data set read it
    ("#### 10 (5 each)", "10", 1),
    ("#### 10 (5 each)", "5", 0),
    ("<answer>10, that is 5 each</answer>", "10", 1),
    ("<answer>10, that is 5 each</answer>", "5", 0),
    (r"\boxed{10 \text{ (2 bags)}}", "2", 0),
    (r"\boxed{3/4}", "4", 0),
    (r"\boxed{3/4}", "3", 0),
    (r"\boxed{3/4}", "0.75", 1),
    (r"\boxed{5 + 7 = 12}", "12", 1),
    (r"\boxed{5 + 7 = 12}", "5", 0),
    ("#### 10 = 5 + 5", "5", 0),
    # fractions without a mark
    (r"The answer is $\frac{1}{2}$.", "2", 0),
    (r"The answer is $\frac{1}{2}$.", "1/2", 1),
    (r"The answer is $-\dfrac12$.", "-0.5", 1),
    (r"The answer is \frac{\sqrt{3}}{2}.", "2", 0),
    (r"It is 1\frac{3}{4}.", "1.75", 1),
    ("It is 1 3/4 hours.", "1.75", 1),
    ("It is 1 3/4 hours.", "0.75", 0),
    ("It is 1 / 2.", "2", 0),
    ("It is 1 / 2.", "0.5", 1),
    (r"\boxed{0,245}", "245", 0),  # a list
    ("1,2,345", "2345", 0),
]

MATH = [
    # where the answer is
    (r"\boxed{3} and then \boxed{4}", "4", 1),
    (r"\boxed{3} and then \boxed{4}", "3", 0),
    (r"\boxed{4} #### 5 <answer>6</answer> 7", "4", 1),
    ("#### 4\n <answer>6</answer> 7", "4", 1),
    ("#### 5 #### 4\nso 7", "4", 1),
    ("<answer>5</answer><answer> 4 </answer> 7", "4", 1),
    ("it is 5, no, 4.", "4", 1),
    ("it is 3/4.", "0.75", 1),
    ("it is 3/4.", "4", 0),
    (r"\boxed{4", "4", 0),  # cut off
    (r"\boxed{4} or \boxed{", "4", 0),
    (r"\boxed{\frac{1}{2}}", r"so \boxed{\frac{1}{2}}.", 1),
    (r"\boxed{\text{a \} b}}", r"\text{a \} b}", 1),  # an escaped brace closes nothing
    (r"\fbox{4} and 5", r"\boxed 4$", 1),
    (r"\boxed{72}", "48/2=<<48/2=24>>24\n#### 72", 1),
    (r"\boxed{}", "4", 0),
    ("4", r"\boxed{}", None),
    ("4", "", None),
    ("4", None, None),
    # without a mark: the last number, or the formula that holds it
    (r"The answer is $\frac{1}{2}$.", r"\frac{1}{2}", 1),
    (r"The answer is $\frac{1}{2}$.", "2", 0),
    (r"The answer is \frac{1}{2}.", "0.5", 1),
    (r"The answer is \frac{1}{2}.", "2", 0),
    ("it is 1 / 2", "0.5", 1),
    ("it is 1 / 2", "2", 0),
    ("it is 2 1/2", "2.5", 1),
    ("it is 2 1/2", "0.5", 0),
    (r"So $x = 2\sqrt{3}$, which is real.", r"2\sqrt{3}", 1),
    (r"So $x = 2\sqrt{3}$, which is real.", "3", 0),
    (r"It is \(2^{10}\).", "10", 0),
    (r"Thus \[\begin{aligned} y &= 3 + 4 \\ &= 7. \end{aligned}\]", "7", 1),
    ("Thus\n\\begin{align*}\ny &= 3 + x \\\\\n&= x + 7.\n\\end{align*}", "x+7", 1),
    ("$$3 + 4 = 7$$", "7", 1),
    ("Thus $5 = x.$", "5", 1),
    (r"the set is $x \in (3, 4].$", "(3,4]", 1),
    (r"the set is $x \in (3, 4].$", "4", 0),
    (r"$7!\times 2!=10,\!080$", "10080", 1),
    ("of $20 he pays $5 and keeps $15", "15", 1),
    (r"of \$20 he keeps \$15", "15", 1),
    ("it is $5", "5", 1),
    ("", "", None),
    # intervals, and lists with and without brackets
    (r"\boxed{[0,100]}", "[0, 100]", 1),
    (r"\boxed{100}", "(0,100)", 0),
    (r"\boxed{[-100,100]}", "[-100, 100]", 1),
    (r"\boxed{(100,0)}", "(0,100)", 0),
    (r"\boxed{1 - \sqrt{19}, 1 + \sqrt{19}}", r"1 + \sqrt{19}, 1 - \sqrt{19}", 1),
    (r"\boxed{(3,4),(1,2)}", "(1,2),(3,4)", 1),
    (r"\boxed{(2,1),(3,4)}", "(1,2),(3,4)", 0),
    (r"\boxed{x = 1 \text{ or } x = -2}", "-2, 1", 1),
    (r"\boxed{11111111100}", r"11,\! 111,\! 111,\! 100", 1),
    (r"\boxed{60~\text{cm}}", "60", 1),
    (r"\boxed{x = 5}", "5", 1),
    # exact numbers
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"\boxed{.5}", r"\dfrac12", 1),
    (r"\boxed{2/4}", r"\tfrac{1}{2}", 1),
    (r"\boxed{0.33}", r"\frac{1}{3}", 0),
    (r"\boxed{1\frac{3}{4}}", "7/4", 1),
    (r"\boxed{1 3/4}", "1.75", 1),
    (r"\boxed{-\frac{3}{4}}", r"\frac{-3}{4}", 1),
    (r"\boxed{\frac{3}{-4}}", "-0.75", 1),
    (r"\boxed{\frac{3}{4}}", "-0.75", 0),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{1{,}234}", "1234.0", 1),
    (r"\boxed{1\,234}", "1 234", 1),
    (r"\boxed{\$18.00}", "18", 1),
    ("$\\boxed{18}$", "$18$", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{50\%}", "0.5", 0),  # the sign is dropped, not applied
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{90^{\circ}}", r"90\text{ degrees}", 1),
    (r"\boxed{5\text{ cm}^2}", "5", 1),
    (r"\boxed{5 \mathrm{ m}}", "5", 1),
    (r"\boxed{5 cm}", "5", 1),
    (r"\boxed{5 square feet}", "5", 1),
    (r"\boxed{5xy}", "5", 0),
    (r"\boxed{5\pi}", "5", 0),
    (r"\boxed{x=5}", "5", 1),
    # only what is a unit is a unit
    (r"\boxed{1-5}", r"$1-5\mathrm{i}$", 0),
    (r"\boxed{1-5i}", r"$1-5\mathrm{i}$", 1),
    (r"\boxed{3\mathbf{x}}", "3", 0),
    (r"\boxed{9\text{ p.m.}}", r"9\text{ a.m.}", 0),
    (r"\boxed{9\text{ am}}", r"9\text{ a.m.}", 1),
    (r"\boxed{2}", r"\textcircled{2}\textcircled{3}", 0),
    (r"\boxed{\textcircled{2}\textcircled{3}}", r"\textcircled{2}\textcircled{3}", 1),
    (r"\boxed{5\text{ or more}}", "5", 0),
    (r"\boxed{10\text{ million}}", "10", 0),
    (r"\boxed{5\text{ cm or more}}", "5", 0),
    (r"\boxed{25 \mathrm{~ft} / \mathrm{s}}", "25", 1),
    (r"\boxed{25\text{ miles per hour}}", "25", 1),
    (r"\boxed{25\text{ km/h}}", "25", 1),
    (r"\boxed{25\text{ sq. ft}}", "25", 1),
    (r"\boxed{25\text{ m}^{2}}", r"25 \mathrm{~m}^2", 1),
    (r"\boxed{32^{\circ} \mathrm{F}}", "32", 1),
    (r"\boxed{5 m}", "5", 0),  # 5 times m
    # where a number ends
    (r"\boxed{0,245}", "245", 0),
    (r"\boxed{0,245}", "0, 245", 1),
    (r"\boxed{\frac{1}{2}3}", r"\frac{3}{2}", 1),
    (r"\boxed{\frac{1}{2}3}", r"\frac{1}{23}", 0),
    (r"\boxed{\frac123}", r"\frac{1}{23}", 0),
    (r"\boxed{x\frac{1}{2}3}", r"x\frac{1}{23}", 0),
    (r"\boxed{x\frac{1}{2}3}", r"x \frac12 3", 1),
    (r"\boxed{\left( 5 \right)}", "5", 1),
    (r"\boxed{9007199254740993}", "9007199254740992", 0),
    (r"\boxed{1/0}", "1/0", 1),  # no number, but the same text
    (r"\boxed{" + "9" * 5000 + "}", "9" * 5000, 1),
    (r"\boxed{0}", "-0", 1),
    # several numbers
    (r"\boxed{(1, 0.50)}", r"(1,\frac{1}{2})", 1),
    (r"\boxed{(2, 1)}", "(1, 2)", 0),
    (r"\boxed{(1, 2]}", "(1, 2)", 0),
    (r"\boxed{2, 1}", r"1\text{ and }2", 1),
    (r"\boxed{\{2, 1\}}", "1,2", 1),
    (r"\boxed{1, 1}", "1", 0),
    (r"\boxed{\frac{\sqrt{2}}{3}}", r"\frac{\sqrt{3}}{2}", 0),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", 1),
    (r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}", r"\begin{pmatrix}1&2\end{pmatrix}", 0),
    # text
    (r"\boxed{\text{Tuesday}}", "tuesday", 1),
    (r"\boxed{Monday}", "tuesday", 0),
    (r"\boxed{\textbf{(C)}}", "C", 1),
    # multiple choice
    (r"\boxed{\textbf{(B)}\ 12}", "B", 1),
    (r"\boxed{\text{(B) }12}", "(B)", 1),
    (r"\boxed{B: 12}", "B", 1),
    ("<answer>B)</answer>", "B", 1),
    ("<answer>(B) 12</answer>", r"\text{(B)}", 1),
    ("<answer>B. twelve</answer>", "B", 1),
    (r"\boxed{C: 12}", "B", 0),
    (r"\boxed{(B) and (C)}", "B", 0),
    (r"\boxed{B: C}", "B", 0),
    (r"\boxed{(B)^2}", "B", 0),
    (r"\boxed{B + 1}", "B", 0),
    (r"\boxed{12}", "B", 0),
    (r"\boxed{B: 12}", "12", 0),
    (r"\boxed{x + 1}", "x+1", 1),
    (r"\boxed{x^{2}}", "x^2", 1),
    (r"\boxed{x^{2}0}", "x^{20}", 0),
    (r"\boxed{1 + x}", "x+1", 0),  # no algebra
    (r"\boxed{2\sqrt3}", r"2 \sqrt{3}", 1),
    (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1),
    (r"\boxed{5 pi}", r"5\pi", 1),
]

# What counts stands behind the last thought; one that never closed holds no answer. For gsm8k and math.
THOUGHTS = [
    (r"<think>\boxed{4}? No.</think>The answer is 5.", "4", 0),
    (r"<think>\boxed{4}? No.</think>The answer is 5.", "5", 1),
    (r"\boxed{4}? No.</think>The answer is 5.", "4", 0),  # the chat template wrote <think>
    (r"\boxed{4}? No.</think>The answer is 5.", "5", 1),
    ("<think>#### 4\n</think>5", "4", 0),
    ("<think>#### 4\n</think>5", "5", 1),
    ("<think><answer>4</answer></think>5", "4", 0),
    ("<think><answer>4</answer></think>5", "5", 1),
    (r"<think>a</think>\boxed{5}<think>\boxed{4}</think>so 5", "4", 0),
    (r"<think>Is it \boxed{4}", "4", 0),
    (r"<think>\boxed{4}</think>", "4", 0),
    ("<think>a</think><answer>4</answer>", "4", 1),
    (r"\boxed{4} <think>or 5", "4", 1),
]

COUNTDOWN = [  # completion, nums, target, reward
    ("<answer>(4 + 2) * 4</answer>", [4, 4, 2], 24, 1),
    ("<answer>(4 + 2) * 4 = 24</answer>", [4, 4, 2], 24, 1),
    ("<answer>\n(4 + 2) * 4\n</answer>", [4, 4, 2], 24, 1),
    ("So: **(4 + 2) * 4**.", [4, 4, 2], 24, 0),  # words before it
    ("Thus\n**`(4 + 2) * 4`**.", [4, 4, 2], 24, 1),
    ("<answer>(4 + 2) × 4</answer>", [4, 4, 2], 24, 1),
    (r"\boxed{(4 + 2) \times 4}", [4, 4, 2], 24, 1),
    ("I think:\n(4 + 2) * 4", [4, 4, 2], 24, 1),
    ("<answer>1 / 49 * 49</answer>", [1, 49, 49], 1, 1),  # in floats 0.9999999999999999
    ("<answer>8 ÷ 3 * 9</answer>", ["3", "8", "9"], "24", 1),
    ("<answer>1 / 3 * 3</answer>", [1, 3, 3], 1, 1),
    ("<answer>-2 + 26</answer>", [2, 26], 24, 1),
    ("<answer>4 + 20</answer>", [4, 4, 20], 24, 0),  # one number unused
    ("<answer>4 + 4 + 4 * 4</answer>", [4, 4, 4], 24, 0),  # one used twice
    ("<answer>12 + 12</answer>", [12, 1, 2], 24, 0),
    ("<answer>24</answer>", [2, 4], 24, 0),
    ("<answer>4 + 2</answer>", [4, 2], 24, 0),
    ("<answer>5 ** 2 - 1</answer>", [5, 2, 1], 24, 0),
    ("<answer>49 // 2</answer>", [49, 2], 24, 0),
    ("<answer>49 % 25</answer>", [49, 25], 24, 0),
    ("<answer>24 / 0</answer>", [24, 0], 24, 0),
    ("<answer>2_4 + 0</answer>", [24, 0], 24, 0),
    ("<answer>0x18 + 0</answer>", [24, 0], 24, 0),
    ("<answer>24.0 + 0</answer>", [24, 0], 24, 0),
    ("<answer>__import__('os').abort()</answer>", [24, 0], 24, 0),
    ("<answer>(" * 400, [24, 0], 24, 0),
    ("<answer>" + "(" * 240 + "24" + ")" * 240 + "</answer>", [24], 24, 0),  # deeper than the parser goes
    ("+".join(["1"] * 300), [1] * 300, 300, 0),  # longer than any puzzle
    ("<answer></answer>", [24], 24, 0),
    ("<answer>+24</answer>", [24], 24, 0),  # a sign +
    ("<answer>4 * + 6</answer>", [4, 6], 24, 0),
    ("<answer>2(12)</answer>", [2, 12], 24, 0),
    ("<answer>()</answer>", [24], 24, 0),
    ("<answer>08 + 16</answer>", [8, 16], 24, 0),
    ("", [24], 24, 0),
    ("<think><answer>4 + 20</answer>", [4, 20], 24, 0),
    ("<think><answer>4 + 20</answer></think>\n4 * 20", [4, 20], 24, 0),
    ("<answer>4 * 20</answer></think>4 + 20", [4, 20], 24, 1),
]

FORMAT = [
    ("<think>a</think><answer>b</answer>", 1),
    (" <think>\na\n</think>\n\n<answer>\nb <b>c</b>\n</answer>\n", 1),
    ("<think>a</think> so <answer>b</answer>", 0),
    ("<think>a</think><answer>b</answer> done", 0),
    ("Well <think>a</think><answer>b</answer>", 0),
    ("<answer>b</answer><think>a</think>", 0),
    ("<think>a</think><think>a</think><answer>b</answer>", 0),
    ("<think>a</think><answer>b</answer><answer>b</answer>", 0),
    ("<think>a<answer>c</answer></think><answer>b</answer>", 0),
    ("<think>a<think>a</think></think><answer>b</answer>", 0),
    ("<think> </think><answer>b</answer>", 0),
    ("<think>a</think><answer>\n</answer>", 0),
    ("<think>a</think><answer>b", 0),
    ("<think>a<answer>b</answer>", 0),
    ("", 0),
]


def test_built_ins():
    assert wrong(gsm8k, GSM8K) == []
    assert wrong(math_answer, MATH) == []
    assert wrong(gsm8k, THOUGHTS) == wrong(math_answer, THOUGHTS) == []
    assert wrong(countdown, COUNTDOWN) == []
    assert wrong(BUILTINS["format"], FORMAT) == []


def test_length():
    right, mistaken = r"\boxed{4}", r"\boxed{5}"
    ids = [[0] * n for n in (10, 20, 30, 10, 30)]
    judged = length_reward([right, right, right, mistaken, mistaken], ["4"] * 5, completion_ids=ids)
    assert judged == [0.5, 0.0, -0.5, 0.0, -0.5]  # a short wrong answer earns nothing
    assert length_reward([right, mistaken], ["4"] * 2, completion_ids=[[0], [1]]) == [0.0, 0.0]  # all equally long
    assert length_reward([right, right], [None] * 2, completion_ids=[[0], [1, 2]]) == [None, None]


def test_overlong():
    """DAPO, eq. 13, by hand: of 20 tokens the last 4 cost a quarter each."""
    ids = [[0] * n for n in (1, 15, 16, 17, 18, 19, 20, 21)]
    expected = [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
    assert rewards.overlong(ids, SimpleNamespace(max_completion_length=20)) == expected
    papers = [[0] * n for n in (16384, 18432, 20480)]
    assert rewards.overlong(papers, SimpleNamespace(max_completion_length=20480)) == [0.0, -0.5, -1.0]
    assert rewards.overlong([[0] * 256, [0] * 204], SimpleNamespace(max_completion_length=256)) == [-1.0, 0.0]
    with Scorer(["overlong"], workers=0) as scorer:
        scorer.state["max_completion_length"] = 20
        assert scored(scorer, Group("p", [""] * 8, ids, {})) == [expected]


TEXT_REWARDS = {  # all but overlong, which looks at token ids alone
    "gsm8k": {"answer": "24"},
    "math": {"answer": "24"},
    "length": {"answer": "24"},
    "format": {},
    "countdown": {"nums": [20, 4], "target": 24},
}


@pytest.mark.parametrize("name", TEXT_REWARDS)
def test_builtins_take_messages_and_never_look_at_the_prompt(name):
    class Untouchable:
        def __getattribute__(self, _):
            raise AssertionError("a reward read the prompt")

        __iter__ = __len__ = __getitem__ = __str__ = None

    texts = ["24", "20+4", "<think>a</think><answer>20 + 4</answer>", "25", ""]
    columns = {key: [value] * 5 for key, value in TEXT_REWARDS[name].items()} | {"completion_ids": [[0] * n for n in range(5)]}

    def call(completions):
        return BUILTINS[name](prompts=Untouchable(), completions=completions, **columns)

    assert call([[{"role": "assistant", "content": text}] for text in texts]) == call(texts)
    assert any(call(texts))


def test_an_unparseable_gold_never_scores():
    golds = (None, "", " ", "####", r"\boxed{", r"\boxed{}", "$", r"\text{}", ".")
    completions = ("", "0", "None", r"\boxed{}", "####", "<answer></answer>", ".")
    rows = [(completion, gold, None) for completion, gold in itertools.product(completions, golds)]
    assert wrong(gsm8k, rows) == wrong(math_answer, rows) == []


def test_golds_that_are_lists_or_objects(capfd):
    """One entry is taken as that entry; what has several, or names, is no answer, and the scorer says so."""
    for gold, reward in [(["4"], 1), ([4], 1), ([["4"]], 1), (["4", "5"], None), ({"value": "4"}, None), ([], None)]:
        assert one(gsm8k, "4", gold) == one(math_answer, "4", gold) == reward, gold
    with Scorer(["math", "gsm8k"], workers=0) as scorer:
        assert scored(scorer, group("4", answer={"value": "4"})) == [[None]]
    said = capfd.readouterr().err
    assert "math: None for all completions of its first batch" in said and "gsm8k: None for all" in said


def test_a_countdown_row_without_target_is_an_error_of_its_completions():
    for nums, target in [([24], None), ([24], "x"), (None, 24), (["x"], 24)]:
        with pytest.raises((TypeError, ValueError)):
            one(countdown, "24", nums, target)


LONG = 25_000
HOSTILE_TEXTS = [text * LONG for text in ("1,", "1 ", "1/", "1.", ". ", "{", "}", "(", "-", ".", "#", "^{", "x=", "\n")]
HOSTILE_TEXTS += [text * 5000 for text in (r"\boxed{", r"\boxed", "<answer>", "<think>", r"\text{", r"\frac{1}")]
HOSTILE_TEXTS += [text * 5000 for text in ("123,456,", "<think>a</think><answer>")]
HOSTILE_TEXTS += [text * 5000 for text in (r"\frac{", r"\frac{{}", r"\frac{}", "$1", r"\(x", "1 1/", "(B) ", r"5\text{ cm")]
HOSTILE_TEXTS += [text * 5000 for text in (r"5\mathrm{m}/", "5 cm ", "0,245", "1 / ", "x =", r"\begin{align}1", "</think>")]
HOSTILE_TEXTS += [" " * LONG + "x", "9" * LONG + "x", "1" + " " * LONG + "x"]


def test_builtins_take_no_time_on_hostile_text():
    """A text with which a regex explodes takes years; others take 20 ms, and where the whole group is late on a busy
    machine, each gets the time limit for itself."""
    texts = []
    for text in HOSTILE_TEXTS:
        texts += [text, r"\boxed{" + text + "}", "<think>" + text, "<answer>" + text + "</answer>"]
    row = {key: value for columns in TEXT_REWARDS.values() for key, value in columns.items()}
    names = [name for name in TEXT_REWARDS if name != "length"]  # which asks math
    with Scorer(names, timeout=20) as scorer:
        [scores] = scorer.score([group(*texts, **row)])
    assert scores.parts == {name: [0.0] * len(texts) for name in names} and not scorer.failures


# ---- Against math-verify and reasoning-gym -----------------------------------------------------------------

def spellings(value):
    """Ways in which a language model writes a rational number."""
    sign, n, d = "-" if value < 0 else "", abs(value.numerator), value.denominator
    if d == 1:
        forms = r"{}|{}.0|${}$|{}\text{{ cm}}|{}\text{{ cm}}^2|{}^\circ|x={}|\${}|{}\%|{}.".split("|")
        forms = [form.format(f"{sign}{n}") for form in forms]
        return [*forms, f"{sign}{n:,}", f"{sign}{n:,}".replace(",", "{,}")]
    forms = [
        f"{sign}\\frac{{{n}}}{{{d}}}",
        f"{sign}\\dfrac{{{n}}}{{{d}}}",
        f"{sign}{n}/{d}",
        f"\\frac{{{sign}{n}}}{{{d}}}",
        f"{sign}{2 * n}/{2 * d}",
        f"x = {sign}\\frac{{{n}}}{{{d}}}",
    ]
    if max(n, d) < 10:
        forms.append(f"{sign}\\frac{n}{d}")
    if n > d:
        forms.append(f"{sign}{n // d}\\frac{{{n % d}}}{{{d}}}")
    if 10**6 * n % d == 0:
        forms.append(f"{sign}{n / d}")
    return forms


# Answers that are no plain numbers: within a class all are equal, and no two classes are.
CLASSES = [
    answers.split(" ;; ")
    for answers in r"""
        (1,2) ;; (1, 2) ;; \left(1,2\right) ;; (1.0, 2)
        (2,1)
        3,4 ;; 4, 3 ;; 3\text{ and }4 ;; \{3,4\}
        (\frac12, 3] ;; (0.5,3] ;; \left(\frac{1}{2},3\right]
        \sqrt{2} ;; \sqrt2
        2\sqrt{3} ;; 2 \sqrt{3}
        \frac{\sqrt{3}}{2} ;; \dfrac{\sqrt{3}}{2}
        \frac{\sqrt{2}}{3}
        \frac{3\pi}{2} ;; \dfrac{3 \pi}{2}
        \frac{\pi}{2} ;; \pi/2
        x^2+2x+1 ;; x^{2} + 2x + 1
        1+x ;; x+1
        y = 2x+7 ;; 2x+7
        3+4i ;; 3 + 4i
        5\pi
        5xy
        \text{Tuesday} ;; Tuesday
        \text{(C)} ;; C ;; \text{C}
        \text{(B)} ;; B
        (-\infty, 3) ;; \left(-\infty,3\right)
        (-\infty,2)\cup(3,\infty) ;; (-\infty, 2) \cup (3, \infty)
        \begin{pmatrix} 1 \\ 2 \end{pmatrix} ;; \begin{pmatrix}1\\2\end{pmatrix}
        """.strip().splitlines()
]
CLASSES = [[answer.strip() for answer in answers] for answers in CLASSES]
RULES = {
    "percent": "ours drops the sign; theirs reads 5% as 0.05 too and refuses some",
    "dot": "ours drops a full stop inside the box; theirs then often finds no number",
    "set": "theirs takes (1, 2) for 1, 2; ours keeps pairs and sets apart",
    "algebra": "theirs rearranges; ours compares text",
}


def explain(gold, answer, ours, theirs):
    gold_digits, digits = (re.sub(r"[^\d,]", "", text) for text in (gold, answer))
    if (ours, theirs) == (1, 0) and any(re.search(r"\\%", text) for text in (gold, answer)):
        return "percent"
    if (ours, theirs) == (1, 0) and any(re.search(r"\d\.$", text) for text in (gold, answer)):
        return "dot"
    if (ours, theirs) == (0, 1) and "(" in (gold + answer) and gold[0] != answer[0] and "," in gold:
        return "set"
    if (ours, theirs) == (0, 1) and re.search(r"x|pi", gold) and gold_digits == digits:
        return "algebra"
    return None


def test_math_against_math_verify():
    math_verify = pytest.importorskip("math_verify")
    rng = random.Random(0)
    pairs = []  # gold, answer, whether they are equal
    for _ in range(200):
        value = Fraction(
            rng.choice([rng.randint(-20, 20), rng.randint(-9999, 99999)]),
            rng.choice([1, 1, 1, 2, 3, 4, 5, 8]),
        )
        other = rng.choice([-value, value + 1, value * 10, value / 2])
        gold = rng.choice(spellings(value))
        pairs += [(gold, rng.choice(spellings(value)), True) for _ in range(2)]
        pairs += [(gold, rng.choice(spellings(other)), other == value)]
    for some, others in itertools.product(CLASSES, CLASSES):
        if some is others:
            pairs += [(gold, answer, True) for gold, answer in itertools.product(some, some)]
        else:
            pairs.append((some[0], others[0], False))
    assert len(pairs) > 1000
    seen, parse = Counter(), functools.cache(math_verify.parse)
    for gold, answer, equal in pairs:
        ours = one(math_answer, f"So the answer is \\boxed{{{answer}}}.", gold)
        theirs = float(
            math_verify.verify(parse(f"\\boxed{{{gold}}}"), parse(f"So the answer is \\boxed{{{answer}}}."))
        )
        rule = None if ours == theirs else explain(gold, answer, ours, theirs)
        assert ours == theirs or rule, (gold, answer, ours, theirs)
        seen[rule] += 1
        assert ours == equal or rule == "algebra", (gold, answer, ours, theirs)
    assert seen[None] > 0.9 * len(pairs), seen
    assert set(seen) - {None} <= set(RULES), seen


SYMBOLIC = [
    (r"\boxed{1+x}", "x+1", 1),
    (r"\boxed{x+2}", "x+1", 0),
    (r"so $f(x) = (x-1)(x+1)$.", "$x^2-1$", 1),
    (r"<think>\boxed{x+1}</think>\boxed{x+2}", "x+1", 0),
    ("#### 1/2", r"we get \boxed{\frac{2}{4}}", 1),
    ("no answer", "4", 0),
    (r"\boxed{4}", "", None),
    (r"\boxed{4}", ["4", "5"], None),
]


def test_math_verify(capfd):
    pytest.importorskip("math_verify")
    with Scorer(["math_verify", "math"], timeout=PATIENT) as scorer:
        judged = scorer.score([group(completion, answer=gold) for completion, gold, _ in SYMBOLIC])
        assert [scores.parts["math_verify"][0] for scores in judged] == [reward for *_, reward in SYMBOLIC]
        assert not scorer.failures and "imeout" not in capfd.readouterr().err
    with Scorer(["math_verify"], timeout=5) as scorer:  # the time limit is the worker's
        endless = r"\boxed{\sum_{n=1}^{10^{12}} \frac{\sin(n!)}{n}}"
        assert scored(scorer, group(endless, r"\boxed{1+x}", answer="x+1")) == [[None, 1]]
        assert scorer.failures == {"timeout: math_verify": 1}


@pytest.mark.parametrize("workers", [0, 1])
def test_math_verify_that_is_not_installed(tmp_path, monkeypatch, workers):
    if workers:
        (tmp_path / "math_verify.py").write_text("raise ImportError('there is none')")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    else:
        monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match=r"^math_verify cannot be imported: .*Error: .*[nN]one.*: pip install math-verify$"):
        Scorer(["gsm8k", "math_verify"], workers=workers)


def arithmetic_answers(entry, rng):
    """Right and wrong answers to one Countdown puzzle, most of them near the right one."""
    right, numbers = entry["answer"], entry["metadata"]["numbers"]
    shuffled = rng.sample(numbers, len(numbers))
    yield from [right, f"({right})", f"-({right})", f"0-{right}", f"{right} + 0", f"{right} - 1 + 1"]
    for a, b in (("+", "-"), ("-", "+"), ("*", "**"), ("/", "//"), ("+", "- -"), ("*", "×")):
        yield right.replace(a, b, 1)
    target = str(entry["metadata"]["target"])
    yield from [f"{right} = {target}", target, "", "float('inf')"]
    yield from [rng.choice("+-*/").join(map(str, shuffled)), "+".join(map(str, numbers[:-1])), right + ".0"]


def test_countdown_against_reasoning_gym():
    gym = pytest.importorskip("reasoning_gym")
    data = gym.create_dataset("countdown", seed=9, size=100, min_numbers=3, max_numbers=5)
    rng, seen = random.Random(1), Counter()
    for entry in data:
        for answer in arithmetic_answers(entry, rng):
            meta = entry["metadata"]
            ours = one(countdown, f"<answer>{answer}</answer>", meta["numbers"], meta["target"])
            theirs = float(data.score_answer(answer, entry) == 1.0)
            rule = "agree"
            if ours != theirs:  # ours reads "×" and "= 147" as people write them, and has no // and no **
                rule = "written by people" if ours and ("×" in answer or "=" in answer) else None
                rule = "another operator" if theirs and ("//" in answer or "**" in answer) else rule
            assert rule, (answer, meta, ours, theirs)
            seen[rule] += 1
    assert sum(seen.values()) > 1000 and seen["agree"] > 0.8 * sum(seen.values()), seen


@pytest.mark.parametrize("task", ["chain_sum", "decimal_chain_sum"])
def test_gsm8k_against_reasoning_gym(task):
    gym = pytest.importorskip("reasoning_gym")
    data = gym.create_dataset(task, seed=2, size=150)
    for entry in data:
        gold = entry["answer"]
        near = str(Fraction(gold) + 1) if task == "chain_sum" else gold + "1"
        answers = [
            gold,
            gold + "0" if "." in gold else gold + ".0",
            near,
            "",
            "none",
            gold[:-1],
            f"It is {gold}.",
        ]
        answers += [] if gold.startswith("-") else ["0" + gold, "+" + gold, "-" + gold, f"{gold} or {near}"]
        for answer in answers:
            ours, theirs = one(gsm8k, answer, gold), float(data.score_answer(answer, entry) == 1.0)
            if ours != theirs:  # theirs scores the bare answer, ours finds it in a sentence
                assert ours == 1.0 and answer.startswith("It is"), (gold, answer)


# ---- Functions of users ------------------------------------------------------------------------------------

FUNCTIONS = """
import re
from decimal import Decimal

# Written for TRL.

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

def correctness(prompts, completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert all(c[0]["role"] == "assistant" for c in completions) and prompts[0][-1]["role"] == "user"
    return [1.0 if re.search(rf"= {s}$", c) else 0.0 for c, s in zip(contents, solution)]

def turns(prompts, completions, **kwargs):
    return [float([m["role"] for m in [*p, *c]] == ["user", "assistant"] * 2 and p[2]["content"] == "And 2 + 2?")
            for p, c in zip(prompts, completions)]

def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level, tags, **kwargs):
    assert all(len(column) == 2 for column in (prompts, completions, completion_ids, answer, level, tags))
    assert kwargs == {"nothing": [None, None]}, kwargs
    assert level == [3, 3] and tags == [["a", "b"]] * 2
    log_extra("golden", list(answer))
    log_metric("accuracy", 0.5)
    return [len(ids) + trainer_state.global_step for ids in completion_ids]

async def slow(completions, **kwargs):
    import asyncio
    await asyncio.sleep(0.01)
    return [0.25 for _ in completions]

class Callable:
    def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)

instance = Callable()

def no_kwargs(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def only_level_3(completions, level, **kwargs):
    return [1.0 if k == 3 else None for k in level]

def greedy(tags, **kwargs):
    return [float(t.pop() == "b") for t in tags]

def destroys(completions, prompts, completion_ids, trainer_state, **kwargs):
    for value in [*completion_ids, *prompts, completion_ids, prompts]:
        value.clear()
    return [float(len(c)) for c in completions]

def count(completions, **kwargs):
    return [len(completions)] * len(completions)

# None and failures.

def has_one(completions, **kwargs):
    return [1.0 if "one" in c else None for c in completions]

def has_two(completions, **kwargs):
    return [2.0 if "two" in c else None for c in completions]

def bad(completions, **kwargs):
    return [1 / 0 if "raise" in c else float("nan") if "nan" in c else 1.0 for c in completions]

def missing(completions, **kwargs):
    total = len(completions)
    return [c.missing / total for c in completions]

def needs_solution(completions, solution, **kwargs):
    return [1.0] * len(completions)

# Values.

class Scalar:  # what numpy scalars and tensors have in common
    def __init__(self, value): self.value = value
    def __float__(self): return self.value

class Tensor:
    def __init__(self, values): self.values = values
    def __iter__(self): return (Scalar(v) for v in self.values)

class Several:
    def __float__(self): raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

def good(completions, **kw): return [True, False, 3, 0.5, Scalar(2.5), Decimal("0.25"), None][:len(completions)]
def tensor(completions, **kw): return Tensor([1.0] * len(completions))
def tupled(completions, **kw): return tuple(1 for _ in completions)
def generated(completions, **kw): return (1 for _ in completions)
def odd(completions, **kw): return [float("nan"), float("inf"), -float("inf"), "1.0", [1], Several(), 1.0][:len(completions)]
def sometimes(completions, **kw): return [1.0] if "short" in completions[0] else [1.0] * len(completions)
def short(completions, **kw): return [1.0]
def nothing(completions, **kw): pass
def number(completions, **kw): return 1.0
def text(completions, **kw): return ["1"] * len(completions)
"""
CHAT = [{"role": "user", "content": "1 + 1"}]


@pytest.fixture
def scorer_of(write):
    """Makes a Scorer of functions in FUNCTIONS; closes it."""
    path, made = write(FUNCTIONS), []

    def scorer_of(*names, **options):
        made.append(Scorer([f"{path}:{name}" for name in names], **options))
        return made[-1]

    yield scorer_of
    for scorer in made:
        scorer.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_written_for_trl(scorer_of, workers):
    tags = ["a", "b"]
    row = {"answer": "a", "level": 3, "tags": tags, "nothing": None}
    scorer = scorer_of("reward_len", "everything", "slow", "instance", "only_level_3", "greedy", "count", workers=workers)
    scorer.state["global_step"] = 7
    [scores] = scorer.score([group("x" * 20, "x" * 17, **row)])
    assert scores.parts == {
        "reward_len": [0, -3], "everything": [8, 9], "slow": [0.25, 0.25], "instance": [0.5, 0.5], "only_level_3": [1, 1],
        "greedy": [1, 1],  # each completion has a list of its own
        "count": [2, 2],  # one whole group a call
    }
    assert tags == ["a", "b"] and not scorer.failures

    scorer = scorer_of("correctness", "turns", "count", workers=workers)
    several = [*CHAT, {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 2 + 2?"}]
    first, second = scorer.score([
        group("1 + 1 = 2", "= 3", prompt=CHAT, solution="2"), group("2 + 2 = 4", prompt=several, solution="4")])
    assert first.parts == {"correctness": [1, 0], "turns": [0, 0], "count": [2, 2]}
    assert second.parts == {"correctness": [1], "turns": [1], "count": [1]}


KEEPS = """
import asyncio, multiprocessing, pickle

queue = None

async def client(completions, **kwargs):
    global queue
    if queue is None:
        queue = asyncio.Queue()
        asyncio.ensure_future(serve())  # lives between the calls, as a client's connection does
    future = asyncio.get_running_loop().create_future()
    queue.put_nowait((len(completions), future))
    return [await future] * len(completions)

async def serve():
    while True:
        number, future = await queue.get()
        future.set_result(number)

async def raises(completions, **kwargs):
    if "interrupt" in completions: raise KeyboardInterrupt
    if "cancelled" in completions: raise asyncio.CancelledError
    return [1.0] * len(completions)

def score(text):
    return float(len(text))

def pool(completions, **kwargs):
    assert pickle.loads(pickle.dumps(score)) is score
    rewards = []
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            rewards.append(pool.map(score, completions))
    assert rewards[0] == rewards[1]
    return rewards[0]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_async_function_keeps_its_client(write, workers):
    path = write(KEEPS)
    with Scorer([f"{path}:client"], workers=workers, timeout=PATIENT) as scorer:
        assert scored(scorer, group("a", "b"), group("a"), group("a", "b")) == [[2, 2], [1], [2, 2]]
        assert scored(scorer, group("a")) == [[1]] and not scorer.failures
    if workers:
        with Scorer([f"{path}:client", f"{path}:raises"], timeout=PATIENT) as scorer:
            judged = scorer.score([group("a"), group("interrupt"), group("cancelled"), group("b")])
            assert [scores.parts["client"] for scores in judged] == [[1]] * 4
            assert [scores.parts["raises"] for scores in judged] == [[1], [None], [None], [1]]
            assert scorer.failures == {"exception: raises: CancelledError": 1, "exception: raises: KeyboardInterrupt": 1}


def test_a_file_may_start_processes_with_its_own_functions(write):
    path = write(KEEPS, "rewards.py")  # a name that is taken here, but not in a worker
    with Scorer([f"{path}:pool"], timeout=PATIENT) as scorer:
        assert scored(scorer, group("a", "bb", "ccc")) == [[1, 2, 3]] and not scorer.failures


def test_a_function_can_be_pickled_where_its_file_has_the_name_of_another_module(write):
    for name in ("rewards.py", "v1.2.py"):
        function, _ = rewards.load(f"{write(KEEPS, name)}:score")
        assert pickle.loads(pickle.dumps(function)) is function
    assert sys.modules["rewards"] is rewards


def test_a_function_that_changes_what_it_is_given_changes_nothing(scorer_of):
    asked = Group(CHAT, ["a", "b"], [[1, 2], [3]], {})
    scorer = scorer_of("destroys", workers=0)
    assert scored(scorer, asked) == [[1.0, 1.0]] == scored(scorer, asked)
    assert asked == Group([{"role": "user", "content": "1 + 1"}], ["a", "b"], [[1, 2], [3]], {})


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_none_and_failures(scorer_of, workers):
    scorer = scorer_of("has_one", "has_two", "bad", weights=[1, 0.5, 0], workers=workers)
    [scores] = scorer.score([group("one two", "one", "two", "", "one raise", "one nan")])
    # None from one function: it does not apply. A failure is not that: what the others say is not the whole reward.
    assert scores.rewards == [2.0, 1.0, 1.0, 0.0, None, None]
    assert scores.parts == {
        "has_one": [1, 1, None, None, 1, 1], "has_two": [2, None, 2, None, None, None], "bad": [1, 1, 1, 1, None, None]}
    assert scorer.failures == {"exception: bad: ZeroDivisionError": 1, "nan: bad": 1}


def test_none_from_all_functions_is_no_reward(scorer_of, capfd):
    scorer = scorer_of("has_one", "has_two", workers=0)
    assert scored(scorer, group("one two", "")) == [[3.0, None]] and not scorer.failures
    assert capfd.readouterr().err == ""
    scorer = scorer_of("has_one", "has_two", workers=0)
    assert scored(scorer, group("two", "")) == [[2.0, None]]
    assert "mine.py:has_one: None for all completions of its first batch" in capfd.readouterr().err


def test_names(write):
    first = write("def f(completions, **kw): return [1] * len(completions)")
    second = write("def f(completions, **kw): return [2] * len(completions)", "other.py")
    with Scorer([f"{first}:f", f"{second}:f", "format"], workers=0) as scorer:
        [scores] = scorer.score([group("a")])
    assert scores.parts == {f"{first}:f": [1], f"{second}:f": [2], "format": [0]}


@pytest.mark.parametrize("workers", [0, 1])
def test_values(scorer_of, workers, capfd):
    scorer = scorer_of("good", "tensor", "tupled", "generated", "odd", "sometimes", workers=workers)
    all_seven, few, single = scorer.score([group(*"abcdefg"), group("short", "b"), group("c")])
    assert all_seven.parts == {
        "good": [1, 0, 3, 0.5, 2.5, 0.25, None], "tensor": [1] * 7, "tupled": [1] * 7, "generated": [1] * 7,
        "odd": [None] * 6 + [1], "sometimes": [1] * 7}
    assert few.parts["sometimes"] == [None, None] and single.parts["sometimes"] == [1]
    assert scorer.failures == {"nan: odd": 3, "inf: odd": 3, "type: odd": 3, "length: sometimes": 2}
    said = capfd.readouterr().err.splitlines()
    assert [line.split(". ")[0] for line in said] == [
        "rewards: nan: odd: it returned nan",
        "rewards: inf: odd: it returned inf",
        "rewards: type: odd: it returned a str for a number",
        "rewards: length: sometimes: it returned 1 values for 2 completions",
    ]  # each cause once


def test_numpy_and_torch_values(write):
    """Also that torch can be imported under the memory limit."""
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    path = write("""
        import numpy, torch
        def array(completions, **kw): return numpy.arange(len(completions), dtype=numpy.float32)
        def tensor(completions, **kw): return torch.arange(len(completions))
        def scalars(completions, **kw): return [torch.tensor(1.5), numpy.bool_(True), torch.tensor([[2.0]])]
        """)
    with Scorer([f"{path}:{name}" for name in ("array", "tensor", "scalars")], timeout=PATIENT) as scorer:
        [scores] = scorer.score([group("a", "b", "c")])
    assert scores.parts == {"array": [0, 1, 2], "tensor": [0, 1, 2], "scalars": [1.5, 1, 2]}


# ---- Hostile functions -------------------------------------------------------------------------------------

HOSTILE = r"""
import asyncio, ctypes, os, re, signal, subprocess, sys, time

def act(text):
    if text == "loop":
        while True: pass
    if text == "sleep": time.sleep(100000)
    if text == "regex": re.match(r"(a+)+$", "a" * 60 + "b")
    if text == "power": 9 ** 9 ** 9
    if text == "print":
        for _ in range(10): print("x" * 1_000_000)
        os.write(1, b'[[9.0, "", "", ""]]\n')
        subprocess.run(["echo", '[[9.0, "", "", ""]]'])
        sys.__stdout__.write('[[9.0, "", "", ""]]\n')
    if text == "input": assert sys.stdin.read() == ""
    if text == "exit": os._exit(3)
    if text == "sys.exit": sys.exit("bye")
    if text == "crash": ctypes.string_at(0)
    if text == "recursion": return act2(text)
    if text == "stack":
        sys.setrecursionlimit(10 ** 9)
        return eval("-" * 10 ** 6 + "1")
    if text == "memory":
        kept = []
        while True: kept.append(bytearray(10 ** 7))
    if text == "huge": return float(len([0] * 10 ** 12))
    if text == "kill": os.kill(os.getpid(), 9)
    if text == "signal": os.kill(os.getpid(), 40)
    if text == "raise": raise KeyError("no such\\nkey")
    if text == "silent": raise Unspeakable()
    if text == "interrupt": raise KeyboardInterrupt
    if text == "Ctrl-C": signal.raise_signal(signal.SIGINT)
    if text == "cancelled": raise asyncio.CancelledError
    if text == "closed": raise GeneratorExit
    if text == "call the parent":
        os.kill(os.getppid(), signal.SIGUSR1)
        while True: pass
    return 1.0

class Unspeakable(Exception):
    def __str__(self): raise ValueError

def act2(text): return act2(text)

def f(completions, log, **kwargs):
    for path in log[:1]:  # one line a call: who worked on what
        with open(path, "a") as file:
            print(os.getpid(), *completions, sep=" ", file=file)
    if "together" in completions and len(completions) > 1: time.sleep(100000)
    if completions == ["child"]:
        child = subprocess.Popen(["sleep", "100000"])
        with open(log[0] + ".child", "w") as file:
            print(child.pid, file=file)
        child.wait()
    return [act(text) for text in completions]
"""
CAUSES = {
    "print": None,
    "input": None,
    "exit": "crash: f: exit code 3",
    "sys.exit": "exception: f: SystemExit",
    "crash": "crash: f: Segmentation fault",
    "recursion": "exception: f: RecursionError",
    "memory": "exception: f: MemoryError",
    "huge": "exception: f: MemoryError",
    "kill": "crash: f: Killed",
    "signal": f"crash: f: {signal.strsignal(40)}",
    "raise": "exception: f: KeyError",
    "silent": "exception: f: Unspeakable",
    "interrupt": "exception: f: KeyboardInterrupt",
    "cancelled": "exception: f: CancelledError",
    "closed": "exception: f: GeneratorExit",
}


@pytest.fixture
def hostile(write, tmp_path):
    """The path of HOSTILE's function and a function that makes groups for it. Each of its calls adds a line to `log`."""
    return f"{write(HOSTILE)}:f", functools.partial(group, log=str(tmp_path / "log"))


def calls(tmp_path):
    """The calls of HOSTILE's function so far: [pid, completions...] each."""
    return [line.split(" ") for line in (tmp_path / "log").read_text().splitlines()]


def test_hostile_functions_cost_only_the_culprit(hostile, monkeypatch, capfd):
    spec, group = hostile
    monkeypatch.setattr(rewards, "MEMORY_LIMIT", 300 << 20)
    with Scorer([spec], timeout=PATIENT) as scorer:
        first, *between, last = scored(scorer, group("a"), *[group("b", deed, "c") for deed in CAUSES], group("d", "e"))
        assert first == [1] and last == [1, 1]
        expected = {deed: [1, 1 if cause is None else None, 1] for deed, cause in CAUSES.items()}
        assert dict(zip(CAUSES, between)) == expected
        assert scorer.failures == Counter(cause for cause in CAUSES.values() if cause)
        said = capfd.readouterr().err  # one warning for each cause, and not what the function printed
        assert said.count("\n") == len(scorer.failures) and len(said) < 500 * len(scorer.failures)

        assert scored(scorer, group("exit", "a", "raise", "crash"), group("exit"), group("a")) == [[None, 1, None, None], [None], [1]]
        assert scorer.failures["crash: f: exit code 3"] == 3  # counted since the beginning
        assert capfd.readouterr().err == ""

        # Counted like the other: it is the same exception, told as one.
        assert scored(scorer, group("a", "Ctrl-C")) == [[1, None]]
        assert scorer.failures["exception: f: KeyboardInterrupt"] == 2

        # How deep nesting ends depends on the Python version; the run goes on in every one.
        before = scorer.failures.total()
        assert scored(scorer, group("a", "stack", "b")) == [[1, None, 1]] and scorer.failures.total() == before + 1


def test_late_functions(hostile, tmp_path):
    """An endless function costs its completion the reward and at most five time limits a group."""
    spec, group = hostile
    with Scorer([spec], timeout=0.5) as scorer:
        # Late as a group, and in time for each completion.
        assert scored(scorer, group("together", "a", "b")) == [[1, 1, 1]] and not scorer.failures
        assert scored(scorer, group("child")) == [[None]]
        wait_for(lambda: gone((tmp_path / "log.child").read_text()))  # what it started is killed with it
        before = len(calls(tmp_path))
        assert scored(scorer, group("a", "loop", "sleep", "regex", "power", "b", "c")) == [[1] + [None] * 6]
        assert scorer.failures == {"timeout: f": 7}
        # The group, then one by one until four were late: the others are not even tried.
        asked = [completions for _, *completions in calls(tmp_path)[before:]]
        assert asked[1:] == [["a"], ["loop"], ["sleep"], ["regex"], ["power"]]
        assert scored(scorer, group("a", "b")) == [[1, 1]]


def test_ctrl_c_leaves_the_scorer_usable(hostile):
    spec, group = hostile

    def interrupt(*_):
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with Scorer([spec], timeout=PATIENT) as scorer:
            assert scored(scorer, group("a")) == [[1]]
            with pytest.raises(KeyboardInterrupt):
                scorer.score([group("call the parent")])
            assert scored(scorer, group("a", "b")) == [[1, 1]] and not scorer.failures  # and not a reply that came late
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_ctrl_c_ends_what_is_scored_here(hostile):
    """With workers=0 a function's KeyboardInterrupt may be the run's own; other exceptions are the function's."""
    spec, group = hostile
    with Scorer([spec], workers=0) as scorer:
        with pytest.raises(KeyboardInterrupt):
            scorer.score([group("a", "interrupt")])
        assert scored(scorer, group("a", "cancelled")) == [[1, None]]
        assert scorer.failures == {"exception: f: CancelledError": 1}


# ---- Workers -----------------------------------------------------------------------------------------------

PROBE = """
import os, resource, sys, time

def pid(completions, **kwargs): return [os.getpid()] * len(completions)
def torch(completions, **kwargs): return ["torch" in sys.modules] * len(completions)
def gpu(completions, **kwargs): return [os.environ["CUDA_VISIBLE_DEVICES"] == ""] * len(completions)
def memory(completions, **kwargs): return [resource.getrlimit(resource.RLIMIT_DATA)[0]] * len(completions)
def json(completions, day, tags, **kwargs): return [float(day == ["2024-01-02"] and tags == [{"a": "é\\ud800"}])]
def both(completions, here, **kwargs):  # ends once two groups are worked on
    open(os.path.join(here[0], str(os.getpid())), "w").close()
    while len(os.listdir(here[0])) < 2: time.sleep(0.01)
    return [float(os.getpid())] * len(completions)
"""


def test_a_worker_starts_once_and_again_after_it_ended(write):
    """It has no GPU, no torch and a memory limit, and gets columns that JSON does not know."""
    path = write(PROBE, "probe.py")
    with Scorer([f"{path}:{name}" for name in ("pid", "torch", "gpu", "memory", "json")], timeout=PATIENT) as scorer:
        asked = group("a", day=date(2024, 1, 2), tags={"a": "é\ud800"})
        parts = [scores.parts for scores in scorer.score([asked] * 20)]
        first = int(parts[0]["pid"][0])
        assert first != os.getpid() and "probe" not in sys.modules  # the file is not imported here
        assert parts == [
            {"pid": [first], "torch": [0], "gpu": [1], "memory": [rewards.MEMORY_LIMIT], "json": [1]}] * 20
        os.kill(first, signal.SIGKILL)  # while it is idle: costs no reward
        wait_for(lambda: gone(first))
        [second], [third] = [scores.parts["pid"] for scores in scorer.score([asked] * 2)]
        assert second == third not in (first, os.getpid()) and not scorer.failures
    wait_for(lambda: gone(second))
    scorer.close()  # twice is fine


def test_several_workers(write, tmp_path):
    here = tmp_path / "pids"
    here.mkdir()
    with Scorer([f"{write(PROBE)}:both", "gsm8k"], timeout=PATIENT, workers=2) as scorer:
        groups = [group("0", "1", answer=str(i % 3), here=str(here)) for i in range(10)]
        parts = [scores.parts for scores in scorer.score(groups)]
        assert [part["gsm8k"] for part in parts] == ([[1, 0], [0, 1], [0, 0]] * 4)[:10]  # in order
        pids = [part["both"][0] for part in parts]
        assert len(set(pids)) == 2 and pids == pids[:2] * 5  # fixed shares
        assert [scores.parts["both"][0] for scores in scorer.score(groups[:5])] == pids[:5]  # the same ones each time
        assert scorer.score([]) == [] and not scorer.failures
    for pid in pids[:2]:
        wait_for(lambda: gone(pid))


def test_workers_0_scores_here(write):
    with Scorer([f"{write(PROBE)}:pid"], workers=0) as scorer:
        assert scored(scorer, group("a")) == [[os.getpid()]]


def test_workers_end_when_the_parent_is_killed(hostile, tmp_path):
    spec, group = hostile
    deeds = ["a", "loop", "regex"]  # the first worker is idle soon
    code = f"""
        import sys
        sys.path.insert(0, {str(MODULE.parent)!r})
        from rewards import Group, Scorer
        scorer = Scorer([{spec!r}], timeout=100000, workers=3)
        scorer.score([Group(*values) for values in {[tuple(group(deed)) for deed in deeds]}])
        """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    wait_for(lambda: (tmp_path / "log").exists() and len(calls(tmp_path)) == 3)
    workers = [pid for pid, _ in calls(tmp_path)]
    assert not any(map(gone, workers))
    parent.kill()
    wait_for(lambda: all(map(gone, workers)))
    parent.wait()


# ---- Mistakes of people ------------------------------------------------------------------------------------

@pytest.mark.parametrize("workers", [0, 1])
def test_mistakes_in_specs_are_told_at_once(write, tmp_path, workers):
    good = write("def f(completions, **kw): return [1.0] * len(completions)\nvalue = 3")
    broken = write("import math\n\nfrom nowhere import nothing\n", "broken.py")
    syntax = write("def f(:\n  pass\n", "syntax.py")
    leaves = write("import sys\nsys.exit(4)\n", "leaves.py")
    built_ins = "gsm8k, math, math_verify, countdown, format, length, overlong"
    rows = [
        (["gsm9k"], f"^gsm9k: no such function; give {built_ins} or path/file.py:function"),
        (["gsm8k", f"{broken}:f"], r"broken.py:f cannot be imported: ModuleNotFoundError: No module named 'nowhere' "
                                   r"\(.*broken.py, line 3: from nowhere"),
        ([good], "mine.py: no such function"),
        ([f"{good}:g"], "mine.py:g: no such function"),
        ([f"{good}:value"], "mine.py:value: no such function"),
        ([f"{tmp_path}/none.py:f"], "none.py:f cannot be imported.*No such file"),
        ([f"{syntax}:f"], r'syntax.py", line 1.*SyntaxError'),
        ([f"{leaves}:f"], r"SystemExit: 4 \(.*leaves.py, line 2"),
    ]
    for specs, said in rows[:2] if workers else rows:  # that of a worker is passed on
        with pytest.raises(ValueError, match=said):
            Scorer(specs, workers=workers)


def test_mistakes_in_other_arguments():
    for arguments, said in [
        (dict(specs=[]), "at least one reward function"),
        (dict(specs=["gsm8k", "gsm8k"]), "none twice"),
        (dict(specs=["gsm8k", "format"], weights=[1.0]), "one finite weight for each"),
        (dict(specs=["gsm8k", "format"], weights=[1.0, 2.0, 3.0]), "one finite weight for each"),
        (dict(specs=["gsm8k", "format"], weights=[1.0, float("nan")]), "one finite weight for each"),
    ]:
        with pytest.raises(ValueError, match=said):
            Scorer(**arguments)


def test_an_import_that_crashes_or_hangs(write, monkeypatch):
    crash, hang = write("import os\nos._exit(5)"), write("while True: pass", "hang.py")
    with pytest.raises(ValueError, match=r"mine.py:f: while importing, the process ended \(exit code 5\)"):
        Scorer([f"{crash}:f"])
    monkeypatch.setattr(rewards, "LOAD_SECONDS", 0.5)
    with pytest.raises(ValueError, match="hang.py:f: while importing, it took over 0.5 s"):
        Scorer([f"{hang}:f"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_fails_on_all_of_its_first_batch_is_refused(scorer_of, workers):
    scorer = scorer_of("missing", workers=workers)
    assert scorer.score([]) == []
    said = r"mine.py:missing failed on all completions of its first batch: AttributeError: 'str'.*mine.py, line \d+: return \[c.missing"
    with pytest.raises(ValueError, match=said):
        scorer.score([group("a", "b"), group("c")])


def test_what_is_refused_and_what_is_not(scorer_of):
    for name, why in [
        ("needs_solution", "'solution'.*columns: question, answer"),
        ("no_kwargs", "unexpected keyword argument.*columns: question, answer"),  # as under TRL
        ("short", "1 values for 7"),
        ("nothing", "NoneType"),
        ("number", "float"),
        ("text", "a str"),
    ]:
        with pytest.raises(ValueError, match=f"{name} failed on all completions.*{why}"):
            scorer_of(name, workers=0).score([group(*"abcdefg", question="q", answer="a")])
    scorer = scorer_of("bad", workers=0)  # it works on one completion, so it works
    assert scored(scorer, group("raise", "raise"), group("fine")) == [[None, None], [1]]
    assert scored(scorer, group("raise", "raise")) == [[None, None]]  # only the first call is held against it
    assert scorer.failures == {"exception: bad: ZeroDivisionError": 4}


def test_a_file_may_import_its_neighbours_and_be_called_like_a_module(write):
    write("bonus = 2.0", "model.py")
    path = write("import model\ndef f(completions, **kw): return [model.bonus] * len(completions)", "rewards.py")
    ours = sys.modules.pop("model", None)
    for workers in (0, 1):
        with Scorer([f"{path}:f", "format"], workers=workers) as scorer:
            assert scored(scorer, group("a")) == [[2.0]]
    assert sys.modules["rewards"] is rewards
    sys.modules.pop("model", None)
    if ours:
        sys.modules["model"] = ours


# ---- The module --------------------------------------------------------------------------------------------

def test_standard_library_only_and_no_side_effects():
    """But for math_verify, which its reward imports when it is called."""
    tree, names = ast.parse(MODULE.read_text()), set()
    for node in ast.walk(tree):
        found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        found |= {node.module} if isinstance(node, ast.ImportFrom) else set()
        assert found != {"math_verify"} or node not in tree.body
        names |= found
    assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "math_verify"}
    done = subprocess.run([sys.executable, "-c", "import rewards"], cwd=MODULE.parent, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
