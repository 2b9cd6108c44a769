r"""Verifiable rewards for reinforcement learning, and a safe way to call them. Standard library only.

    from pathlib import Path
    from rewards import Group, Scorer

    Path("mine.py").write_text('''
    def brief(completions, **columns):
        return [float(len(text) < 10) for text in completions]
    ''')
    prompt, completions, ids = "1/4 + 1/4?", [r"\boxed{1/2}", "It is 0.4"], [[5, 6, 7], [8, 9]]
    group = Group(prompt, completions, ids, {"answer": "0.5"})
    with Scorer(["math", "mine.py:brief"], weights=[1.0, 0.2], timeout=30, workers=2) as scorer:
        [scores] = scorer.score([group])
    assert scores.parts == {"math": [1.0, 0.0], "brief": [0.0, 1.0]}
    assert scores.rewards == [1.0, 0.2] and not scorer.failures

A reward function has TRL's signature, f(prompts, completions, completion_ids, **columns) -> list of float or
None, and gets one whole group (all completions of one prompt) a call. It judges text that a model wrote, and
sooner or later that makes a regex explode, a number grow without end or a library crash. So it runs in a
worker process (JSON lines, no pickle, no GPU, a memory limit) that can be killed. Its stdout is dropped.

Left out, and why:
1. A sandbox: workers may read files and use the network. Run generated code in a container.
2. Symbolic algebra: `math` finds x+1 and 1+x different. `math_verify` leaves that to the package of this
   name (pip install math-verify), which may take long: the time and memory limits hold for it too.
3. Reward models: a function may hold one, and workers=0 lets it use the caller's GPU.
"""

import copy
import fcntl
import json
import math
import os
import re
import resource
import signal
import socket
import sys
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import NamedTuple

MEMORY_LIMIT = 4 << 30  # bytes of private memory that a worker may hold
LOAD_SECONDS = 120  # for importing a file, which may import torch from a network disk


# ---- Built-in rewards --------------------------------------------------------------------------------------

def gsm8k(completions, answer, **kwargs):
    r"""1.0 where the completion's number is exactly the gold one (1,072 = 1072.0), else 0.0.

    It is the first number in what `math` takes for the answer, as the authors of the data set have it; of an
    equation, the only one behind the last =. None where the gold answer does not hold exactly one number.
    """
    rewards = []
    for found, gold in answer_pairs(completions, answer):
        numbers = re.findall(VALUE, found.rpartition("=")[2])
        if "=" in found and len(numbers) > 1:  # 10 = 5 + 5
            numbers = []
        golds = re.findall(VALUE, gold)
        rewards.append(compare("".join(numbers[:1]), golds[0]) if len(golds) == 1 else None)
    return rewards


def math_answer(completions, answer, **kwargs):
    r"""1.0 where the completion's answer equals the gold one, else 0.0; None for an empty gold answer.

    The answer is the last \boxed{}, else what follows the last ####, else the last <answer>, else the last
    number or the $formula$ that holds it; a gold answer without these marks counts whole. Once $, %, units,
    \text, \frac and thousands separators are undone, numbers are compared exactly, a bare list in any order,
    the rest as text. For a gold letter "B", "(B) 12" and "B: 12" are right too.
    """
    return [compare(found, gold) for found, gold in answer_pairs(completions, answer)]


def symbolic_answer(completions, answer, **kwargs):
    """1.0 where math-verify finds the completion's answer equal to the gold one (x+1 is 1+x), else 0.0.

    Both are looked for as `math` does; None for an empty gold answer.
    """
    import logging

    from math_verify import parse, verify  # load() has said where this is missing
    logging.getLogger("math_verify").setLevel("ERROR")  # it warns that its time limits are off
    rewards = []
    for pair in answer_pairs(completions, answer):
        # Its time limits set signal handlers and call what is late wrong. A worker has a limit of its own.
        found, gold = [parse(rf"\boxed{{{text}}}", parsing_timeout=None) for text in pair]
        rewards.append(float(verify(gold, found, timeout_seconds=None)) if pair[1].strip() else None)
    return rewards


def countdown(completions, nums, target, **kwargs):
    r"""1.0 for an expression that uses every number of `nums` once, with + - * / only, and equals `target`.

    The expression is the last \boxed{}, ####, <answer>, or else the last line; "= 24" behind it is ignored.
    """
    rewards = []
    for completion, numbers, goal in zip(completions, nums, target):
        numbers = sorted(map(int, numbers))
        text = re.sub(r"\\div|÷", "/", outside_thoughts(completion).strip())
        text = re.sub(r"\\times|\\cdot|×", "*", text)
        equation = stated_answer(text, unmarked=text.rpartition("\n")[2])
        expression = equation.partition("=")[0].strip("$*`. \n")
        used = re.findall(r"\d+", expression)
        solved = evaluate(expression) == Fraction(goal) and sorted(map(int, used)) == numbers
        rewards.append(float(solved))
    return rewards


def format_tags(completions, **kwargs):
    """1.0 for exactly <think>...</think><answer>...</answer>, neither of them blank, else 0.0; so never where
    the chat template has written <think> already."""
    body = r"(?!\s*</)(?:(?!</?(?:think|answer)>).)+"
    shape = rf"(?s)\s*<think>{body}</think>\s*<answer>{body}</answer>\s*"
    return [1.0 if re.fullmatch(shape, text_of(completion)) else 0.0 for completion in completions]


def length_reward(completions, answer, completion_ids, **kwargs):
    """Shorter is better among correct answers (as `math` judges), never positive for wrong ones.

    l = 0.5 - (len - min) / (max - min) over the group; l if correct, min(0, l) if not; 0 if max = min (Kimi
    k1.5, arXiv 2501.12599, section 2.3.3). Lengths are those of completion_ids.
    """
    lengths = list(map(len, completion_ids))
    shortest = min(lengths)
    spread = max(lengths) - shortest
    rewards = []
    for length, correct in zip(lengths, math_answer(completions, answer)):
        reward = 0.0
        if spread:
            reward = 0.5 - (length - shortest) / spread
        if correct == 0.0:
            reward = min(0.0, reward)
        rewards.append(None if correct is None else reward)
    return rewards


def overlong(completion_ids, trainer_state, **kwargs):
    """A penalty for completions near the limit of trainer_state.max_completion_length tokens.

    0 for up to 4/5 of the limit, then falling linearly to -1 at the limit, which completions that were cut
    off have reached (DAPO, eq. 13, arXiv 2503.14476: from 16,384 to 20,480). A Scorer's state must hold it.
    """
    limit = trainer_state.max_completion_length
    return [max(-1.0, min(0.0, 4 - 5 * len(ids) / limit)) for ids in completion_ids]


BUILTINS = {
    "gsm8k": gsm8k, "math": math_answer, "math_verify": symbolic_answer, "countdown": countdown,
    "format": format_tags, "length": length_reward, "overlong": overlong}
NEED_ANSWER = {"gsm8k", "math", "math_verify", "length"}  # without a gold answer they give no reward


# ---- Finding the answer ------------------------------------------------------------------------------------

# (?a: digits are 0 to 9 only. A minus is a sign only where no operand stands before it: "x = -5" ends in -5,
# "20-5" in 5. An exponent has three digits at most, so that no number takes long to compute.
SIGN = r"(?:(?<![\w.)\]}])-)?\\?\$?"
POWER = r"(?:[eE][-+]?\d{1,3}(?!\d))?"
NUMBER = r"(?:(?:(?<!\d,)[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)" + POWER
# A number or a fraction of any two things: 1 / 2, "1 3/4", 1\frac{3}{4}, \frac{\sqrt{3}}{2}.
PART = r"\s*(?:\d|\{(?:[^{}]|\{[^{}]*\})*\})"
VALUE = (rf"(?a:{SIGN}(?:(?:\d+\s*)?\\[dtc]?frac{PART}{PART}|\d+ +\d+/\d+|"
         rf"{NUMBER}(?:\s*/\s*\d+(?:\.\d+)?)?))")


def text_of(completion):
    """The text of a completion, which may be messages, with "-" for the typographic minus."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text.replace("\u2212", "-")


def outside_thoughts(completion):
    """The text behind the last </think>, which may close a thought that the chat template opened; nothing of
    a thought that was never closed."""
    return text_of(completion).rpartition("</think>")[2].partition("<think>")[0]


def answer_pairs(completions, golds):
    """(what a completion gives as its answer, what its gold answer states), one after the other."""
    for completion, gold in zip(completions, golds):
        text = outside_thoughts(completion)
        yield stated_answer(text, unmarked=unmarked_answer(text)), gold_answer(gold)


def gold_answer(gold):
    """What a row's gold answer states; it may be a number. "" where there is none, or several in a list."""
    while isinstance(gold, list) and len(gold) == 1:
        [gold] = gold
    if gold is None or isinstance(gold, (list, dict)):
        return ""
    text = text_of(str(gold))
    return stated_answer(text, unmarked=text)


def stated_answer(text, unmarked):
    r"""The part of `text` that states its answer: the last \boxed{}, ####, <answer>, or else `unmarked`."""
    text = text.replace(r"\fbox", r"\boxed")
    text = re.sub(r"\\boxed\s*([^\s{$]+)", r"\\boxed{\1}", text)  # \boxed 5
    if r"\boxed" in text:
        return in_braces(text.rpartition(r"\boxed")[2])
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    before_end = text.rpartition("</answer>")[0]
    if "<answer>" in before_end:
        return before_end.rpartition("<answer>")[2]
    return unmarked


def unmarked_answer(text):
    r"""The last $formula$ with a number, or bare number, of a text; of an equation its last side with one."""
    text = re.sub(r"\\(?:begin|end)\{(?:aligned|gathered|split)\}|\\\$", "", text)
    text = re.sub(r"(?<!\\)\\[\[\]()]|\$\$|\\(?:begin|end)\{(?:align|gather|equation)\*?\}", "$", text)
    formula = last_with_number(re.findall(rf"\$[^$]*\$|{VALUE}", text))
    sides = re.split(r"(?<![<>])=|\\approx|\\in\b", formula.strip("$"))
    return last_with_number(sides).rstrip(" .,;\n")


def last_with_number(texts):
    return ["", *filter(re.compile("[0-9]").search, texts)][-1]


def in_braces(text):
    """What stands in the first pair of braces; "" where the text was cut off before they closed."""
    depth = 0
    for brace in re.finditer(r"(?s)\\.|[{}]", text):  # \\. so that \{ and \} are passed over
        if brace[0] == "{":
            depth += 1
        elif brace[0] == "}":
            depth -= 1
            if depth == 0:
                return text[: brace.start()].partition("{")[2]
    return ""


# ---- Comparing answers -------------------------------------------------------------------------------------

WORDS = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
# Names of units count in plain text too (5 cm), short ones only in \text{} or \mathrm{}: 5 m may be 5·m.
NAMES = (r"(?:[ckm]m|kg|units?|degrees?|(?:centi|kilo|milli)?(?:met(?:er|re)|lit(?:er|re)|gram)s?|"
         r"inch(?:es)?|foot|feet|yards?|miles?|mph|hours?|minutes?|seconds?|days?|weeks?|months?|years?|dollars?|"
         r"cents?|percent|pounds?|ounces?|gallons?|quarts?|pints?|cups?|radians?)")
UNIT = (rf"(?:(?:square|cubic|sq|cu)\.? )?(?:{NAMES}|mi|yd|ft|in|lbs?|oz|hrs?|min|sec|rad|mg|[mM]L|ml|Hz|"
        r"[mgshLNJWV])\.?(?:\s?\^\s?\{?\d\}?)?")
QUOTED = rf"\\(?:text|textrm|mathrm|mbox)\s*\{{\s*{UNIT}(?:\s?(?:/|per)\s?{UNIT})?\s*\}}"
# (pattern, replacement): one spelling for what has several, applied in this order.
SPELLINGS = [
    (r"[\s~]+", " "),
    (r"\\\\", ";"),  # the end of a matrix row
    # Commands and spaces that only change the layout; $, % and degree signs.
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\! ?|\\[,;: ]|\\?[$%]|"
     r"(?:\^\s*\{?\s*\\circ\s*\}?|°)(?:\s*\\(?:text|mathrm)\s*\{\s*[CF]\s*\})?", ""),
    # A unit at the end: 5\text{ cm}^2, 5 cm.
    (rf"(?<=[\w)}}])\s*(?:{QUOTED}(?:\s*/\s*{QUOTED})?|(?<=\d)\s*(?:square |cubic )?{NAMES})"
     r"(?:\s*\^\s*\{?\d\}?)?[\s.]*$", ""),
    (WORDS, r" \1 "),
    (r"\b([ap])\. ?m\b\.?", r"\1m"),  # 9 a.m.
    (r"\s(?:and|or)\s", ","),
    # x = 5; x = 1, x = 2
    (r"^\s*([a-zA-Z])\s*=[^=]*(?:,\s*\1\s*=[^=]*)*$", lambda roots: re.sub(r"[a-zA-Z]\s*=", "", roots[0])),
    # Thousands separators: 1,234, 1 234, 1{,}234; but (1,234), [-100,100] and {100,200} hold two numbers.
    (r"(?<![\d.,(\[])(?<![(\[]-|\\\{)[1-9]\d{0,2}(?:(?:[, ]|\{,\})\d{3})+(?![\d,/])",
     lambda number: re.sub(r"\D", "", number[0])),
    # \frac12 and \frac{1}{2}, between spaces, so that 1\frac12 becomes 1 1/2 and \frac{1}{2}3 becomes 1/2 3.
    (r" ?\\[dtc]?frac\s*(?:(\d)|\{\s*(-?[\d.]+)\s*\})\s*(?:(\d)|\{\s*(-?[\d.]+)\s*\}) ?", r" \1\2/\3\4 "),
    (r"(\\sqrt|[\^_])\s*\{(\w)\}", r"\1\2"),  # \sqrt{2}, x^{2}
    (r"\\(?:[dtc](?=frac)|(?=[a-zA-Z{}]))", ""),  # \dfrac of anything else, and every other backslash
    (r"^\s*(?:\(([^(){},]*)\)|\{([^(){}]*)\})[\s.]*$", r"\1\2"),  # (C), {1, 2}
]
# The groups are sign, whole, top, bottom, factor: of "-1 3/4" the first four, of "1/2 3" the last three.
EXACT = r"([-+]?)\s*(?:(\d+)\s+(?=\d+\s*/))?([\d.]+" + POWER + r")(?:\s*/\s*(-?[\d.]+)(?:\s+(\d+))?)?"
# A choice and what it says: (B) 12, \textbf{(B)}\ 12, B: 12; but not (B) + 1, and not "(B) and (C)".
CHOICE = (r"(?s)^[\s$*(]*(?:\\(?:text\w*|math\w+)\s*\{[\s(]*)?([A-J])(?:[).:]\s*\}?|\})"
          r"(?!\s*[-+*/^_=!'])(?!.*\b[A-J]\b).*")


def compare(found, gold):
    """1.0 for equal answers, 0.0 for others, None for an empty gold one."""
    target = canonical(gold)
    equal = target in map(canonical, {found, re.sub(CHOICE, r"\1", found)})
    return float(equal) if any(target) else None


def canonical(text):
    """A list that is equal for equal answers. Its elements, sorted because a list without brackets is a set
    ("1, 2" is "2, 1"), hold exact numbers, other texts, and the commas and brackets between them."""
    for pattern, plain in SPELLINGS:
        text = re.sub(pattern, plain, text)
    text = text.strip().rstrip(" .")
    elements = [[]]
    depth = 0  # of brackets
    for part in re.split(r"\s*([,;()\[\]{}])\s*", text):
        if part == "," and depth == 0:
            elements.append([])
        elif part:
            elements[-1].append(exact(part))
            if part in "([{":
                depth += 1
            elif part in ")]}":
                depth -= 1
    return sorted(elements, key=repr)


def exact(part):
    """The number that `part` spells, or else its text without spaces and capitals."""
    number = re.fullmatch(EXACT, part)
    if number:
        sign, whole, top, bottom, factor = number.groups()
        # What is no number after all stays text: "1.2.3", "1/0", more digits than int() takes.
        with suppress(ZeroDivisionError, ValueError):
            size = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1) * Fraction(factor or 1)
            return -size if sign == "-" else size
    return re.sub(r"(?<!\d) | (?!\d)", "", part).casefold()  # "1/2 3" is not 1/23


def evaluate(expression):
    """The exact value of an arithmetic expression, None for anything else."""
    # A model wrote it, so eval() sees only these characters: no names, no 0x10, 1_0 or 1e5; and few of them,
    # because Python's parser is recursive.
    refused = r"\*\*|//|(?:^|[-+*/(]) *\+"  # powers, floor division, a sign +
    if re.fullmatch(rf"(?!.*(?:{refused}))[-+*/()0-9 ]{{1,500}}", expression):
        with suppress(Exception):  # a syntax error, 1/0, 2(3), too deep for the parser
            return eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression))
    return None


# ---- Scoring -----------------------------------------------------------------------------------------------

class Group(NamedTuple):
    """The completions of one prompt."""
    prompt: str | list[dict]
    completions: list[str]  # functions see them as messages where the prompt is messages
    completion_ids: list[list[int]]
    columns: dict[str, object]  # of the prompt's row


class Scores(NamedTuple):
    """What a Group got."""
    rewards: list[float | None]  # weighted sum for each completion; None = no reward at all
    parts: dict[str, list]  # by function, without weights


class Outcome(NamedTuple):
    """What one function says of one completion."""
    reward: float | None  # None: the function does not apply, or it failed
    failure: str = ""  # timeout, crash, exception, length, type, nan, inf, or load of the whole file
    detail: str = ""  # of the failure, in words
    which: str = ""  # exception, signal or exit code


class Scorer:
    """Scores groups with one or several reward functions, in worker processes that can be killed.

    specs: names of built-in functions, or "path/file.py:function"; weights: one for each, 1 by default.
    timeout: seconds for one function on one group or, where that fails, on one completion; after four of
    these the rest of the group counts as late too.
    workers: how many groups are scored at a time. 0 calls the functions in this process and thread, without a
    time limit: for those that need its GPU.
    `failures` counts failures by their cause ("exception: f: ZeroDivisionError"); `state` is what functions
    see as trainer_state. Raises ValueError for wrong arguments.
    """

    def __init__(self, specs, weights=None, timeout=30.0, workers=1):
        self.weights = weights or [1.0] * len(specs)
        finite = all(map(math.isfinite, self.weights))
        if not specs or len(set(specs)) < len(specs) or len(self.weights) != len(specs) or not finite:
            raise ValueError(
                "give at least one reward function, none twice, and one finite weight for each, not "
                f"{specs} with {weights}")
        names = [spec.rpartition(":")[2] for spec in specs]
        self.names = dict(zip(specs, names if len(set(names)) == len(names) else specs))
        self.state = {"global_step": 0, "max_steps": 0, "epoch": 0.0}
        self.failures = Counter()
        self._first_batch = True
        self._workers = [Worker(specs, timeout) for _ in range(workers)]
        self._calls = [worker.call for worker in self._workers] or [call_function]
        for spec in specs:  # finds every mistake in the specs; the other workers start when needed
            self._calls[0](spec, None, self.state)

    def score(self, groups):
        """The Scores of each Group. A completion that any function failed on has no reward.

        Raises ValueError for a function that fails on all completions of the first call: it must be wrong.
        """
        count = len(self._calls)
        judged = [{} for _ in groups]  # for each group, spec -> outcomes

        def judge_share(k):  # fixed shares, so that a function that keeps state repeats in every run
            for i in range(k, len(groups), count):
                for spec in self.names:
                    judged[i][spec] = self._judge(self._calls[k], spec, groups[i])

        with ThreadPoolExecutor(count) as pool:
            # One share is judged in this thread, which Ctrl-C reaches and which has CUDA's current device.
            run = map if count == 1 else pool.map
            list(run(judge_share, range(count)))  # list() raises what a thread raised
        if self._first_batch and groups:
            self._check_first_batch(groups, judged)
            self._first_batch = False
        return [self._combine(by_spec) for by_spec in judged]

    def _judge(self, call, spec, group):
        """The outcomes of one function on a group; where the whole call failed, on each completion alone."""
        outcomes = call(spec, group, self.state)
        if len(outcomes) < 2 or outcomes[0].failure not in ("timeout", "crash", "exception"):
            return outcomes
        singles = []
        timeouts = 0
        for text, ids in zip(group.completions, group.completion_ids):
            if timeouts < 4:  # else it is the function: each of the rest would take the whole time limit
                single = group._replace(completions=[text], completion_ids=[ids])
                [outcome] = call(spec, single, self.state)
                if outcome.failure == "timeout":
                    timeouts += 1
            singles.append(outcome)
        return singles

    def _check_first_batch(self, groups, judged):
        """Raises ValueError for a function that failed on all completions; says of one that gave all None.

        Time-outs and crashes may be the fault of the completions: they are only counted.
        """
        for spec in self.names:
            outcomes = []
            for by_spec in judged:
                outcomes += by_spec[spec]
            if all(outcome == Outcome(None) for outcome in outcomes):
                warn(f"{spec}: None for all completions of its first batch: no gold answer that it can read? "
                     "These do not train")
            elif all(outcome.failure in ("exception", "length", "type") for outcome in outcomes):
                raise ValueError(
                    f"{spec} failed on all completions of its first batch: {outcomes[0].detail}. "
                    f"Given: prompts, completions, completion_ids; columns: {', '.join(groups[0].columns)}")

    def _combine(self, by_spec):
        """The Scores of one group from the outcomes of each function; counts failures."""
        parts = {}
        for spec, outcomes in by_spec.items():
            name = self.names[spec]
            parts[name] = [outcome.reward for outcome in outcomes]
            for outcome in outcomes:
                if outcome.failure:
                    self._count(name, outcome)
        rewards = []
        for outcomes in zip(*by_spec.values()):  # of all functions, on one completion
            weighted = zip(self.weights, outcomes)
            terms = [weight * outcome.reward for weight, outcome in weighted if outcome.reward is not None]
            failed = any(outcome.failure for outcome in outcomes)
            rewards.append(sum(terms) if terms and not failed else None)
        return Scores(rewards, parts)

    def _count(self, name, outcome):
        """Counts a failure of the function `name`, and prints the first of each cause."""
        cause = f"{outcome.failure}: {name}"
        if outcome.which:
            cause += f": {outcome.which}"
        self.failures[cause] += 1
        if self.failures[cause] == 1:
            warn(f"{cause}: {outcome.detail}. The completion has no reward; more of these are only counted")

    def close(self):
        """Ends the workers."""
        for worker in self._workers:
            worker.stop()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def warn(text):
    print(f"rewards: {text}", file=sys.stderr, flush=True)


# ---- Worker processes --------------------------------------------------------------------------------------

class Worker:
    """One worker process, started when it is needed and again after it was stopped."""

    def __init__(self, specs, timeout):
        self.specs = specs
        self.timeout = timeout
        self.process = None

    def start(self):
        """Starts the process and lets it load all functions. Raises ValueError where one cannot be loaded."""
        self.stop()
        self.channel, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(MEMORY_LIMIT)]
        settings = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        with theirs:  # in a session of its own, so that one signal reaches what a function started as well
            self.process = Popen(command, stdin=PIPE, stdout=theirs, env=settings, start_new_session=True)
        for spec in self.specs:
            [loaded] = self.call(spec, None, {})
            if loaded.failure:
                self.stop()
                where = "" if loaded.failure == "load" else f"{spec}: while importing, "
                raise ValueError(where + loaded.detail)

    def call(self, spec, group, state) -> list[Outcome]:
        """Lets the process call call_function; says also that it ended meanwhile, or took too long."""
        if not self.process or self.process.poll() is not None:  # not this function's fault that it ended
            self.start()
        process = self.process
        limit = self.timeout if group else LOAD_SECONDS
        request = json.dumps([spec, group, state], default=str)  # dates become text
        reply = b""
        failure = None
        try:
            self.channel.settimeout(limit)
            self.channel.sendall(request.encode() + b"\n")
            reply = self.channel.makefile("rb").readline()
        except TimeoutError:
            failure = Outcome(None, "timeout", f"it took over {limit:g} s")
        except ConnectionError:
            pass  # the process ended
        finally:  # after Ctrl-C too: a reply still to come would be taken for that to the next request
            if not reply.endswith(b"\n"):
                self.stop()
        if self.process:
            return [Outcome(*values) for values in json.loads(reply)]
        if not failure:
            code = process.returncode
            what = signal.strsignal(-code) if code < 0 else f"exit code {code}"
            failure = Outcome(None, "crash", f"the process ended ({what})", what)
        return [failure] * (len(group.completions) if group else 1)

    def stop(self):
        """Ends the process with all that it started."""
        if self.process:
            with self.process, self.channel, suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None


def serve(memory):
    """The worker process: answers each line of its socket, a request, with a line of outcomes.

    memory: bytes of private memory that it may hold.
    """
    channel = socket.socket(fileno=os.dup(1)).makefile("rw")
    lifeline = os.dup(0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # what a function prints cannot be taken for a reply
    # Nothing is ever written to the lifeline. It closes when the parent dies; the kernel then sends SIGIO,
    # which ends this process even inside C code (an exploding regex) that never gets to read again.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # not RLIMIT_AS: torch maps more than it uses
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in channel:
        try:
            # Ctrl-C does not get here, so KeyboardInterrupt is an exception of the function like any other.
            outcomes = call_function(*json.loads(line), passed_on=())
        except ValueError as error:
            outcomes = [Outcome(None, "load", str(error))]
        print(json.dumps(outcomes), file=channel, flush=True)


# ---- Calling a function, in a worker or in the caller's process --------------------------------------------

def call_function(spec, group, state, passed_on=KeyboardInterrupt):
    """Calls a function for one group: an Outcome for each completion. Without a group it only loads it.

    passed_on: exceptions that are no failure of the function.
    """
    function, path = load(spec)
    if group is None:
        return [Outcome(None)]
    prompt, completions, completion_ids, columns = group
    count = len(completions)
    keywords = {}
    for column, value in {**columns, "prompts": prompt}.items():
        # Copies: a function that pops from a list must not change the other rows.
        keywords[column] = [copy.deepcopy(value) for _ in completions]
    if not isinstance(prompt, str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    keywords.update(
        completions=list(completions),
        completion_ids=[list(ids) for ids in completion_ids],
        trainer_state=SimpleNamespace(**state),
        log_extra=lambda column, values: None,
        log_metric=lambda name, value: None)
    try:
        values = function(**keywords)
        if hasattr(values, "__await__"):  # TRL takes async functions
            values = event_loop().run_until_complete(values)
        values = list(values)
    except passed_on:
        raise
    except BaseException as error:  # CancelledError and SystemExit are no Exception
        return [Outcome(None, "exception", describe(error, path), type(error).__name__)] * count
    if len(values) != count:
        return [Outcome(None, "length", f"it returned {len(values)} values for {count} completions")] * count
    return [check_value(value) for value in values]


@cache
def event_loop():
    """One for all calls: what an async function keeps between them, such as a client, is bound to it."""
    import asyncio  # slow to import, rarely needed
    return asyncio.new_event_loop()


def check_value(value):
    """The Outcome for one value that a function returned."""
    if value is None:  # the function does not apply to this completion
        return Outcome(None)
    try:
        number = value.__float__()  # not float(value), which takes text
        if math.isfinite(number):
            return Outcome(number)
        return Outcome(None, str(abs(number)), f"it returned {number}")
    except Exception:  # whatever a type of the user's raises
        return Outcome(None, "type", f"it returned a {type(value).__name__} for a number")


def load(spec):
    """(function, its file) for a built-in's name or "path/file.py:function". Raises ValueError."""
    function = BUILTINS.get(spec)
    path, _, name = os.path.abspath(spec).rpartition(":")
    try:
        if spec == "math_verify":
            import math_verify  # noqa: F401  (to see whether it can be)
        if path.endswith(".py"):
            function = getattr(import_file(path), name, None)
    except (Exception, SystemExit) as error:
        hint = ": pip install math-verify" if spec in BUILTINS else ""
        raise ValueError(f"{spec} cannot be imported: {describe(error, path)}{hint}") from error
    if not callable(function):
        raise ValueError(f"{spec}: no such function; give {', '.join(BUILTINS)} or path/file.py:function")
    return function, path or __file__


@cache
def import_file(path):
    """The file as a module, one for all functions in it."""
    name = os.path.basename(path)[:-3]  # under which another process that the file starts can import it too
    if name in sys.modules or "." in name:
        name = "reward:" + path.replace(".", "_")  # a user's model.py replaces no module of that name
    found = spec_from_file_location(name, path)
    module = sys.modules[name] = module_from_spec(found)
    sys.path.insert(0, os.path.dirname(path))  # the file may import its neighbours
    found.loader.exec_module(module)
    return module


def describe(error, path):
    """The exception in one line, with the last line of the file `path` that it passed through."""
    said = " ".join("".join(traceback.format_exception_only(error)).split())[:500]
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == path:
            place = f" ({path}, line {frame.lineno}: {frame.line})"
    return said + place


if __name__ == "__main__":  # Worker.start ran this file
    serve(int(sys.argv[1]))
