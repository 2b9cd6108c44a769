"""data.py against transformers (rendering, token ids) and against values worked out by hand (the rest)."""

import csv
import hashlib
import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import data
from data import Prompt, Tokenizer, concatenate, load_prompts, prompt_indices, sample_seed

TEMPLATES = Path(__file__).parent / "fixtures_data"
NAMES = ["qwen2_5", "qwen3", "llama3", "llama3_2", "smollm2", "deepseek_r1_distill"]
SPECIAL = ["<bos>", "<eos>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>",
           "<|start_header_id|>", "<|end_header_id|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
           "<｜User｜>", "<｜Assistant｜>"]
MODEL_TOKENS = {  # what each model's tokenizer_config.json says
    "qwen2_5": {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
    "qwen3": {"bos_token": None, "eos_token": "<|im_end|>", "add_bos_token": False},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama3_2": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "smollm2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"},
    "deepseek_r1_distill": {
        "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>", "lstrip": False,
                      "normalized": True, "rstrip": False, "single_word": False},
        "eos_token": "<｜end▁of▁sentence｜>", "add_bos_token": True},
}
CONVERSATIONS = [
    [{"role": "user", "content": "What is 25 + 60? Answer with just the number."}],
    [{"role": "system", "content": "  Be <b>brief</b> & 'kind'.\n"},
     {"role": "user", "content": "  hi\t\n\nüñ 你好 "}],
    [{"role": "user", "content": "one"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"},
     {"role": "user", "content": "three {{ messages }} {% raw %}"}],
]
CHATML = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.fixture(scope="session")
def bpe():
    """A byte-level BPE with a few hundred merges, and the special tokens of all the models."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["What is the answer to this question? Answer with just the number.", "assistant user system"] * 3,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                            special_tokens=SPECIAL, show_progress=False))
    return made.to_str()


@pytest.fixture
def make_folder(tmp_path, bpe):
    """make_folder(template=…, prefix=["<bos>"], suffix=[…], **files): a model folder without weights."""
    def make(template=None, prefix=(), suffix=(), settings=None, name="model", **files):
        folder = tmp_path / name
        folder.mkdir()
        made = tokenizers.Tokenizer.from_str(bpe)
        if prefix or suffix:
            made.post_processor = processors.TemplateProcessing(
                single=[*prefix, "$A", *suffix],
                special_tokens=[(t, made.token_to_id(t)) for t in [*prefix, *suffix]])
        made.save(str(folder / "tokenizer.json"))
        own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", **(settings or {})}
        if template is not None:
            own["chat_template"] = template
        for stem, content in {"tokenizer_config": own, **files}.items():
            (folder / f"{stem}.json").write_text(json.dumps(content), encoding="utf-8")
        return folder
    return make


@pytest.fixture
def chat(make_folder):
    return Tokenizer(make_folder(CHATML))


@pytest.fixture
def plain(make_folder):
    return Tokenizer(make_folder(name="plain"))


@pytest.fixture
def load(tmp_path, chat):
    """load(name, content, …): writes the file, loads it."""
    def load(name, content, tokenizer=None, max_prompt_length=200, **options):
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_prompts(str(path), tokenizer or chat, max_prompt_length=max_prompt_length, **options)
    return load


def user(text):
    return [{"role": "user", "content": text}]


def oracle(folder, messages, **options):
    """(text, ids) that transformers makes of the messages."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return text, tokenizer.apply_chat_template(messages, **options)


# -------------------------------------------------------------------------------------------------- templates


@pytest.mark.parametrize("name", NAMES)
def test_real_templates_render_as_in_transformers(make_folder, name):
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    prefix = {"llama": ["<|begin_of_text|>"], "deeps": ["<｜begin▁of▁sentence｜>"]}.get(name[:5], [])
    folder = make_folder(template, prefix=prefix, settings=MODEL_TOKENS[name])
    tokenizer = Tokenizer(folder)
    assert tokenizer.has_chat_template
    for messages in CONVERSATIONS:
        text, ids = oracle(folder, messages)
        assert tokenizer.render(messages) == text
        assert tokenizer.encode(messages) == ids
        assert len(ids) > 20 and messages[-1]["content"].strip() in text


EVERY_HELPER = """{%- if tools is not none or documents is not none %}TOOLS{% endif %}
{{ bos_token }}{{ eos_token }}{{ image_token }}{{ nothing }}
    {% for m in messages %}
        {% if m['content'] == 'skip' %}{% continue %}{% endif %}
        {% if m['content'] == 'stop' %}{% break %}{% endif %}
        {{ m | tojson }}{{ m | tojson(indent=2, sort_keys=true) }}{{ m | tojson(true) }}{{ m.role | upper }}
    {% endfor %}
{# a comment #}
{{ strftime_now('%Y-%m') }} {{ add_generation_prompt }}
"""


def test_every_helper_of_transformers_is_there(make_folder):
    own = {"bos_token": "<bos>", "image_token": "<|im_end|>", "unk_token": None}
    folder = make_folder(EVERY_HELPER, settings=own)
    messages = [{"role": "user", "content": text} for text in ("<a> & 'é'\n", "skip", "b", "stop", "c")]
    text, ids = oracle(folder, messages)
    assert Tokenizer(folder).render(messages) == text
    assert Tokenizer(folder).encode(messages) == ids
    assert "<a> & 'é'" in text and "<bos><eos><|im_end|>\n" in text
    assert "TOOLS" not in text and "skip" not in text and "stop" not in text


def test_keywords_reach_the_template_as_in_transformers(make_folder):
    folder = make_folder((TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8"), settings=MODEL_TOKENS["qwen3"])
    told = [Tokenizer(folder, chat_template_kwargs=json.dumps({"enable_thinking": on})) for on in (False, True)]
    for messages in CONVERSATIONS:
        for on, tokenizer in enumerate(told):
            text, ids = oracle(folder, messages, enable_thinking=bool(on))
            assert tokenizer.render(messages) == text and tokenizer.encode(messages) == ids
        assert told[0].render(messages) != told[1].render(messages) == Tokenizer(folder).render(messages)
    old = make_folder((TEMPLATES / "llama3_2.jinja").read_text(encoding="utf-8"), settings=MODEL_TOKENS["llama3_2"], name="old")
    date = {"date_string": "1 May 1999"}  # mentioned, and set by the template itself where it is not given
    text, _ = oracle(old, user("hi"), **date)
    assert Tokenizer(old, chat_template_kwargs=json.dumps(date)).render(user("hi")) == text and "1 May 1999" in text


def test_keywords_that_do_nothing_are_refused(make_folder):
    template = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8") + "{{ eos_token }}{{ documents }}"
    folder = make_folder(template)
    for text in "{", "enable_thinking=false", "[1]", "null", "3", "[" * 100_000:
        with pytest.raises(ValueError, match=re.escape(f"--chat_template_kwargs {text[:80]}: ")):
            Tokenizer(folder, chat_template_kwargs=text)
    for name in ("messages", "add_generation_prompt", "tools", "documents", "eos_token", "namespace", "raise_exception",
                 "thinking"):
        with pytest.raises(ValueError, match=f"config.json, chat_template: --chat_template_kwargs '{name}': "
                                             "the keywords of this template are .*enable_thinking"):
            Tokenizer(folder, chat_template_kwargs=json.dumps({"enable_thinking": True, name: None}))


def test_keywords_without_a_template_that_takes_any(make_folder, tmp_path):
    keywords = '{"enable_thinking": false}'
    bare = make_folder(name="bare")
    for folder in make_folder(CHATML), bare:
        with pytest.raises(ValueError, match="--chat_template_kwargs 'enable_thinking': .* are none"):
            Tokenizer(folder, chat_template_kwargs=keywords)
    (tmp_path / "mine.jinja").write_text("{{ enable_thinking }}")
    assert Tokenizer(bare, str(tmp_path / "mine.jinja"), keywords).render([]) == "False"


def test_a_template_cannot_reach_python(make_folder):
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="chat_template: SecurityError: .*unsafe"):
        Tokenizer(make_folder(escape)).render(user("hi"))
    with pytest.raises(ValueError, match="chat_template: SecurityError"):
        Tokenizer(make_folder("{% set _ = messages.append(1) %}", name="other")).render(user("hi"))


def test_where_the_template_comes_from(make_folder, tmp_path):
    assert not Tokenizer(make_folder(name="none")).has_chat_template
    several = [{"name": "default", "template": "first"}, {"name": "tool_use", "template": "second"}]
    folder = make_folder(several)
    assert Tokenizer(folder).render([]) == "first"
    assert Tokenizer(folder, chat_template="tool_use").render([]) == "second"
    (folder / "chat_template.jinja").write_bytes(b"\xef\xbb\xbffile\r\n{{ 1 }}")  # wins over the config
    assert Tokenizer(folder).render([]) == "file\n1"
    override = tmp_path / "mine.jinja"
    override.write_text("mine {{ messages | length }}")
    assert Tokenizer(folder, chat_template=str(override)).render([]) == "mine 0"
    for name, folder in (("nope.jinja", folder), ("default", make_folder([{"name": n, "template": n} for n in "ab"], name="no_default"))):
        with pytest.raises(ValueError, match=rf"--chat_template {name}: .*No such file"):
            Tokenizer(folder, chat_template=name.removesuffix("default"))
    with pytest.raises(ValueError, match="--chat_template default: .*No such file"):
        Tokenizer(make_folder(name="bare"), chat_template="default")
    for configured in (5, ["x"], [{}], [{"name": 5}], {"a": 1}, [{"name": "default", "template": 5}]):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": configured}))
        with pytest.raises(ValueError, match="tokenizer_config.json, chat_template: (Type|Key)Error"):
            Tokenizer(folder)


def test_template_errors_say_where(make_folder):
    with pytest.raises(ValueError, match=r"config.json, chat_template, line 2: TemplateSyntaxError: "):
        Tokenizer(make_folder("ok\n{% for %}", name="syntax"))
    picky = make_folder("{{ raise_exception('System role not supported') }}", name="picky")
    with pytest.raises(ValueError, match="picky/tokenizer_config.json, chat_template: TemplateError: System role not supp"):
        Tokenizer(picky).render(user("hi"))
    (picky / "chat_template.jinja").write_text("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(ValueError, match="picky/chat_template.jinja: TypeError: can only concatenate"):
        Tokenizer(picky).encode(user("hi"))
    (picky / "chat_template.jinja").write_bytes(b"ok\n\xff")
    with pytest.raises(ValueError, match="picky/chat_template.jinja, line 2: not UTF-8"):
        Tokenizer(picky)


# -------------------------------------------------------------------------------------------------- token ids


@pytest.mark.parametrize("template_writes_bos", [False, True])
@pytest.mark.parametrize("processor_adds_bos", [False, True])
@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_bos_exactly_once(make_folder, template_writes_bos, processor_adds_bos, add_bos_token):
    config = {"bos_token": "<bos>"} | ({} if add_bos_token is None else {"add_bos_token": add_bos_token})
    tokenizer = Tokenizer(make_folder(("{{ bos_token }}" if template_writes_bos else "") + CHATML,
                                      prefix=["<bos>"] if processor_adds_bos else [], settings=config))
    belongs = processor_adds_bos if add_bos_token is None else add_bos_token
    chat, text = tokenizer.encode(user("hi")), tokenizer.encode("hi")
    assert chat.count(0) == (belongs or template_writes_bos) and 0 not in chat[1:]
    assert text.count(0) == belongs and 0 not in text[1:]
    assert tokenizer.encode("<bos>hi").count(0) == 1  # already there, as text
    assert tokenizer.encode("")[:1] == ([0] if belongs else [])


def test_text_is_encoded_as_in_transformers(make_folder):
    folder = make_folder(CHATML, prefix=["<bos>"], settings={"bos_token": "<bos>"})
    mine, theirs = Tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ["7+5=", "  What is\tthe answer \n\n", "你好 üñ 𝔘", "<|im_end|>in<eos>", ""]:
        assert mine.encode(text) == theirs(text).input_ids
        ids = theirs(text).input_ids
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert mine.decode(mine.encode("a<|im_end|> b")) == "a b"


def test_a_prompt_never_ends_in_an_added_eos_and_is_never_cut(make_folder):
    folder = make_folder(CHATML, prefix=["<bos>"], suffix=["<eos>"], settings={"bos_token": "<bos>"})
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.enable_truncation(5)
    made.enable_padding(length=50)
    made.save(str(folder / "tokenizer.json"))
    ids = Tokenizer(folder).encode("a b c d e f g h")
    assert len(ids) == 16 and ids[0] == 0 and 1 not in ids
    only_suffix = make_folder(CHATML, suffix=["<eos>"], name="suffix")
    assert 1 not in Tokenizer(only_suffix).encode("hi")


def test_tokenizer_json_is_followed_to_the_letter(make_folder):
    """A pre-tokenizer that splits digits survives the class in tokenizer_config.json (SmolLM2 has both)."""
    folder = make_folder(CHATML, settings={"tokenizer_class": "GPT2Tokenizer"})
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                  pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.save(str(folder / "tokenizer.json"))
    expected = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for text in ["  7+5=", "What is 12 + 34?", "the answer   is   1234"]:
        assert Tokenizer(folder).encode(text) == expected(text).input_ids


def test_without_a_template_messages_become_plain_text(plain):
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": "7+5="}]
    assert plain.render(messages) == "Think.\n\n7+5="
    assert plain.encode(messages) == plain.encode("Think.\n\n7+5=")
    assert plain.render(user("7+5=")) == "7+5="


@pytest.mark.parametrize("generation, config, own, expected", [
    ({"eos_token_id": [3, 4]}, {"eos_token_id": 9}, "<eos>", [1, 3, 4]),  # SPECIAL's index is the id
    ({"eos_token_id": 4}, {"eos_token_id": 9}, "<|im_end|>", [4]),
    ({"bos_token_id": 0}, {"eos_token_id": [9, 2]}, "<eos>", [1, 2, 9]),  # generation_config.json has none
    (None, {"eos_token_id": 9}, "not in the vocabulary", [9]),
    (None, None, {"content": "<eos>", "special": True}, [1]),
])
def test_eos_ids(make_folder, generation, config, own, expected):
    files = {"generation_config": generation, "config": config}
    folder = make_folder(settings={"eos_token": own}, **{k: v for k, v in files.items() if v is not None})
    assert Tokenizer(folder).eos_token_ids == expected


def test_special_tokens_of_older_folders(make_folder):
    folder = make_folder("{{ bos_token }}{{ eos_token }}", settings={"eos_token": "<eos>"},
                         special_tokens_map={"bos_token": {"content": "<bos>"}, "eos_token": "<|im_end|>",
                                             "additional_special_tokens": ["<|im_start|>"]})
    assert Tokenizer(folder).render([]) == "<bos><eos>"  # tokenizer_config.json wins


@pytest.mark.parametrize("wrong", [True, 1.5, -1, 2**31, "12", [[1]], [1, None], float("nan")])
def test_eos_ids_that_are_none(make_folder, wrong):
    with pytest.raises(ValueError, match="no ids of EOS tokens: correct eos_token_id in generation_config.json"):
        Tokenizer(make_folder(generation_config={"eos_token_id": wrong}))


def test_folder_errors(make_folder, tmp_path):
    with pytest.raises(ValueError, match="absent/tokenizer.json: .*No such file"):
        Tokenizer(tmp_path / "absent")
    folder = make_folder()
    assert Tokenizer(str(folder)).folder == folder
    for text, message in (('{\n"eos_token_id": 1,\n}', ".*line 3 column 1"), ("[]", "TypeError: 'list' object is not a mapping"),
                          ("[" * 100_000, "RecursionError")):
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match=f"generation_config.json: {message}"):
            Tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(ValueError, match="tokenizer.json: .*line 1 column"):
        Tokenizer(folder)
    with pytest.raises(ValueError, match=r"no_eos: \[\] are no ids of EOS tokens: correct eos_token_id"):
        Tokenizer(make_folder(settings={"eos_token": None}, name="no_eos"))


def test_one_reader_of_tokenizer_json(chat):
    assert isinstance(chat.backend, tokenizers.Tokenizer)
    assert chat.backend.encode("a b", add_special_tokens=False).ids == chat.encode("a b")


def test_a_prompt_that_cannot_be_encoded_is_named(load, chat):
    rows = [{"question": f"What is {n} + 1?"} for n in range(12)]
    assert [p.token_ids for p in load("data.jsonl", rows).train] == [chat.encode(user(row["question"])) for row in rows]
    rows[10]["question"] = "half a pair: \ud83d"
    with pytest.raises(ValueError, match="data.jsonl, line 11: .*model/tokenizer.json cannot encode .*half a pair"):
        load("data.jsonl", rows)


# ------------------------------------------------------------------------------------------ rows that are given


def test_rows_in_place_of_a_file(chat):
    rows = [{"prompt": f"{n} + 1", "answer": n} for n in range(5)]
    whole = load_prompts("task", chat, max_prompt_length=9, rows=rows)
    assert whole.train == [Prompt(row["prompt"], chat.encode(row["prompt"]), {"answer": row["answer"]}) for row in rows]
    assert whole.held_out == [] and whole.notes[0] == "5 prompts from 'prompt', gold answers from 'answer'"
    split = load_prompts("task", chat, max_prompt_length=9, rows=rows, held_out=2)
    assert (split.held_out, split.train) == (whole.train[:2], whole.train[2:])
    same = load_prompts("task", chat, max_prompt_length=9, rows=rows, held_out=5)
    assert same.held_out == same.train == whole.train  # nothing else is left to train on
    assert whole.fingerprint == split.fingerprint
    system = load_prompts("task", chat, max_prompt_length=200, rows=rows, system_prompt="Be brief.")
    assert whole.fingerprint != system.fingerprint  # what is made of a row counts too
    with pytest.raises(ValueError, match="task, prompt 3: 'prompt' is missing or empty"):
        load_prompts("task", chat, max_prompt_length=9, rows=[*rows[:2], {"prompt": " "}])
    # What is held out must not depend on the limit.
    long = [*rows, {"prompt": "a" * 20}]
    assert len(load_prompts("task", chat, max_prompt_length=9, rows=long).train) == 5
    with pytest.raises(ValueError, match="1 of 6 prompts are longer than --max_prompt_length 9"):
        load_prompts("task", chat, max_prompt_length=9, rows=long, held_out=2)
    countdown = [{"nums": "[1, 2]", "target": "3"}]
    assert load_prompts("task", chat, max_prompt_length=200, rows=countdown).train[0].columns["answer"] == 3
    assert countdown == [{"nums": "[1, 2]", "target": "3"}]  # the caller's rows stay as they are


# ---------------------------------------------------------------------------------------------------- layouts


REPLY = {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize("row, prompt, columns", [
    pytest.param({"question": "2+2?", "answer": "Two and two.\n#### 4"}, user("2+2?"),
                 {"answer": "Two and two.\n#### 4"}, id="gsm8k"),
    pytest.param({"problem": "2+2?", "solution": "It is $\\boxed{4}$.", "level": 1}, user("2+2?"),
                 {"solution": "It is $\\boxed{4}$.", "level": 1, "answer": "It is $\\boxed{4}$."},
                 id="math-solution"),
    pytest.param({"problem": "2+2?", "solution": "…\\boxed{4}", "answer": "4"}, user("2+2?"),
                 {"solution": "…\\boxed{4}", "answer": "4"}, id="math-answer"),
    pytest.param({"problem": "2+2?", "solution": "\\boxed{4}", "answer": None}, user("2+2?"),
                 {"solution": "\\boxed{4}", "answer": "\\boxed{4}"}, id="math-answer-null"),
    pytest.param({"prompt": "The sky is", "gold": 3, "tags": ["a", None], "none": None}, "The sky is",
                 {"gold": 3, "tags": ["a", None], "none": None, "answer": None}, id="trl-text"),
    pytest.param({"prompt": user("hi"), "solution": "$\\frac12$"}, user("hi"),
                 {"solution": "$\\frac12$", "answer": "$\\frac12$"}, id="trl-messages"),
    pytest.param({"prompt": json.dumps(user("hi")), "answer": 4.5}, user("hi"), {"answer": 4.5},
                 id="trl-json-string"),
    pytest.param({"prompt": '[{"x": 1}] is JSON', "answer": "yes"}, '[{"x": 1}] is JSON', {"answer": "yes"},
                 id="text-that-begins-like-json"),
    pytest.param({"messages": [*user("hi"), REPLY]}, user("hi"), {"answer": None}, id="messages-with-reply"),
    pytest.param({"messages": [*user("hi"), REPLY], "answer": "x"}, user("hi"), {"answer": "x"},
                 id="messages-with-answer"),
    pytest.param({"prompt": user("hi")[0]}, user("hi"), {"answer": None}, id="one-message"),
    pytest.param({"prompt": [{"role": "user", "content": "hi", "tool_calls": None, "name": "ann"}], "n": 1},
                 [{"role": "user", "content": "hi", "name": "ann"}], {"n": 1, "answer": None},
                 id="null-fields-of-parquet"),
    pytest.param({"data_source": "gsm8k", "prompt": user("hi"), "ability": "math", "extra_info": {"index": 0},
                  "reward_model": {"style": "rule", "ground_truth": "72"}}, user("hi"),
                 {"data_source": "gsm8k", "ability": "math", "extra_info": {"index": 0}, "answer": "72",
                  "reward_model": {"style": "rule", "ground_truth": "72"}}, id="verl"),
    pytest.param({"nums": [3, 5, 7], "target": 22},
                 user("Using each of the numbers 3, 5, 7 exactly once, with + - * / and parentheses, write "
                      "an expression that equals 22. Put it into <answer> </answer>."),
                 {"nums": [3, 5, 7], "target": 22, "answer": 22}, id="countdown"),
    pytest.param({"prompt": "p", "question": "q", "target": "t"}, "p",
                 {"question": "q", "target": "t", "answer": "t"}, id="prompt-before-question"),
])
def test_layouts(load, chat, row, prompt, columns):
    [loaded] = load("data.jsonl", [row]).train
    assert loaded.prompt == prompt
    assert loaded.columns == columns
    assert loaded.token_ids == chat.encode(prompt)


def test_several_turns_go_through_the_template_as_in_transformers(load, chat):
    turns = CONVERSATIONS[-1]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    for column, value in ("prompt", turns), ("messages", turns), ("messages", [*turns, REPLY]):
        [loaded] = load("turns.jsonl", [{column: value}]).train
        assert loaded.prompt == turns and loaded.token_ids == oracle(chat.folder, turns)[1]


def test_columns_chosen_by_hand(load):
    row = {"prompt": "not this", "question": "q", "gold": 7, "answer": "old", "x.y": "dot",
           "meta": {"a": {"b": "deep"}}}
    by_hand = load("data.jsonl", [row], prompt_column="question", answer_column="gold").train[0]
    assert by_hand.prompt == user("q")
    assert by_hand.columns == {
        "prompt": "not this", "gold": 7, "meta": row["meta"], "x.y": "dot", "answer": 7}
    nested = load("data.jsonl", [row], prompt_column="meta.a.b", answer_column="x.y").train[0]
    assert nested.prompt == user("deep")
    assert nested.columns["answer"] == "dot" and nested.columns["question"] == "q"
    with pytest.raises(ValueError, match=r"no prompts in 'absent' \(its columns: answer, gold.*--prompt_column"):
        load("data.jsonl", [row], prompt_column="absent")
    with pytest.raises(ValueError, match=r"no answers in 'absent' \(its columns: answer, gold.*--answer_column"):
        load("data.jsonl", [row], answer_column="absent")


def test_rows_with_different_columns_get_all_of_them(load):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2", "level": 3}, {"question": "c"}]
    assert [p.columns for p in load("data.jsonl", rows).train] == [
        {"answer": "1", "level": None}, {"answer": "2", "level": 3}, {"answer": None, "level": None}]


def test_several_sources_are_one_list(load, chat):
    task = [{"question": f"{n}?", "answer": n} for n in range(5)]
    sets = {
        "a.jsonl": load("a.jsonl", [{"question": "a", "answer": "1", "level": 3}, {"question": "b" * 300, "answer": "2"}]),
        "task": load_prompts("task", chat, max_prompt_length=200, rows=task, held_out=2),
        "b.json": load("b.json", json.dumps([{"nums": [1, 2], "target": 3}, {"nums": [4], "target": 4}]))}
    together = concatenate(sets, list(sets.values()))
    for whole, parts in ((together.train, [s.train for s in sets.values()]), (together.held_out, [sets["task"].held_out])):
        apart = sum(parts, [])
        assert [(p.prompt, p.token_ids) for p in whole] == [(p.prompt, p.token_ids) for p in apart]
        for p, own in zip(whole, apart):
            assert p.columns == dict.fromkeys(("answer", "level", "nums", "target")) | own.columns
    assert len(together.held_out) == 2 and len(together.train) == 1 + 3 + 2
    assert together.train[0].columns == {"answer": "1", "level": 3, "nums": None, "target": None}
    assert together.notes == [f"{source}: {note}" for source, s in sets.items() for note in s.notes]
    assert len(together.notes) == 4 and "longer than 200 tokens dropped" in together.notes[1]
    assert sets["a.jsonl"].train[0].columns == {"answer": "1", "level": 3}  # as it was
    assert concatenate(["a.jsonl"], [sets["a.jsonl"]]) is sets["a.jsonl"]
    a, task, b = sets.values()
    both = concatenate(["a", "b"], [a, b]), concatenate(["b", "a"], [b, a])
    seen = {s.fingerprint for s in (together, a, task, b, *both)}
    changed = load("b.json", json.dumps([{"nums": [1, 2], "target": 3}, {"nums": [4], "target": 5}]))
    seen.add(concatenate(sets, [a, task, changed]).fingerprint)
    assert len(concatenate(["a", "a"], [a, a]).train) == 2 * len(a.train)  # named twice, it counts twice
    assert len(seen) == 7


def test_system_prompt(load, plain):
    own = [{"role": "system", "content": "mine"}, *user("c")]
    system = {"role": "system", "content": "Think first."}
    rows = [{"prompt": "a"}, {"prompt": user("b")}, {"prompt": own}]
    prompts = [p.prompt for p in load("data.jsonl", rows, system_prompt="Think first.").train]
    assert prompts == [[system, *user("a")], [system, *user("b")], own]
    assert [p.prompt for p in load("data.jsonl", rows).train] == ["a", user("b"), own]
    text = load("data.jsonl", [{"question": "b"}], tokenizer=plain, system_prompt="Think first.").train[0]
    assert plain.decode(text.token_ids) == "Think first.\n\nb"


# ---------------------------------------------------------------------------------------------------- formats


ROWS = [{"question": "one, \"two\"", "answer": "#### 1"},
        {"question": "ü 你\u2028好\nnext", "answer": "#### 2"}]


def as_csv(rows, newline="\r\n", bom=""):
    lines = [["question", "answer"], *([r["question"], r["answer"]] for r in rows)]
    quoted = [",".join('"' + field.replace('"', '""') + '"' for field in line) for line in lines]
    return bom + newline.join(quoted)


def as_lines(rows, newline="\n"):
    return newline.join(json.dumps(row, ensure_ascii=False) for row in rows)


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", as_lines(ROWS) + "\n"),
    ("no_final_newline.jsonl", as_lines(ROWS)),
    ("crlf.jsonl", as_lines(ROWS, "\r\n") + "\r\n"),
    ("bom.jsonl", "\ufeff" + as_lines(ROWS)),
    ("blank_lines.jsonl", "\n  \n" + as_lines(ROWS, "\n\n\r\n") + "\n\n\n"),
    ("UPPER.JSONL", as_lines(ROWS)),
    ("list.json", json.dumps(ROWS, indent=2)),
    ("list.jsonl", json.dumps(ROWS)),
    ("bom.json", "\ufeff\n" + json.dumps(ROWS)),
    ("lines.json", as_lines(ROWS)),
    ("a.csv", as_csv(ROWS)),
    ("bom.csv", as_csv(ROWS, bom="\ufeff") + "\r\n"),
    ("unix_and_blank.csv", as_csv(ROWS, "\n\n") + "\n\n"),
])
def test_formats(load, name, content):
    loaded = load(name, content)
    assert [(p.prompt, p.columns) for p in loaded.train] == [
        (user(row["question"]), {"answer": row["answer"]}) for row in ROWS]
    assert loaded.held_out == []
    assert loaded.fingerprint == load("b_" + name, content).fingerprint
    other = content.replace(ROWS[-1]["answer"], "#### 17")
    assert other != content and loaded.fingerprint != load("c_" + name, other).fingerprint


def test_csv_values_are_text_and_countdown_becomes_numbers(load, tmp_path):
    with open(tmp_path / "source.csv", "w", newline="") as file:
        csv.writer(file).writerows([["nums", "target", "id"], [[3, 5, 7], 22, 1], [[4, 2], 8, 2]])
    prompts = load("countdown.csv", (tmp_path / "source.csv").read_bytes()).train
    assert [p.columns for p in prompts] == [{"nums": [3, 5, 7], "target": 22, "id": "1", "answer": 22},
                                            {"nums": [4, 2], "target": 8, "id": "2", "answer": 8}]
    assert "numbers 3, 5, 7 exactly" in prompts[0].prompt[0]["content"]
    assert load("breaks.csv", 'question\r\n"a\r\nb\n"').train[0].prompt == user("a\r\nb\n")
    messages = json.dumps(user("hi")).replace('"', '""')
    assert load("chat.csv", f'prompt,answer\n"{messages}",\n').train[0] == Prompt(
        user("hi"), load("x.jsonl", [{"prompt": user("hi")}]).train[0].token_ids, {"answer": ""})


def test_parquet(load, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import datetime
    import pyarrow.parquet  # noqa: F811
    verl = [{"prompt": user("hi"), "reward_model": {"ground_truth": "7"}, "n": None,
             "when": datetime.date(2020, 1, 2)},
            {"prompt": [{"role": "system", "content": "s"}, *user("yo")], "n": 5,
             "reward_model": {"ground_truth": "8"}, "when": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl), tmp_path / "source.parquet")
    first, second = load("data.parquet", (tmp_path / "source.parquet").read_bytes()).train
    assert first.prompt == user("hi") and first.columns["answer"] == "7"
    assert first.columns["when"] == "2020-01-02"
    assert second.columns["n"] == 5 and json.dumps(second.columns)
    with pytest.raises(ValueError, match="(?i)parquet"):
        load("data.parquet", b"PAR1 but not really")


def test_parquet_is_read_through_pyarrow(load, monkeypatch):
    """With a stand-in where pyarrow is not installed: rows pass through JSON."""
    class Table:
        def to_pylist(self):
            return [{"question": "q", "answer": 1, "path": Path("a/b"), "seen": {1: "one"}}]

    fake, parquet = type(sys)("pyarrow"), type(sys)("pyarrow.parquet")
    fake.parquet = parquet
    monkeypatch.setitem(sys.modules, "pyarrow", fake)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)
    parquet.read_table = lambda file: {b"PAR1": Table()}[file.read()]
    assert load("a.parquet", b"PAR1").train[0].columns == {"answer": 1, "path": "a/b", "seen": {"1": "one"}}
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="pyarrow"):
        load("a.parquet", b"PAR1")


# ----------------------------------------------------------------------------------------------------- errors


GOOD = '{"question": "q", "answer": "1"}\n'


NO_PROMPTS = r"no prompts in 'prompt' or 'messages' or .* \(its columns: "


@pytest.mark.parametrize("name, content, message", [
    ("a.jsonl", "\n \r\n", NO_PROMPTS + "none"),
    ("a.json", "[]", NO_PROMPTS + "none"),
    ("a.csv", "question,answer\n", NO_PROMPTS + "none"),
    ("a.csv", "question;answer\nq;1\n", NO_PROMPTS + "question;answer"),
    ("a.jsonl", '{"text": "q", "label": 1}', NO_PROMPTS + "label, text.*--prompt_column"),
    ("a.jsonl", GOOD + "\n" + '{"question": "q",}\n' + GOOD, r"a.jsonl, line 3: .*column 1[78]"),
    ("a.jsonl", GOOD + '{"question": ' + "9" * 5000 + "}", r"a.jsonl, line 2: .*4300 digits"),
    ("a.jsonl", GOOD + "[" * 100_000, r"a.jsonl, line 2: RecursionError"),
    ("a.json", '[\n{"question": "q"},\n{"question" "q"}\n]', r"line 3 column 13"),
    ("a.json", '{\n"question": "q"\n}', r"a.json, line 1: .*column 2"),
    ("a.jsonl", GOOD + "[1, 2]\n", r"a.jsonl, line 2: TypeError: 'list' object is not a mapping"),
    ("a.jsonl", '"text"\n', r"a.jsonl, line 1: TypeError: 'str' object is not a mapping"),
    ("a.json", '[{"question": "q"}, null]', r"a.json, row 2: TypeError: 'NoneType' object is not a mapping"),
    ("a.jsonl", GOOD.encode() * 2 + b'{"question": "\xff"}', r"a.jsonl, line 3: not UTF-8"),
    ("a.csv", "question,answer\nq,1\n".encode("utf-16"), r"a.csv, line 1: not UTF-8"),
    ("a.csv", "question,answer\nq,1\nwell, then,2\n", r"a.csv, line 3: more fields than the header's 2: quote"),
    ("a.csv", 'question,answer\n"q\nr",1\n\n"open,\n2\n', r"a.csv, line 5: .*unexpected end of data"),
    ("a.csv", 'question,answer\n"q"x,1\n', r"a.csv, line 2: "),
    ("a.csv", 'question,"answer', r"a.csv, line 1: "),
    *(("a.jsonl", GOOD + row, r"a.jsonl, line 2: 'question' is missing or empty") for row in (
        '{"answer": "1"}', '{"question": null}', '{"question": " \\n"}', '{"question": []}')),
    ("a.csv", "question,answer\nq,1\n,2\n", r"a.csv, line 3: 'question' is missing or empty"),
    *(("a.jsonl", json.dumps({"prompt": value}), r"a.jsonl, line 1: 'prompt' must be text or a list of .*not ") for value in (
        12, {"role": "user"}, ["hi"], [{"role": "user", "content": [{"type": "image"}]}], [*user("q"), {"content": "a"}])),
    *(("a.jsonl", json.dumps({column: [*before, REPLY]}), rf"a.jsonl, line 1: '{column}' ends with the assistant's turn")
      for column, before in (("prompt", user("q")), ("messages", []))),
    ("a.csv", "prompt\n\"[{'role': 'user', 'content': 'hi'}]\"\n", r"a.csv, line 2: .*double quotes"),
    *(("a.jsonl", json.dumps({"nums": nums, "target": target}), r"a.jsonl, line 1: 'nums' must be integers in a list")
      for nums, target in (([1, "x"], 3), ([1, 2], None), ([], 1), ([1.5, 2], 3), ([True], 1), (5, 5), ("1 2", 3))),
    ("a.jsonl", '{"nums": [1, 2]}', r"a.jsonl, line 1: .*KeyError: 'target'"),
    ("a.jsonl", GOOD + '{"question": "\\ud83d"}', r"a.jsonl, line 2: .*tokenizer.json cannot encode"),
    ("a.txt", "hello", r"ends in \.jsonl, \.json, \.csv, \.parquet"),
], ids=lambda value: str(value)[:40])
def test_errors_name_the_line(load, name, content, message):
    with pytest.raises(ValueError, match=message):
        load(name, content)


def test_errors_of_paths_and_templates(chat, load, make_folder, tmp_path):
    with pytest.raises(OSError, match="absent.jsonl"):
        load_prompts(str(tmp_path / "absent.jsonl"), chat, max_prompt_length=9)
    with pytest.raises(OSError, match="too long"):
        load_prompts("x" * 3000 + ".jsonl", chat, max_prompt_length=9)
    picky = Tokenizer(make_folder("{{ raise_exception('only users') }}", name="picky"))
    with pytest.raises(ValueError, match=r"a.jsonl, line 1: .*picky/tokenizer_config.json, chat_template: .*: only users"):
        load("a.jsonl", GOOD, tokenizer=picky)
    empty = Tokenizer(make_folder("{{ '' }}", name="empty"))
    with pytest.raises(ValueError, match="a.jsonl, line 1: the prompt has no tokens"):
        load("a.jsonl", GOOD, tokenizer=empty)


# ------------------------------------------------------------------------------------------------------ notes


def test_over_long_prompts_are_dropped_and_counted(load, chat):
    rows = [{"question": "a" * n, "answer": n} for n in (1, 50, 2, 60)]
    limit = len(chat.encode(user("aa")))
    loaded = load("data.jsonl", rows, max_prompt_length=limit)
    assert [p.columns["answer"] for p in loaded.train] == [1, 2]
    assert loaded.notes == ["2 prompts from 'question', gold answers from 'answer'",
                            f"2 prompts longer than {limit} tokens dropped"]
    with pytest.raises(ValueError, match=r"4 of 4 prompts .*--max_prompt_length 3; raise it"):
        load("data.jsonl", rows, max_prompt_length=3)


def test_duplicates_are_kept_and_counted(load):
    rows = [{"question": q, "answer": str(i)} for i, q in enumerate(["a", "b", "a", "a", "b"])]
    loaded = load("data.jsonl", rows)
    assert [p.columns["answer"] for p in loaded.train] == list("01234")
    assert loaded.notes[1:] == ["3 duplicate prompts kept"]


@pytest.mark.parametrize("rows, count, first", [
    ([{"question": "q", "answer": a} for a in
      ("so\n#### 4", "#### -1,234.5", "#### $ 7", "####  .5", "####", "no mark 12", "#### x\n3", "", None)],
     3, "line 5"),
    ([{"question": "q", "answer": a} for a in ("Paris", 12, 0, False, [1], "", " ", None, float("nan"))],
     4, "line 6"),
    ([{"problem": "p", "solution": s} for s in
      ("\\boxed{4}", "\\fbox{x}", "\\boxed 5", "\\boxed{ \\frac{1}{2}}", "\\boxed{}", "12", "\\boxed{ }")],
     3, "line 5"),
    ([{"problem": "p", "solution": "12", "answer": a} for a in ("4", "")], 1, "line 2"),
    ([{"prompt": "p", "solution": s} for s in ("12", "$x$", "")], 1, "line 3"),
    ([{"prompt": "p", "reward_model": {"ground_truth": "1"}}, {"prompt": "p", "reward_model": {}},
      {"prompt": "p"}], 2, "line 2"),
    ([{"nums": [1, 2], "target": 3}], 0, None),
])
def test_gold_answers_that_cannot_be_parsed_are_counted(load, rows, count, first):
    loaded = load("data.jsonl", rows)
    assert len(loaded.train) == len(rows)
    expected = (f"{count} gold answers cannot be parsed: no completion can match them (kept; the first is in "
                f"{first})")
    assert [note for note in loaded.notes if "cannot be parsed" in note] == ([expected] if count else [])


def test_notes_say_where_things_came_from(load, chat, plain):
    mixed = [{"problem": "p", "answer": "1", "solution": None}, {"problem": "q", "solution": "\\boxed{2}"}]
    assert load("data.jsonl", mixed).notes == [
        "2 prompts from 'problem', gold answers from 'answer' or 'solution'"]
    text, hint = load("data.jsonl", [{"prompt": "p"}]).notes
    assert text == "1 prompts from 'prompt', gold answers from nowhere (--answer_column names their column)"
    assert "plain text: no chat template" in hint
    assert len(load("data.jsonl", [{"prompt": "p"}], tokenizer=plain).notes) == 1


# -------------------------------------------------------------------------------------------- order and seeds


def hashed(text):
    return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16) // 4


def test_prompt_indices_by_hand():
    keys = [[hashed(f"order 0 {epoch} {i}") for i in range(3)] for epoch in range(3)]
    assert keys == [[3356046796743212511, 4164428500854069157, 481514047246628864],
                    [1443852053925840755, 1426334803514377022, 4412531866326202360],
                    [1402012077410152603, 4234305075441094217, 3763273992814215047]]
    # Sorted by these, the epochs of 3 prompts are [2, 0, 1], [1, 0, 2], [0, 2, 1].
    assert [prompt_indices(step, 2, 3, 0) for step in range(4)] == [[2, 0], [1, 1], [0, 2], [0, 2]]
    assert prompt_indices(0, 3, 3, 0) == [2, 0, 1]
    assert prompt_indices(0, 9, 3, 0) == [2, 0, 1, 1, 0, 2, 0, 2, 1]  # data smaller than a step
    assert prompt_indices(1, 4, 3, 0) == [0, 2, 0, 2]
    assert prompt_indices(10, 4, 1, 0) == [0, 0, 0, 0]


@pytest.mark.parametrize("size, per_step", [(7, 3), (3, 7), (16, 16), (10, 1), (100, 32), (1, 4)])
def test_wrapped_epochs_drop_nothing(size, per_step):
    epochs = 6
    steps = range(-(-epochs * size // per_step))
    stream = [i for step in steps for i in prompt_indices(step, per_step, size, 3)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * size:(epoch + 1) * size]) == list(range(size))
    assert max(Counter(stream).values()) - min(Counter(stream).values()) <= 1


def test_order_depends_on_seed_and_epoch_and_on_nothing_else():
    whole = prompt_indices(0, 40, 40, 1)
    assert whole != prompt_indices(0, 40, 40, 2) and whole != prompt_indices(1, 40, 40, 1)
    assert whole not in (sorted(whole), sorted(whole)[::-1])
    for step in (5, 0, 3):  # any step, in any order, and cut otherwise, is part of the same stream
        assert prompt_indices(step, 8, 40, 1) == sum((prompt_indices(s, 2, 40, 1) for s in
                                                      range(4 * step, 4 * step + 4)), [])
    assert whole == prompt_indices(0, 40, 40, 1)
    data.permutation.cache_clear()
    random.seed(5)
    assert whole == prompt_indices(0, 40, 40, 1)


def test_sample_seeds():
    assert sample_seed(0, 0, 0, 0) == hashed("sample 0 0 0 0") == 495125401286248384
    assert sample_seed(7, 60, 1, 15) == hashed("sample 7 60 1 15")
    seeds = {sample_seed(*key) for key in itertools.product((0, 1), range(20), range(2), range(50))}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2 ** 62 for seed in seeds) and max(seeds) > 2 ** 61
    assert sample_seed(1, 11, 0, 0) != sample_seed(11, 1, 0, 0) != sample_seed(1, 1, 10, 0)


# ---------------------------------------------------------------------------------------------------- copying


def test_the_module_works_when_copied_alone(tmp_path, plain):
    """In an empty folder, without torch, transformers or pyarrow, and leaving the global generator alone."""
    shutil.copy(data.__file__, tmp_path / "data.py")
    plain.folder.rename(tmp_path / "model")
    script = """
import sys
for name in ("torch", "transformers", "pyarrow", "numpy"):
    sys.modules[name] = None
import random; state = random.getstate()
import data
open("p.jsonl", "w").write('{"prompt": "1+1=", "answer": 2}')
loaded = data.load_prompts("p.jsonl", data.Tokenizer("model"), max_prompt_length=8)
data.prompt_indices(0, 4, 1, 0)
assert random.getstate() == state
print(data.__file__, loaded.train[0].token_ids, loaded.train[0].columns)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.strip() == f"{tmp_path / 'data.py'} {plain.encode('1+1=')} {{'answer': 2}}", done.stderr
    assert done.stderr == ""
