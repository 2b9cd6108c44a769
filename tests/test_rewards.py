"""rewards.py: what each built-in reward gives, and that nothing a reward function does can stop a run."""

import ast
import functools
import json
import os
import random
import re
import shutil
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
from rewards import Group, Scorer, UserError, countdown, gsm8k, length, math

MODULE = Path(rewards.__file__)


def one(function, completion, *golds):
    [reward] = function([completion], *[[gold] for gold in golds])
    return reward


def group(*completions, prompt="q", **columns):
    return Group(prompt, list(completions), [[1] * (i + 1) for i in range(len(completions))], columns)


@pytest.fixture
def write(tmp_path):
    """Writes a file of reward functions and returns its path."""

    def write(source, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


# ---- built-ins

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
]


@pytest.mark.parametrize("completion, gold, reward", GSM8K)
def test_gsm8k(completion, gold, reward):
    assert one(gsm8k, completion, gold) == reward


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
    (r"\boxed{x + 1}", "x+1", 1),
    (r"\boxed{x^{2}}", "x^2", 1),
    (r"\boxed{x^{2}0}", "x^{20}", 0),
    (r"\boxed{1 + x}", "x+1", 0),  # no algebra
    (r"\boxed{2\sqrt3}", r"2 \sqrt{3}", 1),
    (r"\boxed{\dfrac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1),
    (r"\boxed{5 pi}", r"5\pi", 1),
]


@pytest.mark.parametrize("completion, gold, reward", MATH)
def test_math(completion, gold, reward):
    assert one(math, completion, gold) == reward


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
    ("", [24], 24, 0),
]


@pytest.mark.parametrize("completion, nums, target, reward", COUNTDOWN)
def test_countdown(completion, nums, target, reward):
    assert one(countdown, completion, nums, target) == reward


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


@pytest.mark.parametrize("completion, reward", FORMAT)
def test_format(completion, reward):
    assert rewards.format([completion]) == [reward]


def test_length():
    right, wrong = r"\boxed{4}", r"\boxed{5}"
    ids = [[0] * n for n in (10, 20, 30, 10, 30)]
    scored = length([right, right, right, wrong, wrong], ["4"] * 5, completion_ids=ids)
    assert scored == [0.5, 0.0, -0.5, 0.0, -0.5]  # a short wrong answer earns nothing
    assert length([right, wrong], ["4"] * 2, completion_ids=[[0], [1]]) == [0.0, 0.0]  # all equally long
    assert length([right, right + " " * 9], ["4"] * 2) == [0.5, -0.5]  # characters without ids
    assert length([right, right], [None] * 2, completion_ids=[[0], [1, 2]]) == [None, None]


def test_overlong():
    """DAPO, eq. 13, by hand: of 20 tokens the last 4 cost a quarter each."""
    ids = [[0] * n for n in (1, 15, 16, 17, 18, 19, 20, 21)]
    expected = [0.0, 0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
    assert rewards.overlong(ids, SimpleNamespace(max_completion_length=20)) == expected
    papers = [[0] * n for n in (16384, 18432, 20480)]
    assert rewards.overlong(papers, SimpleNamespace(max_completion_length=20480)) == [0.0, -0.5, -1.0]
    assert rewards.overlong([[0] * 256, [0] * 204], SimpleNamespace(max_completion_length=256)) == [-1.0, 0.0]
    with Scorer(["overlong"]) as scorer:
        scorer.state["max_completion_length"] = 20
        [scores] = scorer.score([Group("p", [""] * 8, ids, {})])
    assert scores.rewards == expected


BUILTIN_CALLS = {
    "gsm8k": {"answer": "24"},
    "math": {"answer": "24"},
    "length": {"answer": "24"},
    "format": {},
    "countdown": {"nums": [20, 4], "target": 24},
}
TEXT_REWARDS = [name for name in rewards.BUILTINS if name != "overlong"]  # which looks at token ids alone


@pytest.mark.parametrize("name", TEXT_REWARDS)
def test_builtins_take_messages_and_never_look_at_the_prompt(name):
    class Untouchable:
        def __getattribute__(self, _):
            raise AssertionError("a reward read the prompt")

        __iter__ = __len__ = __getitem__ = __str__ = None

    texts = ["24", "20+4", "<think>a</think><answer>20 + 4</answer>", "25", ""]
    columns = {key: [value] * 5 for key, value in BUILTIN_CALLS[name].items()}

    def call(completions):
        return rewards.BUILTINS[name](prompts=Untouchable(), completions=completions, **columns)

    assert call([[{"role": "assistant", "content": text}] for text in texts]) == call(texts)
    assert any(call(texts))


@pytest.mark.parametrize("gold", [None, "", " ", "####", r"\boxed{", r"\boxed{}", "$", r"\text{}", "."])
@pytest.mark.parametrize("completion", ["", "0", "None", r"\boxed{}", "####", "<answer></answer>", "."])
def test_an_unparseable_gold_never_scores(gold, completion):
    assert one(gsm8k, completion, gold) is None
    assert one(math, completion, gold) is None


def test_a_countdown_row_without_target_is_an_error_of_its_completions():
    for nums, target in [([24], None), ([24], "x"), (None, 24), (["x"], 24)]:
        with pytest.raises((TypeError, ValueError)):
            one(countdown, "24", nums, target)


LONG = 25_000
ADVERSARIAL = [
    text * LONG for text in ("1,", "1 ", "1/", "1.", ". ", "{", "}", "(", "-", ".", "#", "^{", "x=", "\n")
]
ADVERSARIAL += [
    text * 5000 for text in (r"\boxed{", r"\boxed", "<answer>", "<think>", r"\text{", r"\frac{1}")
]
ADVERSARIAL += [text * 5000 for text in ("123,456,", "<think>a</think><answer>")]
ADVERSARIAL += [" " * LONG + "x", "9" * LONG + "x", "1" + " " * LONG + "x"]


@pytest.mark.parametrize("name", TEXT_REWARDS)
def test_builtins_take_no_time_on_hostile_text(name):
    columns = {key: [value] for key, value in BUILTIN_CALLS[name].items()}
    for text in ADVERSARIAL:
        for completion in (text, r"\boxed{" + text + "}", "<think>" + text, "<answer>" + text + "</answer>"):
            start = time.process_time()
            [reward] = rewards.BUILTINS[name](completions=[completion], **columns)
            assert reward == 0.0
            assert time.process_time() - start < 1, (name, completion[:30])


# ---- against math-verify and reasoning-gym


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
    for _ in range(600):
        value = Fraction(
            rng.choice([rng.randint(-20, 20), rng.randint(-9999, 99999)]),
            rng.choice([1, 1, 1, 2, 3, 4, 5, 8]),
        )
        other = rng.choice([-value, value + 1, value * 10, value / 2])
        gold = rng.choice(spellings(value))
        pairs += [(gold, rng.choice(spellings(value)), True) for _ in range(2)]
        pairs += [(gold, rng.choice(spellings(other)), other == value)]
    for i, some in enumerate(CLASSES):
        for j, others in enumerate(CLASSES):
            pairs += [
                (gold, answer, i == j) for gold in some for answer in (others if i == j else others[:2])
            ]
    assert len(pairs) > 3000
    seen, parse = Counter(), functools.cache(math_verify.parse)
    for gold, answer, equal in pairs:
        ours = one(math, f"So the answer is \\boxed{{{answer}}}.", gold)
        theirs = float(
            math_verify.verify(parse(f"\\boxed{{{gold}}}"), parse(f"So the answer is \\boxed{{{answer}}}."))
        )
        rule = None if ours == theirs else explain(gold, answer, ours, theirs)
        assert ours == theirs or rule, (gold, answer, ours, theirs)
        seen[rule] += 1
        assert ours == equal or rule == "algebra", (gold, answer, ours, theirs)
    assert seen[None] > 0.9 * len(pairs), seen
    assert set(seen) - {None} <= set(RULES), seen


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
    data = gym.create_dataset("countdown", seed=9, size=200, min_numbers=3, max_numbers=5)
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
    assert sum(seen.values()) > 3000 and seen["agree"] > 0.8 * sum(seen.values()), seen


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


# ---- TRL's functions

TRL = """
import re

def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

def correctness(prompts, completions, solution, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    assert all(c[0]["role"] == "assistant" for c in completions) and prompts[0][-1]["role"] == "user"
    return [1.0 if re.search(rf"= {s}$", c) else 0.0 for c, s in zip(contents, solution)]

def everything(
    prompts, completions, completion_ids, trainer_state, log_extra, log_metric, answer, level, tags, **kwargs
):
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

def only_math(completions, kind, **kwargs):
    return [1.0 if k == "math" else None for k in kind]

def turns(prompts, completions, **kwargs):
    return [float([m["role"] for m in [*p, *c]] == ["user", "assistant"] * 2 and p[2]["content"] == "And 2 + 2?")
            for p, c in zip(prompts, completions)]

def greedy(tags, **kwargs):
    return [float(t.pop() == "b") for t in tags]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_written_for_trl(write, workers):
    path = write(TRL)
    chat = [{"role": "user", "content": "1 + 1"}]

    def score(name, scored, **state):
        with Scorer([f"{path}:{name}"], workers=workers) as scorer:
            scorer.state.update(state)
            return scorer.score([scored])[0].rewards

    assert score("reward_len", group("x" * 20, "x" * 17)) == [0, -3]
    assert score("correctness", group("1 + 1 = 2", "= 3", prompt=chat, solution="2")) == [1, 0]
    several = [*chat, {"role": "assistant", "content": "2"}, {"role": "user", "content": "And 2 + 2?"}]
    assert score("turns", group("4", "5", prompt=several)) == [1, 1] and score("turns", group("4", prompt=chat)) == [0]
    row = {"answer": "a", "level": 3, "tags": ["a", "b"], "nothing": None}
    assert score("everything", group("a", "b", **row), global_step=7) == [8, 9]
    assert score("slow", group("a", "b")) == [0.25, 0.25]
    assert score("instance", group("a", "b")) == [0.5, 0.5]
    with pytest.raises(UserError, match="no_kwargs.*unexpected keyword argument.*columns: answer"):
        score("no_kwargs", group("a", "b", answer="a"))  # as under TRL
    assert score("only_math", group("a", "b", kind="math")) == [1, 1]
    assert score("only_math", group("a", "b", kind="code")) == [None, None]
    tags = ["a", "b"]
    assert score("greedy", group("a", "b", tags=tags)) == [1, 1]  # each completion has a list of its own
    assert tags == ["a", "b"]


def test_a_function_gets_one_whole_group_a_call(write):
    path = write("""
        def count(completions, **kwargs):
            return [len(completions)] * len(completions)
        """)
    with Scorer([f"{path}:count"]) as scorer:
        scored = scorer.score([group("a", "b", "c"), group("d")])
    assert [s.rewards for s in scored] == [[3, 3, 3], [1]]


# ---- several functions

PARTS = """
def one(completions, **kwargs):
    return [1.0 if "one" in c else None for c in completions]

def two(completions, **kwargs):
    return [2.0 if "two" in c else None for c in completions]

def bad(completions, **kwargs):
    return [1 / 0 if "raise" in c else float("nan") if "nan" in c else 1.0 for c in completions]
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_weights_none_and_failures(write, workers):
    path = write(PARTS)
    with Scorer([f"{path}:one", f"{path}:two"], weights=[1, 0.5], workers=workers) as scorer:
        [scores] = scorer.score([group("one two", "one", "two", "")])
    # None from one function: it does not apply. None from all: no reward.
    assert scores.rewards == [2.0, 1.0, 1.0, None]
    assert scores.parts == {"one": [1, 1, None, None], "two": [2, None, 2, None]}
    assert not scorer.failures
    with Scorer([f"{path}:one", f"{path}:bad"], workers=workers) as scorer:
        [scores] = scorer.score([group("one", "one raise", "one nan")])
    # A failure is not "does not apply": what the other function says is not the whole reward.
    assert scores.rewards == [2.0, None, None]
    assert scores.parts == {"one": [1, 1, 1], "bad": [1, None, None]}
    assert scorer.failures == {"exception: bad: ZeroDivisionError": 1, "nan: bad": 1}


def test_names(write):
    first, second = (
        write("def f(completions, **kw): return [1] * len(completions)"),
        write("def f(completions, **kw): return [2] * len(completions)", "other.py"),
    )
    with Scorer([f"{first}:f", f"{second}:f", "format"]) as scorer:
        [scores] = scorer.score([group("a")])
    assert scores.parts == {f"{first}:f": [1], f"{second}:f": [2], "format": [0]}


VALUES = """
from decimal import Decimal

class Scalar:  # what numpy scalars and tensors have in common
    def __init__(self, value): self.value = value
    def __float__(self): return self.value

class Tensor:
    def __init__(self, values): self.values = values
    def __iter__(self): return (Scalar(v) for v in self.values)

class Several:
    def __float__(self): raise RuntimeError("a Tensor with 2 elements cannot be converted to Scalar")

def good(completions, **kw): return [True, False, 3, 0.5, Scalar(2.5), Decimal("0.25"), None]
def tensor(completions, **kw): return Tensor([1.0] * len(completions))
def tupled(completions, **kw): return tuple(1 for _ in completions)
def generated(completions, **kw): return (1 for _ in completions)
def odd(completions, **kw): return [float("nan"), float("inf"), -float("inf"), "1.0", [1], Several(), 1.0]
def sometimes(completions, **kw): return [1.0] if "short" in completions[0] else [1.0] * len(completions)
def short(completions, **kw): return [1.0]
def nothing(completions, **kw): pass
def number(completions, **kw): return 1.0
def text(completions, **kw): return ["1"] * len(completions)
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_values(write, workers, capfd):
    path = write(VALUES)

    def score(name, *groups):
        with Scorer([f"{path}:{name}"], workers=workers) as scorer:
            return [s.rewards for s in scorer.score(list(groups))], scorer.failures, capfd.readouterr().err

    seven = group(*"abcdefg")
    assert score("good", seven) == ([[1, 0, 3, 0.5, 2.5, 0.25, None]], {}, "")
    for name in ("tensor", "tupled", "generated"):
        assert score(name, seven)[0] == [[1] * 7]
    values, failures, said = score("odd", seven)
    assert values == [[None] * 6 + [1]]
    assert failures == {"nan: odd": 1, "inf: odd": 2, "type: odd": 3}
    assert [line.split(". ")[0] for line in said.splitlines()] == [
        "rewards: nan: odd: it returned nan",
        "rewards: inf: odd: it returned inf",
        "rewards: type: odd: it returned a str for a number",
    ]  # each cause once
    values, failures, said = score("sometimes", group("a", "b"), group("short", "b"), group("c"))
    assert values == [[1, 1], [None, None], [1]]
    assert (
        failures == {"length: sometimes": 2} and "sometimes: it returned 1 values for 2 completions" in said
    )
    # Wrong on every completion of the first call: the function is wrong.
    for name, why in [
        ("short", "1 values for 7"),
        ("nothing", "NoneType"),
        ("number", "float"),
        ("text", "a str"),
    ]:
        with pytest.raises(UserError, match=f"{name}: failed on all completions.*{why}"):
            score(name, seven)


def test_numpy_and_torch_values(write):
    pytest.importorskip("torch")
    pytest.importorskip("numpy")
    path = write("""
        import numpy, torch
        def array(completions, **kw): return numpy.arange(len(completions), dtype=numpy.float32)
        def tensor(completions, **kw): return torch.arange(len(completions))
        def scalars(completions, **kw): return [torch.tensor(1.5), numpy.bool_(True), torch.tensor([[2.0]])]
        """)
    with Scorer([f"{path}:{name}" for name in ("array", "tensor", "scalars")]) as scorer:
        [scores] = scorer.score([group("a", "b", "c")])
    assert scores.parts == {"array": [0, 1, 2], "tensor": [0, 1, 2], "scalars": [1.5, 1, 2]}


# ---- hostile functions

HOSTILE = r"""
import ctypes, os, re, subprocess, sys, time

def act(text):
    if text == "loop":
        while True: pass
    if text == "sleep": time.sleep(1000)
    if text == "regex": re.match(r"(a+)+$", "a" * 60 + "b")
    if text == "power": 9 ** 9 ** 9
    if text == "print":
        for _ in range(100): print("x" * 1_000_000)
        os.write(1, b'[[9.0, null, ""]]\n')
        subprocess.run(["echo", '[[9.0, null, ""]]'])
        sys.__stdout__.write('[[9.0, null, ""]]\n')
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
    return 1.0

class Unspeakable(Exception):
    def __str__(self): raise ValueError

def act2(text): return act2(text)

def f(completions, **kwargs):
    return [act(text) for text in completions]
"""
CAUSES = {
    "loop": "timeout: f",
    "sleep": "timeout: f",
    "regex": "timeout: f",
    "power": "timeout: f",
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
}


@pytest.mark.parametrize("deed", CAUSES)
def test_hostile_functions_cost_only_the_culprit(write, deed, monkeypatch, capfd):
    monkeypatch.setattr(rewards, "MEMORY_LIMIT", 300 << 20)
    with Scorer([f"{write(HOSTILE)}:f"], timeout=0.5 if CAUSES[deed] == "timeout: f" else 10) as scorer:
        before, first, second = scorer.score([group("a"), group("b", deed, "c"), group("d", "e")])
    culprit = 1 if CAUSES[deed] is None else None
    assert [before.rewards, first.rewards, second.rewards] == [[1], [1, culprit, 1], [1, 1]]
    assert scorer.failures == ({} if CAUSES[deed] is None else {CAUSES[deed]: 1})
    said = capfd.readouterr().err  # one warning, and not what the function printed
    assert said.count("\n") == len(scorer.failures) and len(said) < 1000


def test_the_c_stack(write):
    """How deep nesting ends depends on the Python version; the run goes on in every one."""
    with Scorer([f"{write(HOSTILE)}:f"], timeout=5) as scorer:
        [first] = scorer.score([group("a", "stack", "b")])
    assert first.rewards[::2] == [1, 1]
    assert first.rewards[1] is None and sum(scorer.failures.values()) == 1


def test_several_culprits_and_a_group_of_one(write):
    with Scorer([f"{write(HOSTILE)}:f"], timeout=5) as scorer:
        scored = scorer.score([group("exit", "a", "raise", "crash"), group("exit"), group("a")])
        assert [s.rewards for s in scored] == [[None, 1, None, None], [None], [1]]
        assert scorer.failures == {
            "crash: f: exit code 3": 2,
            "exception: f: KeyError": 1,
            "crash: f: Segmentation fault": 1,
        }
        scorer.score([group("exit")])
        assert scorer.failures["crash: f: exit code 3"] == 3  # counted since the beginning


def test_a_slow_group_of_fast_completions_is_scored(write):
    path = write("""
        import time
        def f(completions, **kwargs):
            time.sleep(0.25 * len(completions))
            return [1.0] * len(completions)
        """)
    with Scorer([f"{path}:f"], timeout=0.6) as scorer:
        assert scorer.score([group("a", "b", "c")])[0].rewards == [1, 1, 1]
    assert not scorer.failures


def test_a_timeout_kills_what_the_function_started(write, tmp_path):
    path = write("""
        import subprocess
        def f(completions, pidfile, **kwargs):
            child = subprocess.Popen(["sleep", "1000"])
            open(pidfile[0], "w").write(str(child.pid))
            child.wait()
        """)
    with Scorer([f"{path}:f"], timeout=0.5) as scorer:
        assert scorer.score([group("a", pidfile=str(tmp_path / "pid"))])[0].rewards == [None]
    assert gone(int((tmp_path / "pid").read_text()))


def gone(pid, seconds=5):
    """True once the process has ended (a zombie has)."""
    end = time.time() + seconds
    while time.time() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


# ---- workers

PROBE = """
import os, resource, sys, time

def pid(completions, **kwargs): return [os.getpid()] * len(completions)
def torch(completions, **kwargs): return ["torch" in sys.modules] * len(completions)
def gpu(completions, **kwargs): return [os.environ["CUDA_VISIBLE_DEVICES"] == ""] * len(completions)
def memory(completions, **kwargs): return [resource.getrlimit(resource.RLIMIT_DATA)[0]] * len(completions)
def nap(completions, **kwargs):
    start = time.time()
    time.sleep(0.6)
    return [start] * len(completions)
def crash(completions, **kwargs): return [os.getpid() if "a" in c else os._exit(1) for c in completions]
"""


def score_first(scorer, *groups):
    return [s.rewards[0] for s in scorer.score(list(groups) or [group("a")])]


def test_a_worker_starts_once_and_again_after_a_crash(write):
    with Scorer([f"{write(PROBE)}:crash"]) as scorer:
        pids = [score_first(scorer)[0] for _ in range(20)]
        assert len(set(pids)) == 1 and pids[0] != os.getpid()
        assert score_first(scorer, group("b")) == [None]
        assert score_first(scorer)[0] not in (pids[0], os.getpid(), None)


def test_a_worker_that_died_while_idle_is_replaced(write):
    with Scorer([f"{write(PROBE)}:pid"]) as scorer:
        [first] = score_first(scorer)
        os.kill(int(first), signal.SIGKILL)
        assert gone(int(first))
        [second, third] = scorer.score([group("a", "b")])[0].rewards
        assert first != second == third and not scorer.failures


def test_a_worker_has_no_gpu_no_torch_and_a_memory_limit(write):
    with Scorer([f"{write(PROBE)}:{name}" for name in ("torch", "gpu", "memory")]) as scorer:
        [scores] = scorer.score([group("a")])
    assert scores.parts == {"torch": [0], "gpu": [1], "memory": [rewards.MEMORY_LIMIT]}


def test_calls_are_cheap():
    with Scorer(["gsm8k", "format"]) as scorer:
        groups = [group(*["It is 72."] * 16, answer="#### 72")] * 50
        scorer.score(groups)
        start = time.perf_counter()
        scorer.score(groups)
    assert time.perf_counter() - start < 3.0  # 100 calls; as many starts would take longer


def test_workers_score_groups_at_the_same_time(write):
    path = write(PROBE)
    with Scorer([f"{path}:nap", f"{path}:pid"], workers=2) as scorer:
        scorer.score([group("a"), group("b")])  # starts the second
        one, two, three = [scores.parts for scores in scorer.score([group("a"), group("b"), group("c")])]
    assert abs(one["nap"][0] - two["nap"][0]) < 0.6 < three["nap"][0] - one["nap"][0]
    assert one["pid"] == three["pid"] != two["pid"]  # the same shares each time


def test_order_with_several_workers(write):
    with Scorer(["gsm8k"], workers=3) as scorer:
        groups = [group(str(i), str(i + 1), answer=str(i + i % 2)) for i in range(10)]
        assert [s.rewards for s in scorer.score(groups)] == [[1, 0], [0, 1]] * 5
        assert scorer.score([]) == []


def test_workers_0_scores_here(write):
    path = write(PROBE + PARTS)
    with Scorer([f"{path}:pid"], workers=0) as scorer:
        assert score_first(scorer) == [os.getpid()]
    with Scorer([f"{path}:bad"], workers=0) as scorer:
        assert scorer.score([group("a", "raise", "nan")])[0].rewards == [1, None, None]
        assert scorer.failures == {"exception: bad: ZeroDivisionError": 1, "nan: bad": 1}


def test_the_users_file_is_not_imported_here(write, tmp_path):
    path = write(
        f"import os, json\njson.dump(os.getpid(), open({str(tmp_path / 'who')!r}, 'w'))\n"
        "def f(completions, **kw): return [0.0]"
    )
    with Scorer([f"{path}:f"]):
        assert json.loads((tmp_path / "who").read_text()) != os.getpid()


def test_close_ends_the_workers(write):
    with Scorer([f"{write(PROBE)}:pid"], workers=2) as scorer:
        pids = score_first(scorer, group("a"), group("b"))
    assert all(gone(int(pid)) for pid in pids)
    scorer.close()  # twice is fine


@pytest.mark.parametrize("deed", ["idle", "loop", "regex"])
def test_workers_end_when_the_parent_is_killed(write, deed):
    code = f"""
        import sys
        sys.path.insert(0, {str(MODULE.parent)!r})
        from rewards import Group, Scorer
        scorer = Scorer([{write(HOSTILE) + ":f"!r}], timeout=1000)
        print(scorer._workers[0].process.pid, flush=True)
        scorer.score([Group("q", [{deed!r}], [[1]], {{}})])
        input()
        """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    worker = int(parent.stdout.readline())
    time.sleep(0.3)
    assert not gone(worker, 0.05)
    parent.kill()
    assert gone(worker)
    parent.communicate()


def test_ctrl_c_leaves_the_scorer_usable(write):
    with Scorer([f"{write(HOSTILE)}:f"], timeout=20) as scorer:
        scorer.score([group("a")])
        old = signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            with pytest.raises(KeyboardInterrupt):
                scorer.score([group("loop")])
        finally:
            signal.signal(signal.SIGALRM, old)
        start = time.perf_counter()
        assert scorer.score([group("a", "b")])[0].rewards == [1, 1]
        assert time.perf_counter() - start < 15  # the loop was ended and not waited for


def test_columns_that_json_does_not_know(write):
    path = write("""
        def f(completions, day, tags, **kwargs):
            return [float(day == ["2024-01-02"] and tags == [{"a": "é\\ud800"}])]
        """)
    with Scorer([f"{path}:f"]) as scorer:
        assert score_first(scorer, group("a", day=date(2024, 1, 2), tags={"a": "é\ud800"})) == [1]


# ---- mistakes of people


@pytest.mark.parametrize("workers", [0, 1])
def test_mistakes_in_specs_are_told_at_once(write, tmp_path, workers):
    good = write("def f(completions, **kw): return [1.0] * len(completions)\nvalue = 3")
    broken = write("import math\n\nfrom nowhere import nothing\n", "broken.py")
    syntax = write("def f(:\n  pass\n", "syntax.py")
    leaves = write("import sys\nsys.exit(4)\n", "leaves.py")
    for specs, said in [
        (
            ["gsm9k"],
            "--reward gsm9k: not known; give gsm8k, math, countdown, format, length, overlong or path/file",
        ),
        ([good], "not known"),
        ([f"{tmp_path}/none.py:f"], "none.py:f.*No such file"),
        ([f"{good}:g"], r"mine.py has no function 'g'"),
        ([f"{good}:value"], "no function 'value'"),
        (
            [f"{broken}:f"],
            r"ModuleNotFoundError: No module named 'nowhere' \(.*broken.py, line 3: from nowhere",
        ),
        ([f"{syntax}:f"], r'syntax.py", line 1.*SyntaxError'),
        ([f"{leaves}:f"], r"SystemExit: 4 \(.*leaves.py, line 2"),
        ([], "at least one function"),
        (["gsm8k", "gsm8k"], "none twice"),
    ]:
        with pytest.raises(UserError, match=said):
            Scorer(specs, workers=workers)
    for wrong in ([1.0], [1.0, 2.0, 3.0], [1.0, float("nan")]):
        with pytest.raises(UserError, match="--reward_weights.*one finite number for each"):
            Scorer(["gsm8k", "format"], weights=wrong, workers=workers)
    for options in ({"timeout": 0}, {"timeout": float("inf")}, {"workers": -1}):
        with pytest.raises(UserError, match="--reward_timeout.*--reward_workers"):
            Scorer(["gsm8k"], **options)


def test_an_import_that_crashes_or_hangs(write, monkeypatch):
    crash, hang = write("import os\nos._exit(5)"), write("while True: pass", "hang.py")
    with pytest.raises(UserError, match="while importing, the process ended \\(exit code 5\\)"):
        Scorer([f"{crash}:f"])
    monkeypatch.setattr(rewards, "LOAD_SECONDS", 0.5)
    with pytest.raises(UserError, match="while importing, it took over 0.5 s"):
        Scorer([f"{hang}:f"])


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_function_that_is_simply_broken(write, workers):
    path = write("""
        def f(completions, **kwargs):
            total = len(completions)
            return [c.missing / total for c in completions]

        def g(completions, solution, **kwargs):
            return [1.0] * len(completions)

        def h(completions, **kwargs):
            return [1.0 if c == "fine" else 1 / 0 for c in completions]
        """)
    with Scorer([f"{path}:f"], workers=workers) as scorer:
        scorer.score([])
        with pytest.raises(
            UserError, match=r"mine.py:f: .*AttributeError: 'str'.*mine.py, line 4: return \[c.missing"
        ):
            scorer.score([group("a", "b"), group("c")])
    with Scorer(["format", f"{path}:g"], workers=workers) as scorer:
        with pytest.raises(UserError, match=r"mine.py:g: .*'solution'.*columns: question, answer"):
            scorer.score([group("a", question="q", answer="a")])
    with Scorer([f"{path}:h"], workers=workers) as scorer:  # it works on one completion, so it works
        assert scorer.score([group("a", "b"), group("fine")])[0].rewards == [None, None]
        assert scorer.score([group("a", "b")])[0].rewards == [None, None]
    with Scorer([f"{path}:h"], workers=workers) as scorer:  # only the first call is held against it
        scorer.score([group("fine")])
        assert scorer.score([group("a", "b")])[0].rewards == [None, None]
        assert scorer.failures == {"exception: h: ZeroDivisionError": 2}


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_changes_what_it_is_given_changes_nothing(write, workers):
    path = write("""
        def f(completions, prompts, completion_ids, trainer_state, **kwargs):
            for value in [*completion_ids, *prompts, completion_ids, prompts]:
                value.clear()
            return [float(len(c)) for c in completions]
        """)
    asked = Group([{"role": "user", "content": "q"}], ["a", "b"], [[1, 2], [3]], {})
    with Scorer([f"{path}:f"], workers=workers) as scorer:
        assert scorer.score([asked])[0].rewards == [1.0, 1.0] == scorer.score([asked])[0].rewards
    assert asked == Group([{"role": "user", "content": "q"}], ["a", "b"], [[1, 2], [3]], {})


def test_a_function_that_always_hangs_costs_five_time_limits_a_group(write):
    path = write("import time\ndef f(completions, **kw): time.sleep(60)")
    with Scorer([f"{path}:f"], timeout=0.2) as scorer:
        start = time.monotonic()
        assert scorer.score([group(*"abcdefghijklmnop")])[0].rewards == [None] * 16
        assert scorer.failures == {"timeout: f": 16} and time.monotonic() - start < 16 * 0.2 + 2


def test_a_file_may_import_its_neighbours_and_be_called_like_a_module(write):
    write("bonus = 2.0", "model.py")
    path = write(
        "import model\ndef f(completions, **kw): return [model.bonus] * len(completions)", "rewards.py"
    )
    ours = sys.modules.pop("model", None)
    for workers in (0, 1):
        with Scorer([f"{path}:f", "format"], workers=workers) as scorer:
            assert scorer.score([group("a")])[0].rewards == [2.0]
    assert sys.modules["rewards"] is rewards
    sys.modules.pop("model", None)
    if ours:
        sys.modules["model"] = ours


# ---- the module


def test_copied_alone_it_works(tmp_path):
    shutil.copy(MODULE, tmp_path)
    code = r"""
        from rewards import Group, Scorer
        with Scorer(["math", "format"], weights=[1.0, 0.2], timeout=30, workers=2) as scorer:
            group = Group("1/4 + 1/4?", [r"\boxed{1/2}", "0.4"], [[5, 6], [7]], {"answer": "0.5"})
            print(scorer.score([group])[0].rewards)
        """
    (tmp_path / "use.py").write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert (done.stdout, done.stderr) == ("[1.0, 0.0]\n", "")


def test_standard_library_only_and_no_side_effects(tmp_path):
    names = set()
    for node in ast.walk(ast.parse(MODULE.read_text())):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)
    done = subprocess.run(
        [sys.executable, "-c", "import rewards"], cwd=MODULE.parent, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    alone = subprocess.run([sys.executable, MODULE], capture_output=True, text=True, timeout=30)
    assert alone.returncode == 1 and "with Scorer([" in alone.stderr  # run by itself it says how it is used


def test_a_worker_that_was_ended_while_idle_costs_no_reward():
    with Scorer(["math"]) as scorer:
        group = Group("?", ["It is 2"], [[1]], {"answer": "2"})
        assert scorer.score([group])[0].rewards == [1.0]
        process = scorer._workers[0].process
        process.kill()
        time.sleep(0.2)
        assert scorer.score([group])[0].rewards == [1.0] and scorer._workers[0].process is not process
