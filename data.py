"""Prompts for GRPO: rows of a file, the tokenizer, its chat template, and an order that never changes.

    from pathlib import Path
    from data import Tokenizer, load_prompts, prompt_indices

    Path("sums.jsonl").write_text('{"question": "7 + 5?", "answer": "12"}')
    tokenizer = Tokenizer("model")  # a Hugging Face folder
    data = load_prompts("sums.jsonl", tokenizer, max_prompt_length=512)
    for i in prompt_indices(step=0, prompts_per_step=4, size=len(data.train), seed=0):
        prompt = data.train[i]
        print(prompt.token_ids, prompt.columns["answer"])
    assert tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == tokenizer.render(prompt.prompt)

Works when copied alone (standard library, tokenizers, jinja2; pyarrow only to read .parquet).

Left out, and why:
1. Hub data sets and streaming: prompts are small beside completions; a file is read whole and encoded once.
2. transformers' tokenizer classes: some override tokenizer.json, which here is followed to the letter.
3. Tools, images, and prompts that end inside the assistant's turn: the trainer has no use for them.
"""
import contextlib
import csv
import functools
import hashlib
import io
import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2.meta
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Where prompts and gold answers are looked for, in this order: the columns of TRL and verl, of conversations,
# of GSM8K, of MATH and of Countdown. Text in "prompt" is encoded as it is; in any other column it is a
# question and becomes a user message.
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem", "nums")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "solution", "ground_truth", "target")
COUNTDOWN = (
    "Using each of the numbers {} exactly once, with + - * / and parentheses, write an expression that "
    "equals {}. Put it into <answer> </answer>.")


# ---- Prompts from rows -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Prompt:
    prompt: str | list[dict]  # what reward functions see: text, or messages
    token_ids: list[int]
    columns: dict[str, object]  # every other column of the row; "answer" holds the gold answer, or None


@dataclass
class PromptSet:
    train: list[Prompt]
    held_out: list[Prompt]  # for evaluation; empty unless load_prompts was told how many
    notes: list[str]  # lines for the console
    fingerprint: str  # sha256 of prompts and columns, by which a resumed run sees that its data changed


def load_prompts(
    source,
    tokenizer,
    *,
    max_prompt_length,
    system_prompt="",
    prompt_column="",
    answer_column="",
    rows=None,
    held_out=0,
) -> PromptSet:
    """Reads and encodes the prompts of the file `source`, or those of `rows`, which `source` then only names.

    Prompts of more than max_prompt_length tokens are dropped. system_prompt is put before prompts that have
    no system message; plain text then becomes messages. prompt_column and answer_column replace the columns
    that are looked for; "a.b" is field b of the objects in column a. The first held_out prompts are not
    trained on, unless there are no others. Raises ValueError, which names the line, for what is no prompt.
    """
    table = read_rows(Path(source)) if rows is None else numbered("prompt", rows)
    prompt_column = choose_column(table, "prompt", [prompt_column] if prompt_column else PROMPT_COLUMNS)
    answer_columns = ANSWER_COLUMNS
    if answer_column:
        answer_columns = [choose_column(table, "answer", [answer_column])]
    # Every prompt gets every column, as in a table: a reward function may name any of them as a parameter.
    names = column_names(table.values())
    if prompt_column != "nums":
        names.pop(prompt_column, None)
    prompts = []
    golds = {}
    for place, row in table.items():
        with naming(f"{source}, {place}"):
            if prompt_column == "nums":
                row = parse_countdown(row)
            prompt = read_prompt(row, prompt_column, system_prompt)
            token_ids = tokenizer.encode(prompt)  # one by one, 0.2 ms each: what fails names its row
            if not token_ids:
                raise ValueError("the prompt has no tokens: a chat template leaves it out?")
        if len(token_ids) <= max_prompt_length:
            columns = {name: row.get(name) for name in names}
            gold_column, gold = find_gold(row, answer_columns)
            columns["answer"] = gold
            golds[place] = (gold_column, gold)
            prompts.append(Prompt(prompt, token_ids, columns))

    dropped = len(table) - len(prompts)
    if not prompts or dropped and held_out:  # what is held out must not depend on the limit
        raise ValueError(
            f"{dropped} of {len(table)} prompts are longer than --max_prompt_length {max_prompt_length}; "
            "raise it")
    notes = describe(prompts, golds, prompt_column)
    if dropped:
        notes.append(f"{dropped} prompts longer than {max_prompt_length} tokens dropped")
    if tokenizer.has_chat_template and isinstance(prompts[0].prompt, str):
        notes.append("prompts are plain text: no chat template (messages or --system_prompt would use it)")
    # Not of the token ids: a chat template that prints the date makes others on another day.
    fingerprint = sha256([[p.prompt, p.columns] for p in prompts])
    return PromptSet(prompts[held_out:] or prompts, prompts[:held_out], notes, fingerprint)


def concatenate(sources, sets) -> PromptSet:
    """One set of several, in the order given; sources: their names. A single one is returned as it is.

    A column that only some of the sources have is None in the others' prompts.
    """
    if len(sets) == 1:
        return sets[0]
    # The prompts of a set have the same columns.
    names = column_names(some.train[0].columns for some in sets)
    train = []
    held_out = []
    notes = []
    for source, some in zip(sources, sets):
        train += [replace(p, columns=names | p.columns) for p in some.train]
        held_out += [replace(p, columns=names | p.columns) for p in some.held_out]
        notes += [f"{source}: {note}" for note in some.notes]
    return PromptSet(train, held_out, notes, sha256([some.fingerprint for some in sets]))


def sha256(value):
    text = json.dumps(value, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def column_names(rows):
    """{column: None, …} of all rows, in the order in which they appear."""
    names = {}
    for row in rows:
        names.update(dict.fromkeys(row))
    return names


@contextlib.contextmanager
def naming(place):
    """Puts the place that is being read before the message of whatever goes wrong there."""
    try:
        yield
    except Exception as error:  # json, jinja, tokenizers and Python itself may fail, on any input
        if isinstance(error, jinja2.TemplateSyntaxError):  # its message omits the line
            place = f"{place}, line {error.lineno}"
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise ValueError(f"{place}: {kind}{error}") from error


def choose_column(table, kind, wanted):
    """The first of the wanted columns in which any row holds something. kind: "prompt" or "answer"."""
    for name in wanted:
        if any(find_field(row, name) is not None for row in table.values()):
            return name
    looked_for = " or ".join(map(repr, wanted))
    listed = ", ".join(sorted(column_names(table.values()))) or "none"
    raise ValueError(f"no {kind}s in {looked_for} (its columns: {listed}): --{kind}_column names another")


def find_field(row, name):
    """row["a"]["b"] for "a.b", unless a column is called "a.b"; None where there is nothing."""
    value = row
    for key in [name] if name in row else name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def parse_countdown(row):
    """The row of a Countdown file with numbers, with which the reward calculates, where .csv has text."""
    with naming("'nums' must be integers in a list, 'target' an integer"):
        nums = json.loads(str(row["nums"]))
        target = json.loads(str(row["target"]))
        if not nums or set(map(type, [*nums, target])) != {int}:
            raise ValueError(f"not {nums} and {target}")
    return row | {"nums": nums, "target": target}


def read_prompt(row, column, system_prompt):
    """The prompt of a row: text only where column "prompt" holds text and there is no system prompt."""
    value = find_field(row, column)
    if column == "nums":
        value = COUNTDOWN.format(", ".join(map(str, value)), row["target"])
    if not value or not str(value).strip():
        raise ValueError(f"{column!r} is missing or empty: fill it in or remove the row")
    if isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""", value):
        value = json.loads(value)  # messages, as .csv has them
    if isinstance(value, str):
        if column == "prompt" and not system_prompt:
            return value
        value = {"role": "user", "content": value}
    messages = check_messages(value if isinstance(value, list) else [value], column)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def check_messages(turns, column):
    """The messages without null fields, and without the reply that ends a conversation in "messages"."""
    messages = []
    for turn in turns:
        match turn:
            case {"role": str(), "content": str()}:
                # Parquet gives every message every field, if only null; templates ask
                # `'tool_calls' in message`.
                messages.append({key: value for key, value in turn.items() if value is not None})
            case _:
                raise ValueError(
                    f'{column!r} must be text or a list of {{"role": …, "content": text}}, not '
                    f"{json.dumps(turn)[:80]}")
    if column == "messages" and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "assistant":
        raise ValueError(f"{column!r} ends with the assistant's turn: end it with the user's")
    return messages


def find_gold(row, columns):
    """(column, gold answer) of the first of the columns that has one, (None, None) if none does."""
    for name in columns:
        answer = find_field(row, name)
        if answer is not None:
            return name, answer
    return None, None


def describe(prompts, golds, prompt_column) -> list[str]:
    """What the person who started the run should know about the data. golds: {place: (column, answer)}."""
    used = dict.fromkeys(column for column, _ in golds.values() if column)
    from_columns = " or ".join(map(repr, used)) or "nowhere (--answer_column names their column)"
    notes = [f"{len(prompts)} prompts from {prompt_column!r}, gold answers from {from_columns}"]
    repeated = len(prompts) - len({json.dumps(p.prompt) for p in prompts})
    if repeated:
        notes.append(f"{repeated} duplicate prompts kept")
    broken = unparseable(golds, prompt_column)
    if used and broken:
        notes.append(
            f"{len(broken)} gold answers cannot be parsed: no completion can match them (kept; the first is "
            f"in {broken[0]})")
    return notes


def unparseable(golds, prompt_column):
    """Where gold answers lack the shape of their file's kind. The reward functions parse for themselves."""
    gsm8k = any("####" in str(answer) for _, answer in golds.values())
    places = []
    for place, (column, answer) in golds.items():
        shape = r"\S"
        if gsm8k:
            shape = r"####[^\d\n]*\d|^\D*\d[\d.,]*\D*$"  # or, without the mark, one number
        elif (prompt_column, column) == ("problem", "solution"):  # MATH
            shape = r"\\(boxed|fbox)\s*(\{\s*[^\s}]|[^\s{])"
        missing = answer is None or answer != answer  # only NaN differs from itself
        if missing or not re.search(shape, str(answer)):
            places.append(place)
    return places


# ---- Reading files -----------------------------------------------------------------------------------------

def read_rows(path):
    """{place: row} of a file. Messages name the place: "line 3" or "row 3"."""
    readers = {".jsonl": read_json, ".json": read_json, ".csv": read_csv, ".parquet": read_parquet}
    with naming(f"the name of a file with prompts ends in {', '.join(readers)}"):
        read = readers[path.suffix.lower()]
    return read(path)


def numbered(kind, rows):
    """{"row 1": …, "row 2": …} for the kind "row"."""
    return {f"{kind} {number}": row for number, row in enumerate(rows, start=1)}


def read_json(path):
    """Lines of JSON, or one list, whose elements are then read as if each were a line."""
    text = read_text(path)
    # Not splitlines(): it also cuts at U+2028 and the like, which JSON allows inside a string.
    lines = numbered("line", text.split("\n"))
    if text.lstrip().startswith("["):
        lines = numbered("row", map(json.dumps, json.loads(text)))
    rows = {}
    for place, line in lines.items():
        if line.strip():
            with naming(f"{path}, {place}"):
                rows[place] = parse_object(line)
    return rows


def parse_object(text):
    """The JSON object {…} in a text; a TypeError for other JSON."""
    return {**json.loads(text)}


def read_csv(path):
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    header = []
    rows = {}
    while True:
        place = f"line {reader.line_num + 1}"  # where the next record begins; it may span several
        with naming(f"{path}, {place}"):
            fields = next(reader, None)
            if fields is None:
                return rows
            if header and len(fields) > len(header):
                raise ValueError(f"more fields than the header's {len(header)}: quote those that hold commas")
        if not header:
            header = fields
        elif fields:  # blank lines have none
            rows[place] = dict(zip(header, fields))


def read_parquet(path):
    import pyarrow.parquet
    file = io.BytesIO(path.read_bytes())  # of a path, pyarrow would take folders named a=b for columns
    table = pyarrow.parquet.read_table(file).to_pylist()
    # Dates and the like become text, because rewards are scored in other processes, which get JSON.
    return numbered("row", json.loads(json.dumps(table, default=str)))


def read_text(path):
    """UTF-8 with or without a byte order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 text: {error}") from error


# ---- The tokenizer and the chat template -------------------------------------------------------------------

class Tokenizer:
    """The tokenizer.json, special tokens, EOS ids and chat template of a Hugging Face folder.

    chat_template: the path of a jinja file to use instead of the model's template, or the name of one of
    them where the model has several. chat_template_kwargs: a JSON object with keywords for the template.
    Raises ValueError for files that are missing or broken, and for keywords that the template does not
    mention.
    """

    def __init__(self, folder, chat_template="", chat_template_kwargs=""):
        self.folder = Path(folder)
        self.file = self.folder / "tokenizer.json"
        with naming(self.file):
            self.backend = tokenizers.Tokenizer.from_file(str(self.file))
        # The file may ask for padding or truncation, which would silently change the prompts.
        self.backend.no_padding()
        self.backend.no_truncation()
        config = self._read("tokenizer_config.json")
        self.special = self._read_special_tokens(config)
        self.eos_token_ids = self._find_eos()
        self.bos_token_ids = self._find_bos(config.get("add_bos_token"))
        with naming(f"--chat_template_kwargs {chat_template_kwargs[:80]}"):
            keywords = parse_object(chat_template_kwargs or "{}")
        self.template_place, source = find_template(self.folder, config.get("chat_template"), chat_template)
        with naming(self.template_place):
            self.template = compile_template(source, self.special, keywords)
        self.has_chat_template = source != WITHOUT_TEMPLATE

    def _read(self, name):
        """The JSON object in a file of the folder; {} where there is no such file."""
        path = self.folder / name
        if not path.is_file():
            return {}
        with naming(path):
            return parse_object(read_text(path))

    def _read_special_tokens(self, config):
        """{"eos_token": text, …}, as templates name them."""
        special = {}
        written = self._read("special_tokens_map.json") | config
        for name, token in written.items():
            if isinstance(token, dict):  # a token with its properties
                token = token.get("content")
            if name.endswith("_token") and isinstance(token, str):
                special[name] = token
        return special

    def _special_id(self, name) -> list[int]:
        """[id of the special token], or [] where the tokenizer has none of that name."""
        found = self.backend.token_to_id(self.special.get(name, ""))
        return [] if found is None else [found]

    def _find_eos(self):
        """Sorted ids: those of generation_config.json, or else of config.json, and the tokenizer's own.

        Chat models end their turn with the tokenizer's, and some configs name only that of the base model.
        """
        ids = []
        for name in "config.json", "generation_config.json":  # the second is preferred
            found = self._read(name).get("eos_token_id")
            if found is not None:
                ids = found if isinstance(found, list) else [found]
        ids += self._special_id("eos_token")
        if not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise ValueError(
                f"{self.folder}: {ids} are no ids of EOS tokens: correct eos_token_id in "
                "generation_config.json or config.json")
        return sorted(set(ids))

    def _find_bos(self, add_bos_token):
        """[id of the token that every prompt begins with], or [] where prompts begin with none."""
        if add_bos_token is not None:
            return self._special_id("bos_token") if add_bos_token else []
        # Where tokenizer_config.json does not say, the tokenizer's post-processor decides. Encoding any text
        # shows whether it puts a token in front. EOS is a text that every tokenizer can encode.
        with naming(self.file):
            probe = self.backend.encode(self.backend.id_to_token(self.eos_token_ids[0]) or "")
        return probe.ids[:1] if probe.special_tokens_mask[:1] == [1] else []

    def render(self, prompt):
        """The text that the model sees: a text as it is, messages as the chat template writes them, up to
        where the answer starts. Raises ValueError for messages that the template refuses.
        """
        if isinstance(prompt, str):
            return prompt
        with naming(self.template_place):
            return self.template.render(messages=prompt)

    def encode(self, prompt) -> list[int]:
        """Token ids of a text or of messages.

        Raises ValueError for text that cannot be encoded: a character outside the vocabulary, or half of a
        surrogate pair.
        """
        text = self.render(prompt)
        with naming(f"{self.file} cannot encode {text[:60]!r}"):
            # Without special tokens, because EOS may be one of them, and the model has yet to answer.
            ids = self.backend.encode(text, add_special_tokens=False).ids
        # Exactly one BOS: a template may have written it already.
        bos = self.bos_token_ids
        return ids if ids[:1] == bos else bos + ids

    def decode(self, token_ids, skip_special_tokens=True):
        """The text of token_ids."""
        return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)


# Messages of a model that has no chat template: their contents, with empty lines between them.
WITHOUT_TEMPLATE = r"{{ messages | join('\n\n', attribute='content') }}"


def find_template(folder, configured, chosen) -> tuple[str, str]:
    """(where the chat template stands, its text).

    configured: the chat_template of tokenizer_config.json: a text, a list of {"name": …, "template": …}, or
    nothing. The folder's chat_template.jinja replaces it, and a chosen one replaces both.
    """
    place = f"{folder / 'tokenizer_config.json'}, chat_template"
    own = folder / "chat_template.jinja"
    if own.is_file() and not chosen:
        chosen = str(own)
    if not chosen and not configured:
        return place, WITHOUT_TEMPLATE
    named = {"default": configured}
    if isinstance(configured, list):
        with naming(place):
            named = {entry["name"]: entry["template"] for entry in configured}
    name = chosen or "default"
    if named.get(name):
        return place, named[name]
    with naming(f"--chat_template {name}"):
        return name, read_text(Path(name))


def compile_template(source, special, keywords):
    """Compiles with the settings and helpers of transformers, because templates are written for those.

    special: {"eos_token": text, …}. Raises ValueError for keywords that the template does not mention.
    """
    # Sandboxed: a template is code that came with somebody's weights.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals.update(
        special,
        tools=None,  # not undefined: templates ask `tools is not none`, which holds for an undefined name
        documents=None,
        add_generation_prompt=True,
        raise_exception=raise_exception,
        strftime_now=time.strftime)
    environment.filters["tojson"] = to_json
    template = environment.from_string(source, globals=keywords)
    accepted = jinja2.meta.find_undeclared_variables(environment.parse(source))
    accepted -= {"messages", *environment.globals}  # these are set here, not by the user
    unknown = keywords.keys() - accepted
    if unknown:  # jinja would ignore them silently
        takes = ", ".join(sorted(accepted)) or "none"
        raise ValueError(
            f"--chat_template_kwargs {min(unknown)!r}: the keywords of this template are {takes}")
    return template


def raise_exception(message):
    raise jinja2.TemplateError(message)


def to_json(value, ensure_ascii=False, **options):
    """As in transformers. jinja's own filter is for HTML: it escapes < > & '."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


# ---- Order and seeds ---------------------------------------------------------------------------------------

def prompt_indices(step, prompts_per_step, size, seed) -> list[int]:
    """The prompts of a step, as indices into all `size` of them: the next ones in the order of the epochs.

    Every epoch is a permutation of all prompts, and the epochs follow each other without a gap: a step may
    reach into the next one, or span several, and no prompt is dropped. The order depends on nothing but the
    arguments: not on the number of ranks, nor on earlier calls.
    """
    indices = []
    for position in range(step * prompts_per_step, (step + 1) * prompts_per_step):
        epoch, place = divmod(position, size)
        indices.append(permutation(seed, epoch, size)[place])
    return indices


@functools.lru_cache(maxsize=2)  # a step at the seam of two epochs needs both
def permutation(seed, epoch, size):
    """Sorted by hash: the same in every Python version, and without a random generator's state to save."""
    return sorted(range(size), key=lambda i: hash62("order", seed, epoch, i))


def sample_seed(seed, step, resampling_round, slot):
    """The seed, of 62 bits, for the completions of one prompt.

    slot: the prompt's index in the step's batch over all ranks. resampling_round: 0, or that of dynamic
    sampling.
    """
    return hash62("sample", seed, step, resampling_round, slot)


def hash62(*parts):
    text = " ".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2  # leaves room in int64: an engine adds the index of the sample
