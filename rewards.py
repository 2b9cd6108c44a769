r"""Verifiable rewards for reinforcement learning, and a safe way to call them. Standard library only.

    with Scorer(["math", "mine.py:short"], weights=[1.0, 0.2], timeout=30, workers=2) as scorer:
        group = Group("1/4 + 1/4?", [r"\boxed{1/2}", "0.4"], [[5, 6], [7]], {"answer": "0.5"})
        [scores] = scorer.score([group])  # scores.rewards, scores.parts, scorer.failures

A reward function has TRL's signature, f(prompts, completions, completion_ids, **columns) -> list of float or
None, and gets one whole group (all completions of one prompt) a call. It judges text that a model wrote, and
sooner or later that makes a regex explode, a number grow without end or a library crash. So functions run in
worker processes (JSON lines over pipes; nothing is forked or pickled; no GPU, a memory limit) that can be
killed. What they print is dropped, as generated code may print without end: write to sys.stderr instead.

Left out, and why: a sandbox (workers may read files and use the network; run generated code in a container);
symbolic algebra (`math` finds x+1 and 1+x different; a file of yours may call math-verify, which the limits
make safe); reward models (a function may hold one, and workers=0 lets it use the caller's GPU).
"""

import ast
import copy
import fcntl
import inspect
import json
import operator
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from types import SimpleNamespace

MEMORY_LIMIT = 4 << 30  # bytes of private memory that a worker may hold
LOAD_SECONDS = 120  # for importing a file, which may import torch from a network disk


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


# ------------------------------------------------------------------------------------------- built-in rewards

# A minus is a sign only where no operand stands before it: "x = -5" ends in -5, "20-5" in 5.
SIGN, DIGITS = r"((?<![\w.)\]}])-)?\\?\$?", r"((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\d.])\.\d+)"
NUMBER = re.compile(SIGN + DIGITS + r"([eE][-+]?\d{1,3}(?!\d))?", re.ASCII)
WORDS = r"\\(?:text\w*|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
UNITS = (r"(?:square |cubic )?(?:[ckm]m|kg|units?|degrees?|meters?|inch(?:es)?|feet|miles?|hours?|minutes?|"
         r"seconds?|days?|years?|dollars?|cents?|percent)")
# One spelling for what has several, applied in this order.
SPELLINGS = [
    (r"\s+", " "),
    (r"\\\\", ";"),  # rows of a matrix
    (r"\\(?:left|right|displaystyle)(?![a-z])|\\[!,;: ]|\\?[$%]|\^\s*\{?\s*\\circ\s*\}?|°", ""),
    (r"\{,\}", ","),
    (r"^\s*\\\{(.*)\\\}[\s.]*$", r"\1"),  # {1, 2}
    (r"^\s*[a-zA-Z]\s*=(?!.*=)", ""),  # x = 5
    (r"(?<=[\w)}])\s*(?:" + WORDS + r"|(?<=\d)\s*" + UNITS + r")(?:\s*\^\s*\{?\d\}?)?[\s.]*$", ""),
    (WORDS, r" \1 "),
    (r"\s(?:and|or)\s", ","),
    (r"(?<![\d.,])\d{1,3}(?:[, ]\d{3})+(?![\d,/])", lambda number: re.sub("[, ]", "", number[0])),
    (r"\\[dtc]?frac\s*(?:(\d)|\{\s*(-?[\d.]+)\s*\})\s*(?:(\d)|\{\s*(-?[\d.]+)\s*\})", r" \1\2/\3\4"),
    (r"\\[dtc]frac", r"\\frac"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"([\^_])\s*\{(\w)\}", r"\1\2"),
    (r"\\(?=[a-zA-Z{}])", ""),
    (r"^\s*[({]([^(){},]*)[)}][\s.]*$", r"\1"),  # (C)
]
EXACT = re.compile(r"([-+]?)\s*(?:(\d+)\s+(?=\d+\s*/))?(\d+(?:\.\d*)?|\.\d+)(?:\s*/\s*(-?\d+(?:\.\d*)?))?")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _text(completion):
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text.replace("\u2212", "-")  # the typographic minus


def _numbers(text):
    return [Decimal(sign + digits.replace(",", "") + power) for sign, digits, power in NUMBER.findall(text)]


def gsm8k(completions, answer, **kwargs):
    """1.0 where the last number of the completion is exactly the gold one (1,072 = 1072.0), else 0.0.

    answer: list of str (what follows the last ####, or all of it) or numbers. None for a gold without exactly
    one number in it.
    """
    rewards = []
    for completion, gold in zip(completions, answer):
        golds = _numbers(_text(str(gold)).rpartition("####")[2])
        rewards.append(float(_numbers(_text(completion))[-1:] == golds) if len(golds) == 1 else None)
    return rewards


def _final(text):
    r"""The part of `text` that states its answer: the last \boxed{}, else ####, else <answer>; or None."""
    if boxes := [*re.finditer(r"\\(?:boxed|fbox)\s*([^\s{$]*)", text)]:
        if boxes[-1][1]:
            return boxes[-1][1]  # \boxed 5
        start, depth = boxes[-1].end(), 0
        for brace in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                return text[start + 1 : start + brace.start()]
        return ""  # cut off before its brace closed: no answer
    if "####" in text:
        return text.rpartition("####")[2].strip().partition("\n")[0]
    before = text.rpartition("</answer>")[0]
    return before.rpartition("<answer>")[2] if "<answer>" in before else None


def _exact(text):
    """The number that `text` is, a mixed one included; or `text` without spaces, a word in small letters."""
    if number := EXACT.fullmatch(text):
        sign, whole, top, bottom = number.groups()
        with suppress(ZeroDivisionError, ValueError):  # ValueError: more digits than int() takes
            value = Fraction(whole or 0) + Fraction(top) / Fraction(bottom or 1)
            return -value if sign == "-" else value
    text = re.sub(r"\s", "", text)
    return text.casefold() if text.isalpha() else text


def _canonical(text):
    """A list that is equal for equal answers: numbers and texts, and the commas and brackets between them."""
    for pattern, plain in SPELLINGS:
        text = re.sub(pattern, plain, text)
    values = [_exact(part) for part in re.split(r"\s*([,;()\[\]{}])\s*", text.strip().rstrip(" .")) if part]
    ordered = re.search(r"[()\[\]{};]", text)  # a list without brackets is a set: "1, 2" is "2, 1"
    return values if ordered else sorted(values, key=repr)


def math(completions, answer, **kwargs):
    r"""1.0 where the completion's answer equals the gold one, else 0.0; None for an empty gold.

    The answer is the last \boxed{}, else what follows the last ####, else the last <answer>, else the last
    number or a/b; a gold without these marks is all answer. Numbers are compared exactly once $, %, units,
    \text, \frac and thousands separators are undone, inside (a, b) too; a bare list in any order; the rest
    as text.
    """
    rewards = []
    for completion, gold in zip(completions, answer):
        text, gold = _text(completion), "" if gold is None else _text(str(gold))
        found, marked = _final(text), _final(gold)
        if found is None:
            numbers = [*re.finditer(rf"(?:{NUMBER.pattern})(?:/\d+)?", text, re.ASCII)]
            found = numbers[-1][0] if numbers else ""
        target = _canonical(gold if marked is None else marked)
        rewards.append(float(_canonical(found) == target) if target else None)
    return rewards


def _arithmetic(node, used):
    """The exact value of an expression; appends its numbers to `used`. KeyError for other than + - * /."""
    if isinstance(node, ast.Constant):
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_arithmetic(node.operand, used)
    if not isinstance(node, ast.BinOp):
        raise KeyError(type(node))
    return OPERATIONS[type(node.op)](_arithmetic(node.left, used), _arithmetic(node.right, used))


def countdown(completions, nums, target, **kwargs):
    r"""1.0 for an expression that uses every number of `nums` once, with + - * / only, and equals `target`.

    The expression is the last \boxed{}, ####, <answer>, or else the last line; "= 24" behind it is ignored.
    """
    rewards = []
    for completion, numbers, goal in zip(completions, nums, target):
        goal, given, used = Fraction(goal), Counter(map(int, numbers)), []
        text = _text(completion).strip()
        found = _final(text)
        found = text.rpartition("\n")[2] if found is None else found
        found = re.sub(r"\\times|\\cdot|×", "*", re.sub(r"\\div|÷", "/", found)).partition("=")[0].strip(" $")
        rewards.append(0.0)
        # Only these characters, so no 0x10, 1_0 or 1e5; and few of them, because the parser is recursive.
        if re.fullmatch(r"[-+*/()\d ]{1,500}", found, re.ASCII):
            with suppress(SyntaxError, KeyError, ZeroDivisionError, RecursionError, MemoryError):
                value = _arithmetic(ast.parse(found, mode="eval").body, used)
                rewards[-1] = float(value == goal and Counter(used) == given)
    return rewards


def format(completions, **kwargs):
    """1.0 for exactly <think>...</think><answer>...</answer>, neither of them blank, else 0.0."""
    body = r"(?!\s*</)(?:(?!</?(?:think|answer)>).)+"
    shape = re.compile(rf"\s*<think>{body}</think>\s*<answer>{body}</answer>\s*", re.DOTALL)
    return [float(bool(shape.fullmatch(_text(completion)))) for completion in completions]


def length(completions, answer, completion_ids=None, **kwargs):
    """Shorter is better among correct answers (as `math` judges), never positive for wrong ones.

    l = 0.5 - (len - min) / (max - min) over the group; l if correct, min(0, l) if not; 0 if max = min (Kimi
    k1.5, arXiv 2501.12599, section 2.3.3). Lengths are in tokens, or in characters without completion_ids.
    """
    lengths, rewards = [len(item) for item in completion_ids or map(_text, completions)], []
    spread = max(lengths) - min(lengths)
    for size, correct in zip(lengths, math(completions, answer)):
        reward = 0.5 - (size - min(lengths)) / spread if spread else 0.0
        rewards.append(None if correct is None else reward if correct else min(0.0, reward))
    return rewards


BUILTINS = {"gsm8k": gsm8k, "math": math, "countdown": countdown, "format": format, "length": length}

# -------------------------------------------------------------------- calling a function, in a worker or here

def _load(spec):
    """(function, its file) for a built-in's name or "path/file.py:function". Raises UserError."""
    if spec in BUILTINS:
        return BUILTINS[spec], __file__
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"--reward {spec}: not known; give {', '.join(BUILTINS)} or path/file.py:function")
    path = os.path.abspath(path)
    # The prefix keeps a user's rewards.py or model.py from replacing a module of the same name.
    module_name = "reward:" + path
    try:
        if module_name not in sys.modules:
            sys.path.insert(0, os.path.dirname(path))  # the file may import its neighbours
            found = spec_from_file_location(module_name, path)
            sys.modules[module_name] = module_from_spec(found)
            found.loader.exec_module(sys.modules[module_name])
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise UserError(f"--reward {spec}: the file cannot be imported: {_where(error, path)}") from error
    function = getattr(sys.modules[module_name], name, None)
    if not callable(function):
        raise UserError(f"--reward {spec}: {path} has no function {name!r}")
    return function, path


def _where(error, path):
    """The exception in one line, with the last line of the file `path` that it passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    line = f" ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {error!s:.500}{line}"


def _keywords(function, request):
    """What TRL would pass to `function`, less what a function without **kwargs does not name."""
    texts, prompt = request["completions"], request["prompt"]
    chat = not isinstance(prompt, str)
    row = {**request["columns"], "prompts": prompt}
    given = {
        # Copies: a function that pops from a list must not change the other rows, or the caller's data.
        **{name: [copy.deepcopy(value) for _ in texts] for name, value in row.items()},
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if chat else list(texts),
        "completion_ids": [list(ids) for ids in request["completion_ids"]],
        "trainer_state": SimpleNamespace(**request["state"]),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    named = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
    return {name: value for name, value in given.items() if takes_all or name in named}


def _evaluate(function, path, request):
    """Calls `function` for one group: [reward or None, cause of failure or None, detail] per completion."""
    count = len(request["completions"])
    try:
        values = function(**_keywords(function, request))
        if inspect.iscoroutine(values):  # TRL takes async functions
            import asyncio  # slow to import, rarely needed
            values = asyncio.run(values)
        values = list(values)
    except (Exception, SystemExit) as error:
        return [[None, f"exception: {type(error).__name__}", _where(error, path)]] * count
    if len(values) != count:
        return [[None, "length", f"it returned {len(values)} values for {count} completions"]] * count
    return [_outcome(value) for value in values]


def _outcome(value):
    if value is None:
        return [None, None, ""]
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError("text is no reward")
        number = float(value)  # bool, int, numpy scalars and one-element tensors too
    except Exception:  # whatever a type of the user's raises
        return [None, "type", f"it returned a {type(value).__name__} for a number"]
    if not isfinite(number):
        return [None, "nan" if number != number else "inf", f"it returned {number}"]
    return [number, None, ""]


# ------------------------------------------------------------------------------------------- worker processes

def _worker(lifeline, memory, *specs):
    """Loads the functions and says so, then answers each line of stdin with one line."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # what a function prints cannot be taken for a reply
    # Nothing is ever written to the lifeline. It closes when the parent dies; the kernel then sends SIGIO,
    # which ends this process even inside C code (an exploding regex) that never gets to read stdin again.
    fcntl.fcntl(int(lifeline), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(int(lifeline), fcntl.F_SETFL, os.O_ASYNC)
    # Not RLIMIT_AS: libraries like torch map far more address space than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    functions, error = [], None
    try:
        functions = [_load(spec) for spec in specs]
    except UserError as wrong:
        error = str(wrong)
    print(json.dumps({"error": error}), file=replies)
    for line in requests:
        request = json.loads(line)
        print(json.dumps(_evaluate(*functions[request["function"]], request)), file=replies)


class _Worker:
    """One worker process, started when it is needed and again after it was stopped."""

    def __init__(self, specs):
        self.specs, self.process = specs, None

    def start(self):
        theirs, self.lifeline = os.pipe()
        command = [sys.executable, os.path.abspath(__file__), "--worker", str(theirs), str(MEMORY_LIMIT)]
        self.process = subprocess.Popen(
            command + self.specs, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[theirs],
            start_new_session=True,  # one signal then reaches what a function started as well
            env={"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"})
        os.close(theirs)
        reply, died = self.exchange(b"", LOAD_SECONDS)
        if died:
            raise UserError(f"--reward {' '.join(self.specs)}: while importing, {died[1]}")
        if reply["error"]:
            self.stop()
            raise UserError(reply["error"])

    def call(self, request, limit):
        """What _evaluate returns, also when `limit` seconds pass or the process ends."""
        if not self.process:
            self.start()
        # default=str: dates and Decimals of a table arrive as text.
        reply, died = self.exchange(json.dumps(request, default=str).encode() + b"\n", limit)
        return [[None, *died]] * len(request["completions"]) if died else reply

    def exchange(self, request, limit):
        """(the worker's next reply, None), or (None, [cause, detail]) when it takes too long or dies."""
        expired, line = threading.Event(), b""
        timer = threading.Timer(limit, lambda: (expired.set(), self.kill()))
        timer.start()
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:  # Ctrl-C: the reply, still to come, would answer the next request
            self.kill()
            raise
        finally:
            timer.cancel()
            timer.join()
        if line.endswith(b"\n") and not expired.is_set():
            return json.loads(line), None
        code = self.stop()
        if expired.is_set():
            return None, ["timeout", f"it took over {limit:g} s"]
        what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return None, [f"crash: {what}", f"the process ended with {what}"]

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self):
        """Ends the process with all that it started; returns its exit code."""
        with suppress(BrokenPipeError), self.process as process:
            self.kill()
        os.close(self.lifeline)
        self.process = None
        return process.returncode


# ---------------------------------------------------------------------------------------------- the interface

@dataclass
class Group:
    """The completions of one prompt."""

    prompt: str | list[dict]
    completions: list[str]  # functions see them as messages where the prompt is messages
    completion_ids: list[list[int]]
    columns: dict[str, object]  # of the prompt's row


@dataclass
class Scores:
    rewards: list[float | None]  # weighted sum for each completion; None = no reward at all
    parts: dict[str, list[float | None]]  # by function, without weights


class Scorer(AbstractContextManager):
    """Scores groups with one or several reward functions, in worker processes that can be killed.

    specs: built-in names or "path/file.py:function"; weights: one for each, 1.0 by default; timeout: seconds
    for one function on one group or, where that fails, on one completion; workers: groups scored at a time; 0
    calls the functions in this process and thread, for those that need its GPU, without a time limit.

    `failures` counts completions left without reward by cause ("exception: f: ZeroDivisionError"); `state` is
    what functions get as trainer_state. Raises UserError for specs that cannot be used.
    """

    def __init__(self, specs: list[str], weights: list[float] | None = None, timeout=30.0, workers=1):
        if not specs or len(set(specs)) < len(specs):
            raise UserError(f"--reward: give at least one function and none twice, not {specs}")
        self.weights = [1.0] * len(specs) if weights is None else list(weights)
        if len(self.weights) != len(specs) or not all(map(isfinite, self.weights)):
            raise UserError(f"--reward_weights: {weights} must be one finite number for each of {specs}")
        if not 0 < timeout < threading.TIMEOUT_MAX or workers < 0:
            raise UserError("--reward_timeout must be over 0 seconds, --reward_workers 0 or more")
        names = [spec.rpartition(":")[2] for spec in specs]
        self.names = names if len(set(names)) == len(names) else specs
        self.specs, self.timeout, self.failures = list(specs), timeout, Counter()
        self.state = {"global_step": 0, "max_steps": 0, "epoch": 0.0}
        self._first = True
        self._workers = [_Worker(self.specs) for _ in range(workers)]
        if workers:
            self._workers[0].start()  # finds every mistake in the specs; the others start when needed
        else:
            self._functions = [_load(spec) for spec in specs]

    def score(self, groups: list[Group]) -> list[Scores]:
        """The Scores of each Group. A completion that any function failed on has no reward.

        Raises UserError when, in the first call, a function fails on every completion with an exception or
        with values that are no rewards: then it is the function that is wrong.
        """
        workers = self._workers or [None]

        def share(k):  # fixed, so that a function that keeps state gives the same rewards in every run
            return [[self._outcomes(workers[k], index, group) for index in range(len(self.specs))]
                    for group in groups[k::len(workers)]]

        with ThreadPoolExecutor(len(workers)) as pool:
            # One worker needs no thread, and workers=0 none: CUDA's current device belongs to this one.
            run = pool.map if len(workers) > 1 else map
            shares = list(run(share, range(len(workers))))
        results = [shares[i % len(workers)][i // len(workers)] for i in range(len(groups))]
        if self._first and groups:
            self._first = False
            self._check(groups, results)
        return [self._combine(by_function) for by_function in results]

    def _outcomes(self, worker, index, group):
        """What one function says of a group: what _evaluate returns."""
        request = {"function": index, "state": self.state, **vars(group)}
        if worker:
            outcomes = worker.call(request, self.timeout)
        else:
            outcomes = _evaluate(*self._functions[index], request)
        if len(outcomes) < 2 or not str(outcomes[0][1]).startswith(("timeout", "crash", "exception")):
            return outcomes
        # The call failed as a whole; alone, only the completions that made it fail do.
        pairs = zip(group.completions, group.completion_ids)
        singles = [replace(group, completions=[text], completion_ids=[ids]) for text, ids in pairs]
        return [self._outcomes(worker, index, single)[0] for single in singles]

    def _check(self, groups, results):
        for index, spec in enumerate(self.specs):
            failures = [(cause, detail) for by_function in results for _, cause, detail in by_function[index]]
            broken = [str(cause).startswith(("exception", "length", "type")) for cause, _ in failures]
            if broken and all(broken):
                raise UserError(
                    f"--reward {spec}: failed on all completions of its first batch: {failures[0][1]}. Given:"
                    f" prompts, completions, completion_ids; columns: {', '.join(groups[0].columns)}")

    def _combine(self, by_function):
        rewards = []
        for outcomes in zip(*by_function):
            failed = False
            for name, (_, cause, detail) in zip(self.names, outcomes):
                if cause:
                    failed = True
                    kind, colon, what = cause.partition(":")
                    cause = f"{kind}: {name}{colon}{what}"
                    self.failures[cause] += 1
                    if self.failures[cause] == 1:
                        note = f"{detail}. The completion has no reward; more of these are only counted"
                        print(f"rewards: {cause}: {note}", file=sys.stderr, flush=True)
            terms = [weight * out[0] for weight, out in zip(self.weights, outcomes) if out[0] is not None]
            rewards.append(sum(terms) if terms and not failed else None)
        columns = [[value for value, *_ in column] for column in by_function]
        return Scores(rewards, dict(zip(self.names, columns)))

    def close(self):
        """Ends the workers."""
        for worker in self._workers:
            if worker.process:
                worker.stop()

    def __exit__(self, *_):
        self.close()


if __name__ == "__main__":
    if sys.argv[1:2] != ["--worker"]:
        sys.exit(__doc__)
    _worker(*sys.argv[2:])
