"""tiny.py: the rows of the built-in tasks and the tokenizer of the tiny model, against values worked out by hand."""

import itertools
import random

import pytest
import transformers

from data import Prompt, Tokenizer, load_prompts
from tiny import TASKS, rows, write_digits_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    write_digits_tokenizer(tmp_path / "tiny")
    return Tokenizer(tmp_path / "tiny")


def test_digits(tokenizer):
    assert rows("digits") == [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
    options = dict(rows=rows("digits"), held_out=TASKS["digits"])
    prompts = load_prompts("digits", tokenizer, max_prompt_length=4, **options)
    assert len(prompts.train) == 100 and prompts.train == prompts.held_out
    assert prompts.notes == ["100 prompts from 'prompt', gold answers from 'answer'"]
    assert prompts.train[75] == Prompt("7+5=", [7, 10, 5, 11], {"answer": "12"})
    # Letters have no tokens here; a prompt must not lose them silently.
    with pytest.raises(ValueError, match="digits, prompt 1: .*tiny/tokenizer.json cannot encode 'Think"):
        load_prompts("digits", tokenizer, max_prompt_length=99, system_prompt="Think", **options)


def test_sums(tokenizer):
    random.seed(5)
    state = random.getstate()
    table = rows("sums")
    assert random.getstate() == state
    pairs = list(itertools.product(range(10, 100), repeat=2))
    random.Random(0).shuffle(pairs)
    assert table == [{"question": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b)} for a, b in pairs]
    assert (len(table), TASKS["sums"]) == (8100, 512)
    assert table[0]["question"] == "What is 25 + 60? Answer with just the number."  # the order since the first version
    with pytest.raises(ValueError, match="sums, prompt 1: .*tiny/tokenizer.json cannot encode 'What is"):
        load_prompts("sums", tokenizer, max_prompt_length=99, rows=table[:2])


def test_tokenizer_of_the_tiny_model(tokenizer):
    assert (tokenizer.eos_token_ids, tokenizer.has_chat_template) == ([12], False)
    assert tokenizer.encode("0123456789+=") == list(range(12))
    assert tokenizer.decode([1, 2, 12]) == "12" and tokenizer.decode([13, 1, 10, 12, 12]) == "1+"
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer.folder)
    assert theirs("7+5=").input_ids == [7, 10, 5, 11]
    assert theirs.decode([1, 2, 12], skip_special_tokens=True) == "12"
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (12, 13, 14)
