"""Verifiable rewards for reinforcement learning, and a safe way to call them. Standard library only.

    from rewards import Group, Scorer

    with Scorer(["math", "my_rewards.py:short"], weights=[1.0, 0.2], timeout=30, workers=2) as scorer:
        scores = scorer.score([Group("What is 1/4 + 1/4?", [r"It is \\boxed{1/2}"], [[11, 12]], {"answer": "0.5"})])
        print(scores[0].rewards, scores[0].parts, scorer.failures)

A reward function has TRL's signature, f(prompts, completions, completion_ids, **columns) -> list[float | None], and
gets one whole group (all completions of one prompt) per call. Functions run in worker processes
(`python rewards.py --worker`, JSON lines over pipes), because a reward judges text that a model wrote: sooner or
later that text makes a regex explode, a number grow without end or a library crash, and only a process can be stopped
from outside. Nothing is forked or pickled; a worker sees no GPU and has a memory limit.

What was left out and why:
 1. A sandbox. Workers may read files and use the network; run untrusted code in a container of your own.
 2. Symbolic algebra. `math` compares exact numbers and normalised text; x+1 and 1+x differ. For more, write
    `--reward file.py:function` around math-verify or sympy: the time limit is what makes that safe.
 3. Reward models as a spec. A function run with workers=0 may hold one on the trainer's GPU.
 4. TRL's log_extra and log_metric do nothing; trainer_state has the step but no history.
"""

import copy
import fcntl
import inspect
import json
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
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib.util import module_from_spec, spec_from_file_location
from math import isfinite
from queue import SimpleQueue
from types import SimpleNamespace

MEMORY_LIMIT = 4 << 30  # bytes of private memory a worker may hold
LOAD_SECONDS = 120  # for importing the user's file, which may import torch from a network disk
SHOWN_BYTES = 4096  # of what a function prints during one call; the rest is dropped


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


# ---------------------------------------------------------------- rewards

# The minus is a sign only where no operand stands before it: "= -5" is negative, "20-5" ends in a positive 5.
NUMBER = re.compile(
    r"((?<![\w.)\]}])-)?\\?\$?((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9.])\.[0-9]+)"
    r"([eE][-+]?[0-9]+)?"
)


def _text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _numbers(text):
    """Every number in `text`, in order, as exact Decimals (None for one beyond what Decimal can hold)."""
    found = []
    for sign, digits, exponent in NUMBER.findall(text.replace("\u2212", "-")):
        try:
            found.append(Decimal(sign + digits.replace(",", "") + exponent))
        except ArithmeticError:
            found.append(None)
    return found


def gsm8k(completions, answer, **kwargs):
    """1.0 where the last number of the completion equals the gold answer exactly (72 = 72.0), else 0.0.

    completions: list of str or messages; answer: list of str, int or float, as GSM8K writes it ("... #### 72") or
    the bare number. None where the gold holds no number or several: gsm8k([""], [gold]) == [None] tests a gold.
    """
    rewards = []
    for completion, gold in zip(completions, answer):
        golds, found = _numbers(str(gold).rpartition("####")[2]), _numbers(_text(completion))
        known = len(golds) == 1 and golds[0] is not None
        rewards.append(float(found[-1:] == golds) if known else None)
    return rewards


BUILTINS = {"gsm8k": gsm8k}

# ---------------------------------------------------------------- calling a function, in a worker or here


def _where(error, path):
    """The exception in one line, with the last line of the file `path` that it passed through."""
    said = traceback.format_exception_only(error)[-1].strip()[:500]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename:
        return f"{said} ({error.filename}, line {error.lineno})"
    return f"{said} ({path}, line {frames[-1].lineno}: {frames[-1].line})" if frames else said


def _load(spec):
    """The reward function that `spec` names: a built-in, or "path/file.py:function". Raises UserError."""
    if spec in BUILTINS:
        return BUILTINS[spec]
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py"):
        raise UserError(f"--reward {spec}: not known; give {', '.join(BUILTINS)} or path/file.py:function")
    path = os.path.abspath(path)
    if not os.path.isfile(path):
        raise UserError(f"--reward {spec}: there is no file {path}")
    module = sys.modules.get("reward:" + path)
    if module is None:
        sys.path.insert(0, os.path.dirname(path))  # the file may import its neighbours
        # The prefix keeps a user's rewards.py or model.py from replacing a module of the same name.
        found = spec_from_file_location("reward:" + path, path)
        module = sys.modules[found.name] = module_from_spec(found)
        try:
            found.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            del sys.modules[found.name]
            raise UserError(f"--reward {spec}: the file cannot be imported: {_where(error, path)}") from error
    if not callable(getattr(module, name, None)):
        names = [k for k, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        raise UserError(f"--reward {spec}: {path} has no function {name!r}; it has {', '.join(names) or 'none'}")
    return getattr(module, name)


def _keywords(function, request):
    """The keyword arguments that TRL would pass, less those that a function without **kwargs does not name."""
    count, prompt = len(request["completions"]), request["prompt"]
    completions = list(request["completions"])
    if not isinstance(prompt, str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    # Copies, because a function may change what it gets (pop from a list) and must not change the other rows.
    given = {key: [copy.deepcopy(value) for _ in range(count)] for key, value in request["columns"].items()}
    given |= {
        "prompts": [copy.deepcopy(prompt) for _ in range(count)],
        "completions": completions,
        "completion_ids": [list(ids) for ids in request["completion_ids"]],
        "trainer_state": SimpleNamespace(log_history=[], **request["state"]),
        "log_extra": lambda column, values: None,
        "log_metric": lambda name, value: None,
    }
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return given
    return {key: value for key, value in given.items() if key in parameters}


def _outcome(value):
    """(float | None, failure | None) of one returned value; a failure is [kind, what, detail]."""
    if value is None:
        return None, None
    try:
        if isinstance(value, (str, bytes)):
            raise TypeError
        value = float(value)  # bool, int, numpy scalars and one-element tensors too
    except OverflowError:
        value = float("inf")
    except (TypeError, ValueError):
        return None, ["type", "", f"it returned {value!r:.80}, which is not a number"]
    if isfinite(value):
        return value, None
    return None, ["nan" if value != value else "inf", "", f"it returned {value}"]


def _evaluate(function, path, request):
    """Calls `function` for one group: a list of outcomes, or {"failed": [kind, what, detail]} for the whole call."""
    count = len(request["completions"])
    try:
        result = function(**_keywords(function, request))
        if inspect.isawaitable(result):  # TRL takes async functions
            result = _await(result)
        if not hasattr(result, "__iter__"):
            return {"failed": ["type", "", f"it returned {type(result).__name__} instead of a list"]}
        values = list(result)
    except (Exception, SystemExit) as error:
        return {"failed": ["exception", type(error).__name__, _where(error, path)]}
    if len(values) != count:
        return {"failed": ["length", "", f"it returned {len(values)} values for {count} completions"]}
    return [_outcome(value) for value in values]


def _await(result):
    import asyncio  # slow to import, rarely needed

    async def wait():
        return await result

    return asyncio.run(wait())


# ---------------------------------------------------------------- worker processes


def _worker(lifeline):
    """Loads the functions named by the first line of stdin, then answers one line for each line."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # From here on, what a function prints goes where stderr goes and cannot be taken for a reply.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)
    # Nothing is ever written to this pipe: it closes when the parent dies, and the kernel then sends SIGIO, which
    # ends this process even inside C code (an exploding regex) that never looks at stdin again.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)

    def reply(message):
        print(json.dumps(message), file=replies, flush=True)

    start = json.loads(requests.readline())
    # RLIMIT_DATA and not RLIMIT_AS: libraries like torch map far more address space than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (start["memory"], start["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        functions = [_load(spec) for spec in start["specs"]]
    except UserError as error:
        return reply({"error": str(error)})
    reply({"ready": True})
    for line in requests:
        request = json.loads(line)
        spec = start["specs"][request["function"]]
        reply(_evaluate(functions[request["function"]], _path(spec), request))


def _path(spec):
    return __file__ if spec in BUILTINS else os.path.abspath(spec.rpartition(":")[0])


class _Worker:
    """One worker process, started at the first call and again after it was killed or died."""

    def __init__(self, specs):
        self.specs = specs
        self.process = None
        self.closed = False

    def start(self):
        theirs, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", str(theirs)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=[theirs],
            start_new_session=True,  # one signal then reaches what the function started as well
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"},
        )  # fmt: skip
        os.close(theirs)
        threading.Thread(target=self._show, args=[self.process.stderr], daemon=True).start()
        reply = self._exchange({"specs": self.specs, "memory": MEMORY_LIMIT}, LOAD_SECONDS)
        if "failed" in reply:
            kind, what, _ = reply["failed"]
            raise UserError(f"--reward {' '.join(self.specs)}: importing ended with {kind} {what}".rstrip())
        if "error" in reply:
            self.stop()
            raise UserError(reply["error"])

    def _show(self, pipe):
        """Passes the first bytes of each call on to stderr and reads the rest away, so that the worker never waits."""
        while chunk := pipe.read1(1 << 16):
            shown = chunk[: max(0, SHOWN_BYTES - self.shown)]
            self.shown += len(chunk)
            try:
                sys.stderr.write(shown.decode(errors="replace"))
            except (OSError, ValueError):
                pass  # a console that is gone must not stop the reading

    def call(self, request, limit):
        """The reply to `request`; {"failed": ...} after `limit` seconds or when the process ends."""
        if self.closed:
            raise RuntimeError("this Scorer is closed")
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        return self._exchange(request, limit)

    def _exchange(self, message, limit):
        self.shown, expired, line = 0, threading.Event(), b""

        def expire():
            expired.set()
            self._kill()

        timer = threading.Timer(limit, expire)
        timer.start()
        try:
            # default=str: dates and Decimals of a table arrive as text.
            self.process.stdin.write(json.dumps(message, default=str).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:  # Ctrl-C leaves a reply behind that would answer the next call
            self.stop()
            raise
        finally:
            timer.cancel()
            timer.join()
        if expired.is_set():
            self.stop()
            return {"failed": ["timeout", "", f"it took more than {limit:g} s"]}
        if not line.endswith(b"\n"):
            code = self.stop()
            what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return {"failed": ["crash", what, f"the process ended with {what}"]}
        return json.loads(line)

    def _kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self):
        """Ends the process, if there is one, and what it started; returns its exit code."""
        if self.process is None:
            return None
        self._kill()
        code = self.process.wait()
        os.close(self.lifeline)
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process = None
        return code

    def close(self):
        self.closed = True
        if self.process is not None:
            self._kill()


class _Here:
    """Stands in for a worker when the functions run in this process."""

    def __init__(self, specs):
        self.specs = specs

    def start(self):
        self.functions = [_load(spec) for spec in self.specs]

    def call(self, request, limit):
        index = request["function"]
        return _evaluate(self.functions[index], _path(self.specs[index]), request)

    def close(self):
        pass


# ---------------------------------------------------------------- the interface


@dataclass
class Group:
    """The completions of one prompt."""

    prompt: str | list[dict]
    completions: list[str]  # the functions see messages instead where the prompt is messages
    completion_ids: list[list[int]]
    columns: dict[str, object]  # of the prompt's row; JSON values (others reach a worker as text)


@dataclass
class Scores:
    rewards: list[float | None]  # weighted sum per completion; None = no reward at all
    parts: dict[str, list[float | None]]  # per function, unweighted


class Scorer:
    """Scores groups with one or several reward functions, in worker processes that can be killed.

    specs: names of built-ins or "path/file.py:function"; weights: one per spec (1.0 each); timeout: seconds for one
    function on one group; workers: groups scored at the same time, or 0 for the caller's process (for rewards that
    need its GPU), where no time limit is possible. Raises UserError for specs that cannot be loaded.

    `failures` counts completions without reward by cause ("timeout: f", "exception: f: ZeroDivisionError").
    `state` is what functions get as trainer_state; the caller may update it before each score().
    """

    def __init__(self, specs, weights=None, timeout=30.0, workers=1):
        self.names = [spec.rpartition(":")[2] for spec in specs]
        if len(set(self.names)) < len(specs):  # two files with a function of the same name
            self.names = list(specs)
        self.weights = [1.0] * len(specs) if weights is None else list(weights)
        if not specs or len(set(specs)) < len(specs):
            raise UserError(f"--reward: give at least one function, none of them twice, not {specs}")
        if len(self.weights) != len(specs) or not all(isfinite(weight) for weight in self.weights):
            raise UserError(f"--reward_weights: give {len(specs)} finite numbers, one for each of {specs}, not {weights}")
        if not timeout > 0 or workers < 0:
            raise UserError("--reward_timeout must be over 0 seconds and --reward_workers at least 0")
        self.specs, self.timeout = list(specs), timeout
        self.failures = Counter()
        self.state = {"global_step": 0, "max_steps": 0, "epoch": 0.0}
        self._workers = [_Worker(self.specs) for _ in range(workers)] or [_Here(self.specs)]
        self._idle = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._fresh, self._warned = True, set()
        self._workers[0].start()  # finds every mistake in the specs; the others start when they are needed

    def score(self, groups):
        """Scores for each Group, in order. A completion that a function fails on has no reward (None).

        Raises UserError when a function fails on every completion of the first call with an exception or with values
        that are no rewards: then the function is wrong and not a completion.
        """
        if len(self._workers) == 1:  # no thread: a CUDA device and signal.alarm belong to the caller's
            results = [self._score_group(group) for group in groups]
        else:
            pool = ThreadPoolExecutor(len(self._workers))
            try:
                results = list(pool.map(self._score_group, groups))
            except BaseException:
                self.close()  # or the threads would go on for as long as their time limits
                raise
            finally:
                pool.shutdown(cancel_futures=True)
        if self._fresh and groups:
            self._fresh = False
            self._check_first(groups, results)
        return [self._combine(outcomes) for outcomes in results]

    def _score_group(self, group):
        worker = self._idle.get()
        try:
            return [self._outcomes(worker, index, group) for index in range(len(self.specs))]
        finally:
            self._idle.put(worker)

    def _outcomes(self, worker, index, group):
        """One outcome per completion from one function."""
        request = {"function": index, "state": self.state} | vars(group)
        reply = worker.call(request, self.timeout)
        if isinstance(reply, list):
            return reply
        kind, _, detail = reply["failed"]
        if len(group.completions) == 1 or kind not in ("timeout", "crash", "exception"):
            return [(None, reply["failed"])] * len(group.completions)
        if kind == "timeout":
            self._warn(f"slow: {self.names[index]}", f"{detail} for one group, which is now scored one by one")
        pairs = zip(group.completions, group.completion_ids)
        singles = [replace(group, completions=[text], completion_ids=[ids]) for text, ids in pairs]
        return [self._outcomes(worker, index, single)[0] for single in singles]

    def _check_first(self, groups, results):
        for index, spec in enumerate(self.specs):
            failures = [failure for outcomes in results for _, failure in outcomes[index]]
            if failures and all(failure and failure[0] in ("exception", "length", "type") for failure in failures):
                columns = ", ".join(groups[0].columns) or "none"
                raise UserError(
                    f"--reward {spec}: failed for every completion of the first batch: {failures[0][2]}. It is called"
                    f" with prompts, completions, completion_ids and the columns of the data: {columns}"
                )

    def _combine(self, outcomes):
        rewards = []
        for row in zip(*outcomes):
            for name, (_, failure) in zip(self.names, row):
                if failure:
                    kind, what, detail = failure
                    cause = f"{kind}: {name}" + (f": {what}" if what else "")
                    self.failures[cause] += 1
                    self._warn(cause, f"{detail}; that completion has no reward, more like it are only counted")
            terms = [weight * value for weight, (value, _) in zip(self.weights, row) if value is not None]
            rewards.append(None if not terms or any(failure for _, failure in row) else sum(terms))
        return Scores(rewards, {name: [value for value, _ in column] for name, column in zip(self.names, outcomes)})

    def _warn(self, cause, text):
        if cause not in self._warned:
            self._warned.add(cause)
            print(f"rewards: {cause}: {text}", file=sys.stderr, flush=True)

    def close(self):
        """Ends the workers."""
        for worker in self._workers:
            worker.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


if __name__ == "__main__":
    _worker(int(sys.argv[2]))
