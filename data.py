"""Prompts for GRPO: files and built-in tasks, chat templates, the tokenizer, and a deterministic order.

Works when copied alone (standard library, tokenizers, jinja2; pyarrow only to read .parquet):

    from data import Tokenizer, load_prompts, prompt_indices
    data = load_prompts("gsm8k.jsonl", Tokenizer("Qwen2.5-0.5B-Instruct"), max_prompt_length=512)
    for i in prompt_indices(step=0, prompts_per_step=16, size=len(data.train), seed=0):
        print(data.train[i].token_ids, data.train[i].columns["answer"])

Left out, and why:
1. Hub data sets and streaming: prompts are small beside completions; a file is read whole and encoded once.
2. transformers' tokenizer classes: some override tokenizer.json, which here is followed to the letter.
3. Tools, images, and prompts that end inside the assistant's turn: the trainer has no use for them.
"""
import csv
import functools
import hashlib
import io
import json
import os
import random
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
import jinja2.meta
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUILT_IN = {"digits": 100, "sums": 512}  # the built-in tasks, and how many prompts each holds out
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
# Where prompts are looked for, in this order: the columns of TRL and verl, of conversations, of GSM8K and of
# MATH; then Countdown's "nums" with "target". Text in "prompt" is encoded as it is; in any other column it is
# a question and becomes a user message.
PROMPT_COLUMNS = ("prompt", "messages", "question", "problem")
ANSWER_COLUMNS = ("answer", "reward_model.ground_truth", "solution", "ground_truth", "target")


class UserError(ValueError):
    """Something the person who started the run can fix: says what, where, and what to do."""


# ---- The tokenizer -----------------------------------------------------------------------------------------

class Tokenizer:
    """The tokenizer.json, special tokens, EOS ids and chat template of a Hugging Face folder.

    chat_template: the path of a jinja file to use instead of the model's template, or the name of one of
    them where the model has several. chat_template_kwargs: a JSON object with keywords for the template.
    Raises UserError when a file is missing or broken, and for keywords that the template does not mention.
    """

    def __init__(self, folder: str | Path, chat_template: str | None = None, chat_template_kwargs: str = ""):
        self.folder = Path(folder)
        self._tokenizer = self._load_tokenizer()
        model, generation, special, config = (_read_object(self.folder / f"{name}.json") for name in (
            "config", "generation_config", "special_tokens_map", "tokenizer_config"))
        # A special token is written as text, or as an object with its text under "content".
        tokens = {name: token.get("content") if isinstance(token, dict) else token
                  for name, token in {**special, **config}.items() if name.endswith("_token")}
        self._special = {name: token for name, token in tokens.items() if isinstance(token, str)}
        self.eos_token_ids = self._find_eos(generation, model)
        self._bos = self._find_bos(config.get("add_bos_token"))
        keywords = _parse_keywords(chat_template_kwargs)
        self._template = self._load_template(config.get("chat_template"), chat_template, keywords)

    def _load_tokenizer(self) -> tokenizers.Tokenizer:
        file = self.folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{file} is missing: --model needs a Hugging Face folder with a tokenizer.json")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{file} cannot be read ({error}): fetch the model again") from None
        # The file may ask for padding or truncation, which would silently change the prompts.
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def _find_eos(self, generation: dict, model: dict) -> list[int]:
        """Sorted ids: those of generation_config.json, or else of config.json, and the tokenizer's own.

        Chat models end their turn with the tokenizer's, and some configs name only that of the base model.
        """
        ids = next((c["eos_token_id"] for c in (generation, model) if c.get("eos_token_id") is not None), [])
        ids = ids if isinstance(ids, list) else [ids]
        own = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        if own is not None:
            ids = [*ids, own]
        if wrong := [i for i in ids if type(i) is not int or not 0 <= i < 2**31]:
            raise UserError(f"{self.folder}: eos_token_id {wrong[0]!r} in generation_config.json or "
                            "config.json is no token id: correct it")
        if not ids:
            raise UserError(f"{self.folder} names no EOS token: put eos_token_id into generation_config.json")
        return sorted(set(ids))

    def _find_bos(self, add_bos_token: bool | None) -> list[int]:
        """[id of the token that every prompt begins with], or [] where prompts begin with none."""
        if add_bos_token is False:
            return []
        if add_bos_token is not None:
            bos = self._tokenizer.token_to_id(self._special.get("bos_token", ""))
            return [] if bos is None else [bos]
        # Where tokenizer_config.json does not say, the tokenizer's post-processor decides. Encoding any text
        # shows whether it puts a token in front. EOS is a text that every tokenizer can encode.
        try:
            probe = self._tokenizer.encode(self._tokenizer.id_to_token(self.eos_token_ids[0]) or "")
        except Exception as error:  # the library raises nothing more precise
            raise UserError(f"{self.folder / 'tokenizer.json'} cannot encode its EOS ({error}): "
                            "fetch the model again") from None
        return probe.ids[:1] if probe.special_tokens_mask[:1] == [1] else []

    def _load_template(self, configured, override: str | None, keywords: dict) -> jinja2.Template | None:
        """The template to use. configured: the chat_template of tokenizer_config.json."""
        file = Path(override) if override else self.folder / "chat_template.jinja"
        if file.is_file():
            return _compile_template(_read_text(file), str(file), self._special, keywords)
        where, name = self.folder / "tokenizer_config.json", override or "default"
        named = _named_templates(configured, where)
        if name in named:
            return _compile_template(named[name], f"{where} ({name})", self._special, keywords)
        if named or override:
            listed = ", ".join(sorted(named)) or "none"
            raise UserError(f"--chat_template {name}: no file, nor a template in {where} (has: {listed})")
        if keywords:
            raise UserError(f"--chat_template_kwargs: {self.folder} has no chat template: leave it away, or "
                            "give --chat_template FILE")
        return None

    @property
    def has_chat_template(self) -> bool:
        """Whether messages go through a template."""
        return self._template is not None

    def render(self, prompt: str | list[dict]) -> str:
        """The text that the model sees. A text stays as it is; messages go through the chat template, up to
        where the answer starts. Without a template their contents are joined by empty lines.

        Raises UserError for messages that the template refuses.
        """
        if isinstance(prompt, str):
            return prompt
        if self._template is None:
            return "\n\n".join(message["content"] for message in prompt)
        try:
            return self._template.render(messages=prompt)
        except Exception as error:  # the template called raise_exception, or its code fails on these messages
            raise UserError(f"the chat template of {self.folder} refuses these messages: {error}") from error

    def encode(self, prompt: str | list[dict]) -> list[int]:
        """Token ids of a text or of messages. Raises UserError for text that cannot be encoded."""
        return self.encode_texts([self.render(prompt)])[0]

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Token ids of many rendered prompts, encoded on all cores.

        Raises UserError when one of them cannot be encoded. The library does not say which; the message
        quotes the first, so only that of a single text names the culprit.
        """
        encoded = []
        try:
            for start in range(0, len(texts), 1000):  # in parts: the library's results take 100 bytes a token
                part = self._tokenizer.encode_batch_fast(texts[start:start + 1000], add_special_tokens=False)
                encoded += [encoding.ids for encoding in part]
        except Exception as error:  # a character outside the vocabulary, or half of a surrogate pair
            raise UserError(
                f"the tokenizer of {self.folder} cannot encode {texts[0][:60]!r} ({error})") from None
        # Exactly one BOS: a template may have written it already. The post-processor is switched off
        # (add_special_tokens=False), because it may also append EOS, and the model has yet to answer.
        return [ids if ids[:1] == self._bos else self._bos + ids for ids in encoded]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token_ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _parse_keywords(text: str) -> dict:
    """The value of --chat_template_kwargs."""
    try:
        keywords = json.loads(text or "{}")
    except (ValueError, RecursionError):
        keywords = None
    if not isinstance(keywords, dict):
        raise UserError(f"--chat_template_kwargs {text[:80]}: give a JSON object such as "
                        """'{"enable_thinking": false}'""")
    return keywords


def _named_templates(configured, where: Path) -> dict[str, str]:
    """{name: template} from the chat_template of tokenizer_config.json: a text, a list of them, or None."""
    if isinstance(configured, str):
        return {"default": configured}
    try:
        named = {str(entry["name"]): entry["template"] for entry in configured or []}
        if not all(isinstance(template, str) for template in named.values()):
            raise TypeError
    except (LookupError, TypeError):
        raise UserError(f"{where}: chat_template is neither text nor a list of {{name, template}}; "
                        "--chat_template FILE gives another") from None
    return named


def _compile_template(source: str, where: str, special: dict, keywords: dict) -> jinja2.Template:
    """Compiles with the settings and helpers of transformers, because templates are written for those.

    special: {"eos_token": text, …}. Raises UserError for a broken template and for unknown keywords.
    """
    def raise_exception(message):
        raise jinja2.TemplateError(message)

    # Sandboxed: a template is code that came with somebody's weights.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    # tools and documents must be None: templates ask `tools is not none`, which holds for an undefined name.
    environment.globals.update(special, tools=None, documents=None, add_generation_prompt=True,
                               raise_exception=raise_exception, strftime_now=time.strftime)
    environment.filters["tojson"] = (  # jinja's own writes < > & ' as \u escapes, for HTML
        lambda value, ensure_ascii=False, **options: json.dumps(value, ensure_ascii=ensure_ascii, **options))
    try:
        template = environment.from_string(source, globals=keywords)
        mentioned = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except Exception as error:  # a syntax error, or nesting too deep for jinja or for the Python it generates
        raise UserError(f"{where}, line {getattr(error, 'lineno', 1)}: not a jinja template: "
                        f"{getattr(error, 'message', error)}; --chat_template FILE gives another") from None
    accepted = mentioned - {"messages", *environment.globals}  # the latter are set here, not by the user
    if unknown := sorted(keywords.keys() - accepted):  # jinja would ignore them without a word
        takes = ", ".join(sorted(accepted)) or "none, leave the option away"
        raise UserError(f"--chat_template_kwargs {unknown[0]!r} is no keyword of {where}: it takes {takes}")
    return template


def write_digits_tokenizer(folder: str | Path) -> None:
    """Write the built-in tiny model's tokenizer: "0".."9", "+", "=", <eos>, <pad>; all else is refused."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: i for i, token in enumerate([*"0123456789+=", "<eos>", "<pad>"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()  # the default puts spaces between tokens
    tokenizer.add_special_tokens(["<eos>", "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


# ---- The prompts -------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Prompt:
    prompt: str | list[dict]  # what reward functions see: text, or messages
    token_ids: list[int]
    columns: dict[str, object]  # every other column of the row; "answer" holds the gold answer, or None


@dataclass
class PromptSet:
    train: list[Prompt]
    held_out: list[Prompt]  # filled by the built-in tasks; empty for files
    notes: list[str]  # lines for the console
    fingerprint: str  # sha256 of prompts and columns, by which a resumed run sees that its data changed


def load_data(sources: list[str], tokenizer: Tokenizer, **options) -> PromptSet:
    """The prompts of several sources as one list, in the order given; options: those of load_prompts.

    A column that only some of the sources have is None in the others' prompts.
    """
    sets = [load_prompts(source, tokenizer, **options) for source in sources]
    if len(sets) == 1:
        return sets[0]
    names = dict.fromkeys(name for s in sets for name in s.train[0].columns)  # prompts of a set have the same
    train = [replace(p, columns=names | p.columns) for s in sets for p in s.train]
    held_out = [replace(p, columns=names | p.columns) for s in sets for p in s.held_out]
    notes = [f"{source}: {note}" for source, s in zip(sources, sets) for note in s.notes]
    return PromptSet(train, held_out, notes, _sha256([s.fingerprint for s in sets]))


def load_prompts(source: str, tokenizer: Tokenizer, *, max_prompt_length: int,
                 system_prompt: str | None = None, prompt_column: str | None = None,
                 answer_column: str | None = None) -> PromptSet:
    """Read and encode the prompts of a built-in task ("digits", "sums") or of a file.

    Prompts of more than max_prompt_length tokens are dropped. system_prompt goes before prompts that have no
    system message; plain text then becomes messages. prompt_column and answer_column replace the columns
    that are looked for; "a.b" is field b of the objects in column a. Raises UserError with file and line.
    """
    rows = _built_in_rows(source) if source in BUILT_IN else _read_rows(Path(source))
    prompt_column = _choose_column(source, rows, prompt_column, answer_column)
    answer_columns = (answer_column,) if answer_column else ANSWER_COLUMNS
    # Every row gets every column, as in a table: a reward function may name any of them as a parameter.
    names = dict.fromkeys(name for _, row in rows for name in row if name != prompt_column or name == "nums")
    encoded = _encode_rows(source, rows, prompt_column, system_prompt, tokenizer)
    prompts, golds = [], []
    for (where, row), (prompt, token_ids) in zip(rows, encoded):
        if len(token_ids) <= max_prompt_length:
            column, gold = _find_gold(row, answer_columns)
            golds.append((where, column, gold))
            columns = {name: row.get(name) for name in names} | {"answer": gold}
            prompts.append(Prompt(prompt, token_ids, columns))
    dropped = len(rows) - len(prompts)
    if not prompts or dropped and source in BUILT_IN:  # what a task holds out must not depend on the limit
        raise UserError(f"{source}: {dropped} of {len(rows)} prompts are longer than --max_prompt_length "
                        f"{max_prompt_length}; raise it")
    notes = _notes(prompts, golds, prompt_column)
    if dropped:
        notes.append(f"{dropped} prompts longer than {max_prompt_length} tokens dropped")
    if tokenizer.has_chat_template and isinstance(prompts[0].prompt, str):
        notes.append("prompts are plain text: no chat template (messages or --system_prompt would use it)")
    # Not of the token ids: a chat template that prints the date makes others on another day.
    fingerprint = _sha256([[p.prompt, p.columns] for p in prompts])
    held_out = BUILT_IN.get(source, 0)
    train = prompts[held_out:] or prompts  # "digits" holds out all its prompts, and trains on the same ones
    return PromptSet(train, prompts[:held_out], notes, fingerprint)


def _sha256(value) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _built_in_rows(task: str) -> list[tuple[str, dict]]:
    if task == "digits":
        table = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    else:
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
        random.Random(0).shuffle(pairs)
        table = [{"question": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)}
                 for a, b in pairs]
    return [(f"prompt {n}", row) for n, row in enumerate(table, start=1)]


def _choose_column(source: str, rows: list, prompt_column: str | None, answer_column: str | None) -> str:
    """The column that holds the prompts; "nums" stands for Countdown. Checks both options."""
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
    return found


def _encode_rows(source: str, rows: list, column: str, system_prompt: str | None,
                 tokenizer: Tokenizer) -> list[tuple[str | list[dict], list[int]]]:
    """(prompt, token ids) of every row. Its errors name the row."""
    prompts, texts, encoded = [], [], []
    try:
        for where, row in rows:
            prompts.append(_prompt_of(row, column, system_prompt))
            texts.append(tokenizer.render(prompts[-1]))
        try:
            encoded = tokenizer.encode_texts(texts)
        except UserError:
            for (where, _), text in zip(rows, texts):  # again one by one, to find the row
                encoded.append(tokenizer.encode(text))
        for (where, _), token_ids in zip(rows, encoded):
            if not token_ids:
                raise UserError("the prompt has no tokens: a chat template leaves it out?")
    except UserError as error:
        raise UserError(f"{source}, {where}: {error}") from error
    return list(zip(prompts, encoded))


def _prompt_of(row: dict, column: str, system_prompt: str | None) -> str | list[dict]:
    """The prompt of a row: text only where column "prompt" holds text and no system prompt goes before it."""
    value = _countdown_question(row) if column == "nums" else _field(row, column)
    if value is None or value == [] or isinstance(value, str) and not value.strip():
        raise UserError(f"{column!r} is missing or empty: fill it in or remove the row")
    if isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""", value):
        value = _parse_json(f"{column!r} holds messages, but not as JSON", value)
    if isinstance(value, str):
        if column == "prompt" and not system_prompt:
            return value
        value = [{"role": "user", "content": value}]
    messages = _check_messages(value if isinstance(value, list) else [value], column)
    if system_prompt and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return messages


def _check_messages(turns: list, column: str) -> list[dict]:
    """The messages without null fields, and without the reply that ends a conversation in "messages"."""
    for turn in turns:
        if not isinstance(turn, dict) or {type(turn.get("role")), type(turn.get("content"))} != {str}:
            raise UserError(f'{column!r} must be text or a list of {{"role": …, "content": text}}, not '
                            f"{json.dumps(turn)[:80]}")
    # Parquet gives every message every field, if only null; templates ask `'tool_calls' in message`.
    messages = [{key: field for key, field in turn.items() if field is not None} for turn in turns]
    if column == "messages" and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] == "assistant":
        raise UserError(f"{column!r} ends with the assistant's turn: end it with the user's")
    return messages


def _countdown_question(row: dict) -> str:
    """The puzzle in words. In the row, numbers that .csv has as text become numbers, for the reward."""
    try:
        nums, target = (json.loads(v) if isinstance(v, str) else v for v in (row["nums"], row["target"]))
        if not nums or not all(type(n) is int for n in [*nums, target]):
            raise TypeError
    except (KeyError, TypeError, ValueError):
        raise UserError("'nums' must be integers in a list, 'target' an integer: [3, 5, 7] and 22") from None
    row.update(nums=nums, target=target)
    return (f"Using each of the numbers {', '.join(map(str, nums))} exactly once, with + - * / and "
            f"parentheses, write an expression that equals {target}. Put it into <answer> </answer>.")


def _find_gold(row: dict, columns: tuple[str, ...]) -> tuple[str | None, object]:
    """(column, gold answer) from the first of the columns that has one; (None, None) if none has."""
    for name in columns:
        if (gold := _field(row, name)) is not None:
            return name, gold
    return None, None


def _field(row: dict, name: str):
    """row["a"]["b"] for "a.b", unless a column is called "a.b"; None where there is nothing."""
    for part in [name] if name in row else name.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def _notes(prompts: list[Prompt], golds: list, prompt_column: str) -> list[str]:
    """What the person who started the run should know about the file; golds: [(where, column, gold), …]."""
    used = dict.fromkeys(column for _, column, _ in golds if column)
    from_columns = " or ".join(map(repr, used)) or "nowhere (--answer_column names their column)"
    notes = [f"{len(prompts)} prompts from {prompt_column!r}, gold answers from {from_columns}"]
    if repeated := len(prompts) - len({json.dumps(p.prompt) for p in prompts}):
        notes.append(f"{repeated} duplicate prompts kept")
    broken = _unparseable(golds, prompt_column)
    if used and broken:
        notes.append(f"{len(broken)} gold answers cannot be parsed: no completion can match them (kept; the "
                     f"first is in {broken[0]})")
    return notes


def _unparseable(golds: list, prompt_column: str) -> list[str]:
    """Where the gold answers stand that do not have the shape of their file's kind.

    Only a warning at the start; the reward functions parse for themselves.
    """
    gsm8k = any(isinstance(gold, str) and "####" in gold for _, _, gold in golds)
    broken = []
    for where, column, gold in golds:
        if gsm8k:
            shape = r"####[^\d\n]*\d|^\D*\d[\d.,]*\D*$"  # or, without the mark, one number
        elif (prompt_column, column) == ("problem", "solution"):  # MATH
            shape = r"\\(boxed|fbox)\s*(\{\s*[^\s}]|[^\s{])"
        else:
            shape = r"\S"
        missing = gold is None or gold != gold  # only NaN differs from itself
        if missing or isinstance(gold, str) and not re.search(shape, gold):
            broken.append(where)
    return broken


# ---- Reading files -----------------------------------------------------------------------------------------

def _read_rows(path: Path) -> list[tuple[str, dict]]:
    """[("line 1", row), …]: every row with the place that error messages name."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES or not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        raise UserError(f"{path}: not a built-in task ({', '.join(BUILT_IN)}), nor a file that is there and "
                        f"ends in {', '.join(SUFFIXES)}; give --data or --eval_data one of these")
    read = {".csv": _read_csv, ".parquet": _read_parquet}.get(suffix, _read_json)
    rows = read(path)
    if not rows:
        raise UserError(f"{path} holds no rows")
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(f"{path}, {where}: a row must be an object {{…}}, not {json.dumps(row)[:60]}")
    return rows


def _read_json(path: Path) -> list[tuple[str, object]]:
    """JSON lines, or the one list that a .json file may hold instead."""
    text = _read_text(path)
    if path.suffix.lower() == ".json" and text.lstrip().startswith("["):
        return [(f"row {n}", row) for n, row in enumerate(_parse_json(path, text), start=1)]
    # Not splitlines(): it also cuts at U+2028 and the like, which JSON allows inside a string.
    lines = enumerate(text.split("\n"), start=1)
    return [(f"line {n}", _parse_json(path, line, n)) for n, line in lines if line.strip()]


def _read_csv(path: Path) -> list[tuple[str, dict]]:
    reader = csv.reader(io.StringIO(_read_text(path), newline=""), strict=True)
    rows = []
    try:
        header = next(filter(None, reader), [])
        for fields in filter(None, reader):
            if len(fields) > len(header):
                raise UserError(f"{path}, line {reader.line_num}: {len(fields)} fields, but the header names "
                                f"{len(header)} columns; quote fields that hold commas")
            rows.append((f"line {reader.line_num}", dict(zip(header, fields))))
    except csv.Error as error:  # line_num would mislead: after an open quote it is the last line of the file
        raise UserError(f"{path}, after {rows[-1][0] if rows else 'the header'}: {error}") from None
    return rows


def _read_parquet(path: Path) -> list[tuple[str, dict]]:
    try:
        import pyarrow.parquet
        table = pyarrow.parquet.read_table(io.BytesIO(path.read_bytes())).to_pylist()
    except ImportError:
        raise UserError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a parquet file: {error}") from None
    # Dates and the like become text, because rewards are scored in other processes, which get JSON.
    table = json.loads(json.dumps(table, default=str))
    return [(f"row {n}", row) for n, row in enumerate(table, start=1)]


def _read_object(path: Path) -> dict:
    """The JSON object in a file of the model's folder; {} where there is no such file."""
    if not path.is_file():
        return {}
    value = _parse_json(path, _read_text(path))
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object {{…}}: fetch the model again")
    return value


def _read_text(path: Path) -> str:
    """UTF-8 with or without a byte order mark."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[:error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: not UTF-8 text; save the file as UTF-8") from None


def _parse_json(place: str | Path, text: str, line: int | None = None):
    """The value. place, line: where text stands, for the error; no line where text is a whole file."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # a number too long and nesting too deep have no lineno
        place = f"{place}, line {line or getattr(error, 'lineno', 1)}, column {getattr(error, 'colno', 1)}"
        raise UserError(f"{place}: broken JSON: {getattr(error, 'msg', error)}") from None


# ---- Order and seeds ---------------------------------------------------------------------------------------

def prompt_indices(step: int, prompts_per_step: int, size: int, seed: int) -> list[int]:
    """The prompts of a step, as indices into all `size` of them: the next P = prompts_per_step of the epochs.

    Every epoch is a permutation of all prompts, and the epochs follow each other without a gap: a step may
    reach into the next one, or span several, and no prompt is dropped. The order depends on nothing but the
    arguments: not on the number of ranks, nor on earlier calls.
    """
    positions = range(step * prompts_per_step, (step + 1) * prompts_per_step)
    return [_permutation(seed, position // size, size)[position % size] for position in positions]


@functools.lru_cache(maxsize=2)  # a step at the seam of two epochs needs both
def _permutation(seed: int, epoch: int, size: int) -> list[int]:
    """Sorted by hash: the same in every Python version, and without a random generator's state to save."""
    return sorted(range(size), key=lambda i: _hash62("order", seed, epoch, i))


def sample_seed(seed: int, step: int, round: int, slot: int) -> int:
    """The seed, of 62 bits, for the completions of one prompt.

    slot: the prompt's index in the step's batch over all ranks. round: 0, or the round of dynamic sampling.
    """
    return _hash62("sample", seed, step, round, slot)


def _hash62(*parts) -> int:
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2  # leaves room in int64: vLLM adds the index of the sample
