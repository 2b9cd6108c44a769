r"""Verifiable rewards for reinforcement learning, and a safe way to call them. Standard library only.

    with Scorer(["math", "mine.py:short"], weights=[1.0, 0.2], timeout=30, workers=2) as scorer:
        group = Group("1/4 + 1/4?", [r"\boxed{1/2}", "0.4"], [[5, 6], [7]], {"answer": "0.5"})
        [scores] = scorer.score([group])  # scores.rewards, scores.parts, scorer.failures

A reward function has TRL's signature, f(prompts, completions, completion_ids, **columns) -> list of float or
None, and gets one whole group (all completions of one prompt) a call. It judges text that a model wrote, and
sooner or later that makes a regex explode, a number grow without end or a library crash. So it runs in a
worker process (JSON lines, no pickle, no GPU, a memory limit) that can be killed. Its stdout is dropped.

Left out, and why:
1. A sandbox: workers may read files and use the network. Run generated code in a container.
2. Symbolic algebra: `math` finds x+1 and 1+x different. A file of yours may call math-verify; the time and
   memory limits make that safe.
3. Reward models: a function may hold one, and workers=0 lets it use the caller's GPU.
"""

import ast
import copy
import fcntl
import json
import os
import re
import resource
import signal
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from fractions import Fraction
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import NamedTuple

MEMORY_LIMIT = 4 << 30  # bytes of private memory that a worker may hold
LOAD_SECONDS = 120  # for importing a file, which may import torch from a network disk


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


# ---- Built-in rewards --------------------------------------------------------------------------------------

def gsm8k(completions: list, answer: list, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's last number is exactly the gold one (1,072 = 1072.0), else 0.0.

    Of the completion counts the last \boxed{}, else what follows the last ####, else the last <answer>, else
    all; of the gold as well, and where that does not hold one number, None.
    """
    rewards = []
    for completion, gold in zip(completions, answer):
        text, gold = _text(completion), _text(str(gold))
        found = _last_match(NUMBER, _final(text, unmarked=text))
        golds = re.findall(NUMBER, _final(gold, unmarked=gold))
        rewards.append(float(_canonical(found) == _canonical(golds[0])) if len(golds) == 1 else None)
    return rewards


def math(completions: list, answer: list, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's answer equals the gold one, else 0.0; None for an empty gold.

    The answer is the last \boxed{}, else what follows the last ####, else the last <answer>, else the last
    number or a/b; a gold without these marks is all answer. Once $, %, units, \text, \frac and thousands
    separators are undone, numbers are compared exactly, a bare list in any order, the rest as text.
    """
    rewards = []
    for completion, gold in zip(completions, answer):
        text, gold = _text(completion), "" if gold is None else _text(str(gold))
        found = _canonical(_final(text, unmarked=_last_match(NUMBER + r"(?:/\d+)?", text)))
        target = _canonical(_final(gold, unmarked=gold))
        rewards.append(float(found == target) if any(target) else None)
    return rewards


def countdown(completions: list, nums: list, target: list, **kwargs) -> list[float]:
    r"""1.0 for an expression that uses every number of `nums` once, with + - * / only, and equals `target`.

    The expression is the last \boxed{}, ####, <answer>, or else the last line; "= 24" behind it is ignored.
    """
    rewards = []
    for completion, numbers, goal in zip(completions, nums, target):
        text = re.sub(r"\\times|\\cdot|×", "*", re.sub(r"\\div|÷", "/", _text(completion).strip()))
        found = _final(text, unmarked=text.rpartition("\n")[2]).partition("=")[0].strip("$*`. \n")
        rewards.append(float(_solves(found, sorted(map(int, numbers)), Fraction(goal))))
    return rewards


def format(completions: list, **kwargs) -> list[float]:
    """1.0 for exactly <think>...</think><answer>...</answer>, neither of them blank, else 0.0; so never where
    the chat template has written <think> already."""
    body = r"(?!\s*</)(?:(?!</?(?:think|answer)>).)+"
    shape = re.compile(rf"\s*<think>{body}</think>\s*<answer>{body}</answer>\s*", re.DOTALL)
    return [float(bool(shape.fullmatch(_text(completion)))) for completion in completions]


def length(completions: list, answer: list, completion_ids: list[list[int]] | None = None,
           **kwargs) -> list[float | None]:
    """Shorter is better among correct answers (as `math` judges), never positive for wrong ones.

    l = 0.5 - (len - min) / (max - min) over the group; l if correct, min(0, l) if not; 0 if max = min (Kimi
    k1.5, arXiv 2501.12599, section 2.3.3). Lengths are in tokens, or in characters without completion_ids.
    """
    lengths = [len(item) for item in completion_ids or map(_text, completions)]
    shortest, spread = min(lengths), max(lengths) - min(lengths)
    rewards = []
    for size, right in zip(lengths, math(completions, answer)):
        score = 0.5 - (size - shortest) / spread if spread else 0.0
        rewards.append(None if right is None else score if right else min(0.0, score))
    return rewards


def overlong(completion_ids: list[list[int]], trainer_state: SimpleNamespace, **kwargs) -> list[float]:
    """A penalty for completions near the limit of trainer_state.max_completion_length tokens.

    0 for up to 4/5 of the limit, then falling linearly to -1 at the limit, which completions that were cut
    off have reached (DAPO, eq. 13, arXiv 2503.14476: from 16,384 to 20,480). A Scorer's state must hold it.
    """
    limit = trainer_state.max_completion_length
    return [max(-1.0, min(0.0, 4 - 5 * len(ids) / limit)) for ids in completion_ids]


BUILTINS = {"gsm8k": gsm8k, "math": math, "countdown": countdown, "format": format, "length": length,
            "overlong": overlong}
NEED_ANSWER = {"gsm8k", "math", "length"}  # without a gold answer they give no reward


# ---- Finding and comparing answers -------------------------------------------------------------------------

# (?a): digits are 0 to 9 only. A minus is a sign only where no operand stands before it: "x = -5" ends in -5,
# "20-5" in 5. An exponent has three digits at most, so that no number takes long to compute.
SIGN = r"(?a)(?:(?<![\w.)\]}])-)?\\?\$?"
POWER = r"(?:[eE][-+]?\d{1,3}(?!\d))?"
NUMBER = SIGN + r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)" + POWER
# The groups are sign, whole, top, bottom: of "-1 3/4" they are "-", "1", "3", "4".
EXACT = re.compile(r"([-+]?)\s*(?:(\d+)\s+(?=\d+\s*/))?([\d.]+" + POWER + r")(?:\s*/\s*(-?[\d.]+))?")

WORDS = r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
UNITS = (r"(?:square |cubic )?(?:[ckm]m|kg|units?|degrees?|meters?|inch(?:es)?|feet|miles?|hours?|minutes?|"
         r"seconds?|days?|years?|dollars?|cents?|percent)")
# (pattern, replacement): one spelling for what has several, applied in this order.
SPELLINGS = [
    (r"[\s~]+", " "),
    (r"\\\\", ";"),  # the end of a matrix row
    # Commands and spaces that only change the layout; $, % and degree signs.
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\! ?|\\[,;: ]|\\?[$%]|\^\s*\{?\s*\\circ\s*\}?|°", ""),
    # A unit at the end: 5\text{ cm}^2, 5 cm.
    (r"(?<=[\w)}])\s*(?:" + WORDS + r"|(?<=\d)\s*" + UNITS + r")(?:\s*\^\s*\{?\d\}?)?[\s.]*$", ""),
    (WORDS, r" \1 "),
    (r"\s(?:and|or)\s", ","),
    # x = 5; x = 1, x = 2
    (r"^\s*([a-zA-Z])\s*=[^=]*(?:,\s*\1\s*=[^=]*)*$", lambda roots: re.sub(r"[a-zA-Z]\s*=", "", roots[0])),
    # Thousands separators: 1,234, 1 234, 1{,}234; but (1,234), [-100,100] and {100,200} hold two numbers.
    (r"(?<![\d.,(\[])(?<![(\[]-|\\\{)\d{1,3}(?:(?:[, ]|\{,\})\d{3})+(?![\d,/])",
     lambda number: re.sub(r"\D", "", number[0])),
    # \frac12 and \frac{1}{2}, with a space before, so that 1\frac12 becomes 1 1/2.
    (r"\\[dtc]?frac\s*(?:(\d)|\{\s*(-?[\d.]+)\s*\})\s*(?:(\d)|\{\s*(-?[\d.]+)\s*\})", r" \1\2/\3\4"),
    (r"(\\sqrt|[\^_])\s*\{(\w)\}", r"\1\2"),  # \sqrt{2}, x^{2}
    (r"\\(?:[dtc](?=frac)|(?=[a-zA-Z{}]))", ""),  # \dfrac of anything else, and every other backslash
    (r"^\s*(?:\(([^(){},]*)\)|\{([^(){}]*)\})[\s.]*$", r"\1\2"),  # (C), {1, 2}
]


def _text(completion: str | list[dict]) -> str:
    """The text of a completion, which may be messages, with "-" for the typographic minus."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text.replace("\u2212", "-")


def _last_match(pattern: str, text: str) -> str:
    return "".join(re.findall(pattern, text)[-1:])


def _final(text: str, unmarked: str) -> str:
    r"""The part of `text` that states its answer: the last \boxed{}, ####, <answer>, or else `unmarked`."""
    text = re.sub(r"\\boxed\s*([^\s{$]+)", r"\\boxed{\1}", text.replace(r"\fbox", r"\boxed"))  # \boxed 5
    _, boxed, rest = text.rpartition(r"\boxed")
    if boxed:
        depth = 0
        for brace in re.finditer(r"\\.|[{}]", rest, re.DOTALL):  # \\. so that \{ and \} are passed over
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if brace[0] == "}" and depth == 0:
                return rest[: brace.start()].partition("{")[2]
        return ""  # cut off before its brace closed: no answer
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    before = text.rpartition("</answer>")[0]
    return before.rpartition("<answer>")[2] if "<answer>" in before else unmarked


def _canonical(text: str) -> list[Fraction | str]:
    """A list that is equal for equal answers: exact numbers, other texts, and commas and brackets between."""
    for pattern, plain in SPELLINGS:
        text = re.sub(pattern, plain, text)
    elements, depth = [[]], 0  # a list without brackets is a set: "1, 2" is "2, 1"
    for part in filter(None, re.split(r"\s*([,;()\[\]{}])\s*", text.strip().rstrip(" ."))):
        depth += (part in "([{") - (part in ")]}")
        if part == "," and not depth:
            elements.append([])
            continue
        value = part.replace(" ", "").casefold()
        if number := EXACT.fullmatch(part):
            sign, whole, top, bottom = number.groups()
            # What is no number after all stays text: "1.2.3", "1/0", more digits than int() takes.
            with suppress(ZeroDivisionError, ValueError):
                value = int(sign + "1") * (Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1))
        elements[-1].append(value)
    return sorted(elements, key=repr)


def _solves(expression: str, numbers: list[int], goal: Fraction) -> bool:
    """Whether the expression equals `goal` and holds exactly `numbers`, which are sorted."""
    # Only these characters, so no 0x10, 1_0 or 1e5; and few of them, because the parser is recursive.
    if not re.fullmatch(r"[-+*/()\d ]{1,500}", expression, re.ASCII):
        return False
    try:
        value = _arithmetic(ast.parse(expression, mode="eval").body)
    except (ArithmeticError, AttributeError, KeyError, MemoryError, RuntimeError, SyntaxError):
        return False
    return value == goal and sorted(map(int, re.findall(r"\d+", expression))) == numbers


OPERATIONS = {ast.Add: Fraction.__add__, ast.Sub: Fraction.__sub__, ast.USub: Fraction.__neg__,
              ast.Mult: Fraction.__mul__, ast.Div: Fraction.__truediv__}


def _arithmetic(node: ast.expr) -> Fraction:
    """The exact value of an expression. KeyError for **, AttributeError for 2(3), which is a call."""
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    operands = [node.operand] if isinstance(node, ast.UnaryOp) else [node.left, node.right]
    return OPERATIONS[type(node.op)](*map(_arithmetic, operands))


# ---- The interface -----------------------------------------------------------------------------------------

class Group(NamedTuple):
    """The completions of one prompt."""
    prompt: str | list[dict]
    completions: list[str]  # functions see them as messages where the prompt is messages
    completion_ids: list[list[int]]
    columns: dict[str, object]  # of the prompt's row


class Scores(NamedTuple):
    """What a Group got."""
    rewards: list[float | None]  # weighted sum for each completion; None = no reward at all
    parts: dict[str, list[float | None]]  # by function, without weights


class Outcome(NamedTuple):
    """What one function says of one completion."""
    reward: float | None
    cause: str = ""  # of a failure, in the words under which Scorer.failures counts it
    detail: str = ""  # the rest of the message about it


class Scorer(AbstractContextManager):
    """Scores groups with one or several reward functions, in worker processes that can be killed.

    specs: names of built-in functions, or "path/file.py:function"; weights: one for each, 1 by default.
    timeout: seconds for one function on one group or, where that fails, on one completion; after four of
    these the rest of the group counts as late too.
    workers: how many groups are scored at a time. 0 calls the functions in this process and thread, without a
    time limit: for those that need its GPU.
    `failures` counts failures by their cause ("exception: f: ZeroDivisionError"); `state` is what functions
    see as trainer_state. Raises UserError for wrong arguments.
    """

    def __init__(self, specs: list[str], weights: list[float] | None = None, timeout: float = 30.0,
                 workers: int = 1):
        if not specs or len(set(specs)) < len(specs):
            raise UserError(f"--reward: give at least one function and none twice, not {specs}")
        self.weights = [1.0] * len(specs) if weights is None else list(weights)
        if len(self.weights) != len(specs) or not all(map(isfinite, self.weights)):
            raise UserError(f"--reward_weights: {weights} must be one finite number for each of {specs}")
        if not 0 < timeout <= 1e6 or workers < 0:  # sockets count milliseconds in 32 bits
            raise UserError("--reward_timeout must be above 0, up to 1e6 seconds; --reward_workers 0 or more")
        names = [spec.rpartition(":")[2] for spec in specs]
        self.names = dict(zip(specs, names if len(set(names)) == len(names) else specs))
        self.timeout, self.failures, self._first_call = timeout, Counter(), True
        self.state = {"global_step": 0, "max_steps": 0, "epoch": 0.0}
        self._workers = [_Worker(specs) for _ in range(workers)]
        if workers:
            self._workers[0].start()  # finds every mistake in the specs; the others start when needed
        else:
            for spec in specs:
                _load(spec)

    def score(self, groups: list[Group]) -> list[Scores]:
        """The Scores of each Group. A completion that any function failed on has no reward.

        Raises UserError for a function that fails on all completions of the first call: it must be wrong.
        """
        workers, results = self._workers or [None], [None] * len(groups)

        def share(k):  # fixed, so that a function that keeps state gives the same rewards in every run
            for i in range(k, len(groups), len(workers)):
                results[i] = [self._outcomes(workers[k], spec, groups[i]) for spec in self.names]

        if len(workers) == 1:
            share(0)  # in this thread, to which CUDA's current device belongs
        else:
            with ThreadPoolExecutor(len(workers)) as pool:
                list(pool.map(share, range(len(workers))))  # list() raises what a thread raised
        if self._first_call and groups:
            self._refuse_broken(groups, results)
            self._first_call = False
        return [self._combine(by_function) for by_function in results]

    def _outcomes(self, worker: "_Worker | None", spec: str, group: Group) -> list[Outcome]:
        """What one function says of a group; where the whole call failed, of each completion alone."""
        request = {"spec": spec, "name": self.names[spec], "state": self.state, **group._asdict()}
        outcomes = worker.call(request, self.timeout) if worker else _evaluate(**request)
        if len(outcomes) < 2 or not outcomes[0].cause.startswith(("timeout", "crash", "exception")):
            return outcomes
        singles = []
        for text, ids in zip(group.completions, group.completion_ids):
            late = [o for o in singles if o.cause.startswith("timeout")]
            if len(late) == 4:  # it is the function: each of them would take the whole time limit
                singles.append(late[-1])
                continue
            single = group._replace(completions=[text], completion_ids=[ids])
            singles += self._outcomes(worker, spec, single)
        return singles

    def _refuse_broken(self, groups: list[Group], results: list[list[list[Outcome]]]) -> None:
        """Raises UserError for a function that failed on all completions; says of one that gave all None.

        Time-outs and crashes may be the fault of the completions: they are only counted.
        """
        for spec, by_group in zip(self.names, zip(*results)):
            outcomes = [outcome for outcomes in by_group for outcome in outcomes]
            if all(outcome == Outcome(None) for outcome in outcomes):
                print(f"rewards: {spec}: None for all completions of its first batch: no gold answer that it "
                      "can read? These do not train", file=sys.stderr, flush=True)
            if outcomes and all(o.cause.startswith(("exception", "length", "type")) for o in outcomes):
                raise UserError(
                    f"--reward {spec}: failed on all completions of its first batch: {outcomes[0].detail}. "
                    f"Given: prompts, completions, completion_ids; columns: {', '.join(groups[0].columns)}")

    def _combine(self, by_function: list[list[Outcome]]) -> Scores:
        """The Scores of one group from each function's outcomes; counts failures."""
        rewards = []
        for outcomes in zip(*by_function):
            failures = [outcome for outcome in outcomes if outcome.cause]
            for failure in failures:
                self._count(failure)
            terms = [weight * outcome.reward for weight, outcome in zip(self.weights, outcomes)
                     if outcome.reward is not None]
            rewards.append(sum(terms) if terms and not failures else None)
        parts = [[outcome.reward for outcome in outcomes] for outcomes in by_function]
        return Scores(rewards, dict(zip(self.names.values(), parts)))

    def _count(self, failure: Outcome) -> None:
        """Counts it, and prints the first of each cause."""
        self.failures[failure.cause] += 1
        if self.failures[failure.cause] == 1:
            note = f"{failure.detail}. The completion has no reward; more of these are only counted"
            print(f"rewards: {failure.cause}: {note}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.stop()

    def __exit__(self, *_) -> None:
        self.close()


# ---- Worker processes --------------------------------------------------------------------------------------

class _Worker:
    """One worker process, started when it is needed and again after it was stopped."""

    def __init__(self, specs: list[str]):
        self.specs, self.process = specs, None

    def start(self) -> None:
        """Starts the process and lets it load all functions. Raises UserError where one cannot be loaded."""
        self.channel, theirs = socket.socketpair()
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(MEMORY_LIMIT)]
        settings = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        with theirs:  # in a session of its own, so that one signal reaches what a function started as well
            self.process = Popen(command, stdin=PIPE, stdout=theirs, env=settings, start_new_session=True)
        for spec in self.specs:  # a request without a prompt only loads
            [loaded] = self.call({"spec": spec, "name": spec, "completions": [""]}, LOAD_SECONDS)
            if loaded.cause:
                self.stop()
                raise UserError(loaded.detail if loaded.cause == "error"
                                else f"--reward {spec}: while importing, {loaded.detail}")

    def call(self, request: dict, limit: float) -> list[Outcome]:
        """What _evaluate returns for the request, also when `limit` seconds pass or the process ends."""
        if self.process and self.process.poll() is not None:
            self.stop()  # something else ended it since the last call: that is not this request's fault
        if not self.process:
            self.start()
        name, count, process, reply = request["name"], len(request["completions"]), self.process, b""
        try:
            self.channel.settimeout(limit)
            with suppress(ConnectionError):  # the process ended
                self.channel.sendall(json.dumps(request, default=str).encode() + b"\n")  # dates become text
                reply = self.channel.makefile("rb").readline()
        except TimeoutError:
            return [Outcome(None, f"timeout: {name}", f"it took over {limit:g} s")] * count
        finally:  # after Ctrl-C too: a reply still to come would be taken for that to the next request
            if not reply.endswith(b"\n"):
                self.stop()
        if self.process:
            return [Outcome(*values) for values in json.loads(reply)]
        code = process.returncode
        what = signal.strsignal(-code) if code < 0 else f"exit code {code}"
        return [Outcome(None, f"crash: {name}: {what}", f"the process ended ({what})")] * count

    def stop(self) -> None:
        """Ends the process with all that it started."""
        if self.process:
            with self.process, self.channel, suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process = None


def _serve(memory: int) -> None:
    """The worker process: answers each line of its socket, a request, with a line of outcomes.

    memory: bytes of private memory that it may hold.
    """
    channel = socket.socket(fileno=os.dup(1)).makefile("rw")
    lifeline, null = os.dup(0), os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # what a function prints cannot be taken for a reply
    # Nothing is ever written to the lifeline. It closes when the parent dies; the kernel then sends SIGIO,
    # which ends this process even inside C code (an exploding regex) that never gets to read again.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))  # not RLIMIT_AS: torch maps more than it uses
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in channel:
        request = json.loads(line)
        try:
            _load(request["spec"])
            outcomes = _evaluate(**request) if "prompt" in request else [Outcome(None)]
        except UserError as error:
            outcomes = [Outcome(None, "error", str(error))]
        print(json.dumps(outcomes), file=channel, flush=True)


# ---- Calling a function, in a worker or in the caller's process --------------------------------------------

def _evaluate(spec: str, name: str, prompt: str | list[dict], completions: list[str],
              completion_ids: list[list[int]], columns: dict, state: dict) -> list[Outcome]:
    """Calls a function for one group: an Outcome for each completion. name: the function's, in messages."""
    function, path = _load(spec)
    n, chat = len(completions), not isinstance(prompt, str)
    keywords = {  # copies: a function that pops from a list must not change the other rows
        **{column: [copy.deepcopy(value) for _ in completions] for column, value in columns.items()},
        "prompts": [copy.deepcopy(prompt) for _ in completions],
        "completions": [[{"role": "assistant", "content": text}] if chat else text for text in completions],
        "completion_ids": [list(ids) for ids in completion_ids],
        "trainer_state": SimpleNamespace(**state),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    try:
        values = function(**keywords)
        if hasattr(values, "__await__"):  # TRL takes async functions
            import asyncio  # slow to import, rarely needed
            values = asyncio.run(values)
        values = list(values)
    except (Exception, SystemExit) as error:
        return [Outcome(None, f"exception: {name}: {type(error).__name__}", _describe(error, path))] * n
    if len(values) != n:
        return [Outcome(None, f"length: {name}", f"it returned {len(values)} values for {n} completions")] * n
    return [_check_value(value, name) for value in values]


def _check_value(value: object, name: str) -> Outcome:
    """The Outcome for one value that the function `name` returned."""
    if value is None:  # the function does not apply to this completion
        return Outcome(None)
    try:
        number = value.__float__()  # not float(value), which takes text
        cause = "" if isfinite(number) else f"{abs(number)}: {name}"
    except Exception:  # whatever a type of the user's raises
        return Outcome(None, f"type: {name}", f"it returned a {type(value).__name__} for a number")
    return Outcome(None, cause, f"it returned {number}") if cause else Outcome(number)


@cache
def _load(spec: str) -> tuple[Callable, str]:
    """(function, its file) for a built-in's name or "path/file.py:function". Raises UserError."""
    if spec in BUILTINS:
        return BUILTINS[spec], __file__
    path, _, name = os.path.abspath(spec).rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"--reward {spec}: not known; give {', '.join(BUILTINS)} or path/file.py:function")
    module_name = "reward:" + path  # so that a user's model.py replaces no module of the same name
    try:
        if module_name not in sys.modules:
            sys.path.insert(0, os.path.dirname(path))  # the file may import its neighbours
            found = spec_from_file_location(module_name, path)
            sys.modules[module_name] = module_from_spec(found)
            found.loader.exec_module(sys.modules[module_name])
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise UserError(f"--reward {spec}: the file cannot be imported: {_describe(error, path)}") from error
    function = getattr(sys.modules[module_name], name, None)
    if not callable(function):
        raise UserError(f"--reward {spec}: {path} has no function {name!r}")
    return function, path


def _describe(error: BaseException, path: str) -> str:
    """The exception in one line, with the last line of the file `path` that it passed through."""
    said = " ".join(" ".join(traceback.format_exception_only(error)).split())[:500]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return said + f" ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else said


if __name__ == "__main__":
    sys.exit(_serve(int(sys.argv[2])) if sys.argv[1:2] == ["--worker"] else __doc__)
