"""Prompts for GRPO: files and built-in tasks, chat templates, the tokenizer, and a deterministic order.

Works when copied alone (standard library, tokenizers, jinja2; pyarrow only to read .parquet):

    from data import Tokenizer, load_prompts, prompt_indices
    tokenizer = Tokenizer("Qwen2.5-0.5B-Instruct")  # a Hugging Face folder
    data = load_prompts("gsm8k.jsonl", tokenizer, max_prompt_length=512)
    print(*data.notes, sep="\\n")
    for i in prompt_indices(step=0, prompts_per_step=16, size=len(data.train), seed=0):
        print(data.train[i].token_ids, data.train[i].columns["answer"])

Prompts are looked for in the columns `prompt` (TRL, verl), `messages`, `question` (GSM8K), `problem` (MATH),
then `nums` with `target` (Countdown); gold answers in `answer`, `reward_model.ground_truth`, `solution`,
`ground_truth`, `target`. Messages, also as a JSON string, go through the chat template. Text in `prompt` is
encoded as it is; text in any other column is a question and becomes a user message.

Left out, and why:
1. Hub data sets and streaming: prompts are small beside completions; a file is read whole and encoded once.
2. transformers' tokenizer classes: some rebuild the pre-tokenizer and so override tokenizer.json, which the
   model was trained with. Here that file is followed to the letter, and a model without one is refused.
3. Tools, images, and prompts that end inside the assistant's turn: the trainer has no use for them.
"""
import csv
import functools
import hashlib
import io
import json
import random
import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUILT_IN = ("digits", "sums")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "solution", "ground_truth", "target")


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


# ---------------------------------------------------------------------------------------------- the tokenizer


class Tokenizer:
    """The tokenizer.json, tokenizer_config.json, chat template and EOS ids of a Hugging Face folder.

    folder: str or Path. chat_template: path of a jinja file that overrides the model's template, or the name
    of one where the model has several. Raises UserError when a file is missing or broken.

    eos_token_ids: list[int], sorted: generation_config.json's (else config.json's) and the tokenizer's own.
    vocab_size: int, the tokens that the tokenizer knows; the model's embedding may have more rows.
    has_chat_template: bool.
    """

    def __init__(self, folder, chat_template: str | None = None):
        self.folder = Path(folder)
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing: --model needs a Hugging Face folder with a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{file} cannot be read ({error}): fetch the model again") from None
        # Some tokenizer.json carry padding or truncation, which would change prompts without a word.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        config = _read_config(self.folder / "tokenizer_config.json")
        named = {**_read_config(self.folder / "special_tokens_map.json"), **config}
        self._special = {name: token["content"] if isinstance(token, dict) else token
                         for name, token in named.items()
                         if name.endswith("_token") and isinstance(token, (str, dict))}
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.eos_token_ids = self._find_eos()
        self._bos_id = self._find_bos(config.get("add_bos_token"))
        self._template = self._find_template(config.get("chat_template"), chat_template)
        self.has_chat_template = self._template is not None

    def _token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(self._special.get(name, ""))

    def _find_eos(self) -> list[int]:
        ids = _read_config(self.folder / "generation_config.json").get("eos_token_id")
        if ids is None:
            ids = _read_config(self.folder / "config.json").get("eos_token_id")
        # The tokenizer's own too: chat models end their turn with it, and some configs name only the base's.
        ids = {*(ids if isinstance(ids, list) else [ids]), self._token_id("eos_token")} - {None}
        if not ids:
            raise UserError(f"{self.folder} names no EOS token: put eos_token_id into generation_config.json")
        return sorted(ids)

    def _find_bos(self, add_bos_token: bool | None) -> int | None:
        """The id that belongs before every prompt, if any; add_bos_token overrides the post-processor."""
        if add_bos_token is not None:
            return self._token_id("bos_token") if add_bos_token else None
        # Added tokens can always be encoded, so this shows what the post-processor puts before a text.
        probe = self._tokenizer.encode(self._tokenizer.id_to_token(self.eos_token_ids[0]) or "")
        return probe.ids[0] if probe.special_tokens_mask[:1] == [1] else None

    def _find_template(self, configured, override: str | None) -> jinja2.Template | None:
        """The override, else chat_template.jinja with its named companions, else what is `configured`."""
        if override and Path(override).is_file():
            return _compile_template(_read_text(Path(override)), override)
        where = self.folder / "chat_template.jinja"
        if where.is_file():
            companions = self.folder.glob("additional_chat_templates/*.jinja")
            named = {file.stem: _read_text(file) for file in companions} | {"default": _read_text(where)}
        else:
            where = self.folder / "tokenizer_config.json"
            if isinstance(configured, str):
                configured = [{"name": "default", "template": configured}]
            named = {entry["name"]: entry["template"] for entry in configured or []}
        name = override or "default"
        if name in named:
            return _compile_template(named[name], f"{where} ({name})")
        listed = ", ".join(sorted(named)) or "none"
        if override:
            raise UserError(f"--chat_template {override}: no file, nor a template in {where} (has: {listed})")
        if named:
            raise UserError(f"{where} has several chat templates: name one with --chat_template ({listed})")
        return None

    def render(self, messages: list[dict], **template_kwargs) -> str:
        """The text of `messages` up to where the answer starts; template_kwargs go to the template.

        Without a template: the contents with blank lines between them. Raises UserError when the template
        refuses the messages. Templates that print today's date (Llama 3.2) take `date_string` to pin it.
        """
        if self._template is None:
            return "\n\n".join(message["content"] for message in messages)
        # None for tools and documents: templates ask `is not none`, which is true of an undefined name.
        names = {"tools": None, "documents": None, "add_generation_prompt": True, "messages": messages}
        try:
            return self._template.render(self._special | names | template_kwargs)
        except Exception as error:  # its raise_exception, or whatever its code makes of these messages
            raise UserError(f"the chat template of {self.folder} refuses these messages: {error}") from error

    def encode(self, prompt: str | list[dict], **template_kwargs) -> list[int]:
        """Token ids of a text as it is, or of messages rendered. Raises UserError for what has no tokens.

        A BOS comes first, once, where the model has one: the template and the post-processor may both write
        it, or only one of them. Nothing is appended, whatever the post-processor says.
        """
        text = prompt if isinstance(prompt, str) else self.render(prompt, **template_kwargs)
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        except Exception as error:  # a character outside the vocabulary, or half of a surrogate pair
            raise UserError(f"the tokenizer of {self.folder} cannot encode {text[:60]!r} ({error})") from None
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token_ids, special tokens skipped."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


class _GenerationTag(Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for other trainers; here it renders."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _compile_template(source: str, where: str) -> jinja2.Template:
    """With the settings and helpers of transformers, for which templates are written."""

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, **options):  # jinja's own writes < > & ' as \u escapes, for HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    # Sandboxed: a template is code that came with somebody's weights.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{where}, line {error.lineno}: not a jinja template: {error.message}; "
                        "--chat_template FILE gives another") from None


def write_digits_tokenizer(folder) -> None:
    """Write the built-in tiny model's tokenizer: one token a character, "0".."9", "+", "=", <eos>, <pad>.

    tokenizer.json, tokenizer_config.json and generation_config.json; no chat template. No other character can
    be encoded, so that a prompt meant for a real model is refused and not mangled.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate([*"0123456789+=", "<eos>", "<pad>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()  # the default puts spaces between tokens
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    generation = {"eos_token_id": vocab["<eos>"], "pad_token_id": vocab["<pad>"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


# ------------------------------------------------------------------------------------------------ the prompts


@dataclass(frozen=True)
class Prompt:
    """One prompt, encoded."""

    prompt: str | list[dict]  # what reward functions see: text, or messages
    token_ids: list[int]
    columns: dict[str, object]  # every other column of the row; the gold answer, or None, is under "answer"


@dataclass
class PromptSet:
    """What load_prompts returns."""

    train: list[Prompt]
    held_out: list[Prompt]  # filled by the built-in tasks; empty for files
    notes: list[str]  # lines for the console
    fingerprint: str  # sha256 over what was read: tells at resume that the data changed


def load_prompts(source: str, tokenizer: Tokenizer, *, max_prompt_length: int,
                 system_prompt: str | None = None, prompt_column: str | None = None,
                 answer_column: str | None = None) -> PromptSet:
    """Read and encode the prompts of a built-in task ("digits", "sums") or of a file.

    source: the task's name, or the path of a .jsonl, .json, .csv or .parquet file.
    max_prompt_length: tokens; longer prompts are dropped and counted in the notes.
    system_prompt: put before prompts without a system message of their own; plain text becomes messages.
    prompt_column, answer_column: instead of those recognised; "a.b" is field b of the objects in column a.
    Raises UserError with file and line for what cannot be read or encoded, and when no prompt is left.
    """
    rows, fingerprint = _built_in_rows(source) if source in BUILT_IN else _read_rows(Path(source))
    prompt_column, answer_columns = _choose_columns(source, rows, prompt_column, answer_column)
    names = dict.fromkeys(name for _, row in rows for name in row if name != prompt_column or name == "nums")
    prompts, golds = [], []
    for where, row in rows:
        try:
            prompt, reply, row = _prompt_of(row, prompt_column, system_prompt)
            token_ids = tokenizer.encode(prompt)
        except UserError as error:
            raise UserError(f"{source}, {where}: {error}") from error
        if len(token_ids) > max_prompt_length:
            continue
        found = next((name for name in answer_columns if _field(row, name) is not None), None)
        gold = _field(row, found) if found else reply
        golds.append((where, found or "the last reply", gold))
        # Every row gets every column, as in a table: a reward function may name any of them as a parameter.
        columns = {name: row.get(name) for name in names}
        prompts.append(Prompt(prompt, token_ids, {**columns, "answer": gold}))
    dropped = len(rows) - len(prompts)
    if not prompts or dropped and source in BUILT_IN:  # a task's split must not depend on the limit
        raise UserError(f"{source}: {dropped} of {len(rows)} prompts are longer than --max_prompt_length "
                        f"{max_prompt_length}; raise it")
    notes = _notes(prompts, golds, prompt_column)
    if dropped:
        notes.append(f"{dropped} prompts longer than {max_prompt_length} tokens dropped")
    if tokenizer.has_chat_template and isinstance(prompts[0].prompt, str):
        notes.append("prompts are plain text: no chat template (messages or --system_prompt would use it)")
    if source == "digits":  # a hundred sums are all there is: evaluated on what it is trained on
        return PromptSet(prompts, prompts, notes, fingerprint)
    held_out = 512 if source == "sums" else 0
    return PromptSet(prompts[held_out:], prompts[:held_out], notes, fingerprint)


def _built_in_rows(task: str) -> tuple[list[tuple[str, dict]], str]:
    """What _read_rows returns for a file."""
    if task == "digits":
        table = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    else:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(0).shuffle(pairs)
        table = [{"question": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
                 for a, b in pairs]
    rows = [(f"prompt {n}", row) for n, row in enumerate(table, start=1)]
    return rows, hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _choose_columns(source: str, rows: list, prompt_column, answer_column) -> tuple[str, tuple[str, ...]]:
    """The prompts' column ("nums" stands for Countdown), and where to look for the gold answer, in order."""
    columns = set().union(*(row for _, row in rows))
    listed = "its columns: " + ", ".join(sorted(columns))
    for flag, name in ("--prompt_column", prompt_column), ("--answer_column", answer_column):
        if name and all(_field(row, name) is None for _, row in rows):
            raise UserError(f"{source}: {flag} {name!r} is not there, or null in every row ({listed})")
    countdown = ("nums",) if "target" in columns else ()
    found = prompt_column or next((name for name in PROMPT_COLUMNS + countdown if name in columns), None)
    if found is None:
        raise UserError(f"{source}: no column with prompts ({listed}). Recognised are "
                        f"{', '.join(PROMPT_COLUMNS)}, and nums with target; --prompt_column names another")
    return found, (answer_column,) if answer_column else ANSWER_COLUMNS


def _field(row: dict, name: str):
    """row["a"]["b"] for "a.b"; None where there is nothing."""
    if name in row:
        return row[name]
    for part in name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _prompt_of(row: dict, column: str, system_prompt: str | None) -> tuple:
    """(prompt, the assistant's reply where a whole conversation was given, the row as rewards get it)."""
    value, row = _countdown(row) if column == "nums" else (_field(row, column), row)
    if value is None or value == [] or isinstance(value, str) and not value.strip():
        raise UserError(f"{column!r} is missing or empty: fill it in or remove the row")
    if isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""", value):
        try:
            value = json.loads(value)
        except ValueError:  # Python's own notation, as pandas writes it into .csv
            raise UserError(f"{column!r} holds messages, but not as JSON: {value[:60]}") from None
    if isinstance(value, str):
        if column == "prompt" and not system_prompt:
            return value, None, row
        value = [{"role": "user", "content": value}]
    for message in value if isinstance(value, list) else [value]:
        parts = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None,)
        if not all(isinstance(part, str) for part in parts):
            raise UserError(f'{column!r} must be text or a list of {{"role": …, "content": text}}, not '
                            f"{json.dumps(message)[:80]}")
    # Parquet gives every message every field, but templates ask `'tool_calls' in message`: drop null ones.
    messages = [{key: field for key, field in message.items() if field is not None} for message in value]
    ends_with_reply = column == "messages" and messages[-1]["role"] == "assistant"
    reply = messages.pop()["content"] if ends_with_reply else None
    if not messages or messages[-1]["role"] == "assistant":
        raise UserError(f"{column!r} ends with the assistant's turn: end it with the user's")
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages, reply, row


def _countdown(row: dict) -> tuple[str, dict]:
    """The question, and the row with numbers where .csv has text."""
    try:
        nums, target = (json.loads(v) if isinstance(v, str) else v for v in (row["nums"], row["target"]))
        if not nums or not all(isinstance(n, (int, float)) for n in [*nums, target]):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise UserError("'nums' must be a list of numbers and 'target' a number: [3, 5, 7] and 22") from None
    question = (f"Using each of the numbers {', '.join(map(str, nums))} exactly once, with + - * / and "
                f"parentheses, write an expression that equals {target}. Put it into <answer> </answer>.")
    return question, {**row, "nums": nums, "target": target}


def _notes(prompts: list[Prompt], golds: list, prompt_column: str) -> list[str]:
    """What the person who started the run should know about the file; golds: [(where, column, gold), …]."""
    used = dict.fromkeys(found for _, found, gold in golds if gold is not None)
    from_columns = " or ".join(map(repr, used)) or "nowhere (--answer_column names their column)"
    notes = [f"{len(prompts)} prompts from {prompt_column!r}, gold answers from {from_columns}"]
    if repeated := len(prompts) - len({json.dumps(p.prompt) for p in prompts}):
        notes.append(f"{repeated} duplicate prompts kept")
    gsm8k = any(isinstance(gold, str) and "####" in gold for _, _, gold in golds)
    broken = [where for where, found, gold in golds
              if not _looks_parseable(gold, gsm8k, boxed=(prompt_column, found) == ("problem", "solution"))]
    if used and broken:
        notes.append(f"{len(broken)} gold answers cannot be parsed: no completion can match them (kept; the "
                     f"first is in {broken[0]})")
    return notes


def _looks_parseable(gold, gsm8k: bool, boxed: bool) -> bool:
    """A first look at a gold answer in the shape that its file has; the reward function parses for itself."""
    if not isinstance(gold, str):
        return gold is not None and gold == gold  # NaN: how tables write a missing number
    if gsm8k:
        return re.search(r"####[^\d\n]*\d", gold) is not None
    if boxed:
        return re.search(r"\\(boxed|fbox)\s*(\{\s*[^\s}]|[^\s{])", gold) is not None
    return bool(gold.strip())


# ---------------------------------------------------------------------------------------------- reading files


def _read_rows(path: Path) -> tuple[list[tuple[str, dict]], str]:
    """([("line 1", row), …], sha256 of the file)."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES or not path.is_file():
        raise UserError(f"{path}: not a built-in task ({', '.join(BUILT_IN)}), nor a file that is there and "
                        f"ends in {', '.join(SUFFIXES)}; give --data or --eval_data one of these")
    raw = path.read_bytes()
    read = {".csv": _read_csv, ".parquet": _read_parquet}.get(suffix, _read_json)
    rows = read(path, raw)
    if not rows:
        raise UserError(f"{path} holds no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{path}, {where}: a row must be an object {{…}}, not {json.dumps(row)[:60]}")
    return rows, hashlib.sha256(raw).hexdigest()


def _read_json(path: Path, raw: bytes) -> list[tuple[str, dict]]:
    """One object a line, which many files called .json hold too, or in .json one list of objects."""
    text = _decode(path, raw)
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        return [(f"row {n}", row) for n, row in enumerate(_parse_json(path, text), start=1)]
    # Not splitlines(): it also splits at U+2028 and its like, which JSON allows inside a string.
    lines = enumerate(text.split("\n"), start=1)
    return [(f"line {n}", _parse_json(path, line, n)) for n, line in lines if line.strip()]


def _read_csv(path: Path, raw: bytes) -> list[tuple[str, dict]]:
    reader = csv.reader(io.StringIO(_decode(path, raw), newline=""), strict=True)
    filled = (fields for fields in reader if fields)
    rows = []
    try:
        header = next(filled, [])
        for fields in filled:
            if len(fields) > len(header):
                raise UserError(f"{path}, line {reader.line_num}: {len(fields)} fields, but the header names "
                                f"{len(header)} columns; quote fields that hold commas")
            rows.append((f"line {reader.line_num}", dict(zip(header, fields))))
    except csv.Error as error:  # at a quote that never closes the reader has run to the end of the file
        raise UserError(f"{path}, after {rows[-1][0] if rows else 'the header'}: {error}") from None
    return rows


def _read_parquet(path: Path, raw: bytes) -> list[tuple[str, dict]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(raw)).to_pylist()
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
    # Through JSON, so that dates and the like are text from here on: rewards are scored in other processes.
    return [(f"row {n}", json.loads(json.dumps(row, default=str))) for n, row in enumerate(rows, start=1)]


def _decode(path: Path, raw: bytes) -> str:
    """UTF-8 with or without a byte order mark."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[:error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None


def _parse_json(path: Path, text: str, line: int | None = None):
    """line: where the text stands in its file; None when it is the whole file."""
    try:
        return json.loads(text)
    except ValueError as error:  # JSONDecodeError, or without a place for an integer of thousands of digits
        place = f"line {line or getattr(error, 'lineno', 1)}, column {getattr(error, 'colno', 1)}"
        raise UserError(f"{path}, {place}: broken JSON: {getattr(error, 'msg', error)}") from None


def _read_text(path: Path) -> str:
    return _decode(path, path.read_bytes())


def _read_config(path: Path) -> dict:
    """A JSON object beside the weights; {} when there is none."""
    return _parse_json(path, _read_text(path)) if path.is_file() else {}


# -------------------------------------------------------------------------------------------- order and seeds


def prompt_indices(step: int, prompts_per_step: int, size: int, seed: int) -> list[int]:
    """Indices into `size` prompts for a step: positions [step·P, (step+1)·P) of the concatenated epochs.

    Every epoch is a permutation of all prompts, so data smaller than a step wraps and no prompt is dropped.
    The order depends on nothing but the arguments: not on the number of ranks, nor on earlier calls.
    """
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [_permutation(seed, position // size, size)[position % size] for position in positions]


@functools.lru_cache(maxsize=2)  # a step at the seam of two epochs needs both
def _permutation(seed: int, epoch: int, size: int) -> list[int]:
    """Sorted by hash, not shuffled by a generator: the same in every Python version, and no state to save."""
    return sorted(range(size), key=lambda i: _hash62("order", seed, epoch, i))


def sample_seed(seed: int, step: int, round: int, slot: int) -> int:
    """The sampling seed, in 62 bits, of the prompt at index `slot` of a step's global batch.

    round: counts the generations within a step. 62 bits leave room under int64's limit for the index of the
    sample, which vLLM adds.
    """
    return _hash62("sample", seed, step, round, slot)


def _hash62(*parts) -> int:
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
