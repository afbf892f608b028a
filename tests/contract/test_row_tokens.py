"""Rows are the tokens that the tokenizer makes of their whole text, and the right ones are learnt.

On real tokenizers of the forms that models have.
"""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.vocabularies import byte_pairs, letters, sentence_pieces
from tokenizers import Tokenizer
from transformers import AutoTokenizer, ByT5Tokenizer

from windrow.errors import UserError
from windrow.rows import DatasetRecord, row_of
from windrow_sidecar.engines.builtin.web.front import load_tokenizer
from windrow_sidecar.finetune.data import rendering
from windrow_sidecar.finetune.data.conversation import Conversations
from windrow_sidecar.finetune.data.tokenizer_files import read_tokenizer
from windrow_sidecar.finetune.data.tokens import RowTokenizer, stop_tokens

FORMS = {
    "letters": letters,
    "GPT-2": lambda: byte_pairs(bos=False),
    "Llama-3": lambda: byte_pairs(bos=True),
    "Llama-2": lambda: sentence_pieces(eos=False),
    "Llama-2 with EOS": lambda: sentence_pieces(eos=True),
    "ByT5, without offsets": ByT5Tokenizer,
}
TEXTS = (
    "Q: what is the capital of France?\nA: Paris is  the capital\n\n",
    " Hello Paris,  (hi)\n\n\n:: yes",
    "caf\u00e9 \U0001f600\U0001f600 \u4f60\u597d Paris",
)
PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# As Qwen3's: only answers after the user's last turn show that the model has thought.
RETHINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}(think)\n{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# What templates for tools look at beside roles and contents.
WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ greeting }}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.name }}{{ m.tool_call_id }}:{{ m.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>:{% endif %}"
)
TALK = (("user", "Greet Paris"), ("assistant", "Hello Paris"))
LONGER = (*TALK, ("user", " Paris?"), ("assistant", "\nyes  (hi)"))


@pytest.fixture(params=FORMS)
def tokenizer(request):
    return FORMS[request.param]()


def example(tokenizer, form, fields, *, learn_all=False):
    made = RowTokenizer(tokenizer, max_length=500, learn_all=learn_all)
    return made.example(row_of(DatasetRecord("rows.jsonl:1", fields), form))


def turns(talk):
    return {"messages": [{"role": role, "content": content} for role, content in talk]}


def ended(tokenizer, ids) -> list[int]:
    end = [tokenizer.eos_token_id]
    return ids if ids[-1:] == end else ids + end


def learnt(example) -> list[int]:
    assert all(label in (-100, i) for i, label in zip(example.ids, example.labels, strict=True))
    return [at for at, label in enumerate(example.labels) if label != -100]


def begins_of(tokenizer, text) -> list[int]:
    """Return where each token of an ASCII text begins, from the lengths of the tokens' names."""
    names = tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])
    begins, at = [], -1 if "▁" in names[1] else 0
    for name in names:
        special = name in tokenizer.all_special_tokens
        begins.append(max(at, 0) if not special else -1 if at <= 0 else len(text))
        at += 0 if special else len(name)
    return begins


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_what_the_tokenizer_makes_of_it_and_its_end(tokenizer, text):
    made = example(tokenizer, "text", {"text": text})
    assert list(made.ids) == ended(tokenizer, tokenizer(text)["input_ids"])
    assert learnt(made) == list(range(1, made.length))


def test_wherever_a_row_is_cut_into_prompt_and_completion_it_is_the_same_tokens(tokenizer):
    for text in TEXTS:
        for cut in range(1, len(text)):
            row = {"prompt": text[:cut], "completion": text[cut:]}
            made = example(tokenizer, "completion", row)
            assert list(made.ids) == ended(tokenizer, tokenizer(text)["input_ids"])
            assert learnt(made) == list(range(learnt(made)[0], made.length))


@pytest.mark.parametrize("form", [form for form in FORMS if "offsets" not in form])
def test_a_token_is_learnt_where_it_begins_in_the_completion(form):
    tokenizer, merged = FORMS[form](), 0
    for text in TEXTS[:2]:
        begins = begins_of(tokenizer, text)
        for cut in range(1, len(text)):
            made = example(
                tokenizer, "completion", {"prompt": text[:cut], "completion": text[cut:]}
            )
            begun = [at for at, begin in enumerate(begins) if begin >= cut]
            assert learnt(made) == begun + list(range(len(begins), made.length))
            merged += cut not in begins
    assert (merged > 0) == (form != "letters")


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("Q: France?\nA:", " Paris"), ("A: Paris", " is the capital"), ("A: ", "Paris")],
)
def test_where_the_prompt_loses_at_most_its_last_token_the_mask_is_as_long_as_it(
    tokenizer, prompt, completion
):
    """TRL masks as many tokens as the prompt has alone."""
    made = example(tokenizer, "completion", {"prompt": prompt, "completion": completion})
    alone = tokenizer(prompt)["input_ids"]
    alone = alone[:-1] if alone[-1] == tokenizer.eos_token_id else alone
    assert list(made.ids[: len(alone) - 1]) == alone[:-1]
    assert learnt(made)[0] == len(alone)


def test_an_instruction_is_the_prompt_that_the_documentation_shows(tokenizer):
    row = {"instruction": "Greet Paris", "input": "yes", "output": "Hello"}
    text = "### Instruction:\nGreet Paris\n\n### Input:\nyes\n\n### Response:\nHello"
    made = example(tokenizer, "instruction", row)
    assert list(made.ids) == ended(tokenizer, tokenizer(text)["input_ids"])


@pytest.mark.parametrize("form", ["letters", "GPT-2", "Llama-2 with EOS"])
def test_an_end_that_stands_there_already_is_not_written_again(form):
    tokenizer = FORMS[form]()
    made = example(tokenizer, "text", {"text": f"yes{tokenizer.eos_token}"})
    assert list(made.ids) == tokenizer(f"yes{tokenizer.eos_token}")["input_ids"]


def test_the_prompt_of_a_row_is_the_tokens_that_decode_is_sent():
    folder = Path(__file__).parents[2] / "models/windrow-tiny"
    sent = load_tokenizer(folder).encode("Q: yes?").ids
    row = {"prompt": "Q: yes?", "completion": " no"}
    made = example(AutoTokenizer.from_pretrained(folder), "completion", row)
    assert list(made.ids[: len(sent)]) == sent
    assert learnt(made)[0] == len(sent)


@pytest.mark.parametrize("learn_all", [False, True])
@pytest.mark.parametrize("template", [PLAIN, MARKED, RETHINKING])
def test_a_conversation_is_what_its_template_makes_of_it(tokenizer, template, learn_all):
    tokenizer.chat_template = template
    row = turns(LONGER)
    made = example(tokenizer, "chat", row, learn_all=learn_all)
    theirs = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=True)
    assert list(made.ids) == theirs["input_ids"]
    if learn_all:
        assert learnt(made) == list(range(1, made.length))


@pytest.mark.parametrize("form", ["letters", "GPT-2", "Llama-3", "Llama-2"])
def test_what_a_template_marks_is_learnt_as_the_tokenizers_own_mask_says(form):
    tokenizer = FORMS[form]()
    tokenizer.chat_template = MARKED
    row = turns(LONGER)
    theirs = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True
    )
    mask = [at for at, is_answer in enumerate(theirs["assistant_masks"]) if is_answer]
    assert learnt(example(tokenizer, "chat", row)) == mask


def test_an_answer_that_begins_with_a_blank_is_learnt_though_its_offsets_leave_it_out():
    tokenizer = byte_pairs(bos=True)
    tokenizer.chat_template = MARKED
    made = example(tokenizer, "chat", turns((*TALK[:1], ("assistant", " Paris"), *TALK)))
    said = tokenizer.decode([made.ids[at] for at in learnt(made)])
    assert said == " Paris</s>Hello Paris</s>"


def test_each_answer_is_learnt_from_its_first_token_to_the_end_of_its_turn(tokenizer):
    tokenizer.chat_template = PLAIN
    made = example(tokenizer, "chat", turns(LONGER))
    said = tokenizer.decode([made.ids[at] for at in learnt(made)])
    end = tokenizer.eos_token
    assert "".join(said.split()) == f"HelloParis{end}yes(hi){end}"


def test_answers_that_later_turns_rewrite_are_left_out_and_told():
    tokenizer = letters()
    tokenizer.chat_template = RETHINKING
    rows = RowTokenizer(tokenizer, max_length=500)
    made = rows.example(row_of(DatasetRecord("rows.jsonl:7", turns(LONGER)), "chat"))
    assert tokenizer.decode([made.ids[at] for at in learnt(made)]) == "(think)\n\nyes  (hi)</s>"
    (note,) = rows.notes()
    assert "1 answers are not learnt" in note
    assert "rows.jsonl:7" in note


def test_a_turn_after_the_last_answer_counts_with_all_and_changes_nothing_without():
    tokenizer = letters()
    tokenizer.chat_template = RETHINKING
    row = turns((*TALK, ("user", "thanks")))
    whole = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    assert tokenizer.decode(example(tokenizer, "chat", row, learn_all=True).ids) == whole
    assert example(tokenizer, "chat", row) == example(tokenizer, "chat", turns(TALK))


WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER["function"]]), None])
def test_a_template_gets_tools_settings_and_all_that_a_turn_has(tools):
    tokenizer = letters()
    tokenizer.chat_template = WITH_TOOLS
    asked = {"role": "tool", "name": "weather", "tool_call_id": "x1", "content": "42", "time": None}
    row = {"messages": [asked, {"role": "assistant", "content": "hot"}], "tools": tools}
    made = example(tokenizer, "chat", row | {"chat_template_kwargs": {"greeting": "hi"}})
    expected = tokenizer.apply_chat_template(
        row["messages"], tools=tools and [WEATHER], greeting="hi"
    )
    assert list(made.ids) == expected["input_ids"]
    assert tokenizer.decode(made.ids).endswith("hi<|tool|>weatherx1:42\n<|assistant|>:hot\n")


WHOLE_TURNS = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (PLAIN, "thought (2), quiet (1), tools (1)"),
        (MARKED, "thought (2), quiet (1), tools (1)"),
        (PLAIN + "{{ tools }}{{ quiet }}", "thought (2)"),
        (WHOLE_TURNS, "quiet (1), tools (1)"),
    ],
)
def test_fields_that_a_template_does_not_write_are_told_with_their_rows(template, told):
    tokenizer = letters()
    tokenizer.chat_template = template
    rows = RowTokenizer(tokenizer, max_length=500, learn_all=True)
    answer = {"role": "assistant", "content": "hi", "thought": "to greet", "mood": None, "cut": ""}
    row = {"messages": [{"role": "user", "content": "Hello"}, answer]}
    more = {"tools": [{"name": "f"}], "chat_template_kwargs": {"quiet": True}}
    for each in (row, row | more):
        rows.example(row_of(DatasetRecord("rows.jsonl:1", each), "chat"))
    begin = "fields of chat rows that the model's chat template does not write: "
    note = next(note for note in rows.notes() if note.startswith(begin))
    named = note.partition(": ")[2].partition(";")[0].split(", ")
    assert sorted(named) == sorted(told.split(", "))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tools": "weather"}, "`tools` is not a list"),
        ({"tools": [3]}, "`tools` is not a list"),
        ({"functions": [{"name": "f"}]}, "has `functions`"),
        ({"chat_template_kwargs": [1]}, "`chat_template_kwargs` is not an object"),
        ({"chat_template_kwargs": {"tokenize": True}}, "refuses the turns"),
        (
            {"messages": [{"role": "user", "content": "a\ud83d"}, turns(TALK)["messages"][1]]},
            "half",
        ),
    ],
)
def test_what_a_template_cannot_get_is_the_rows_mistake(fields, problem):
    tokenizer = letters()
    tokenizer.chat_template = PLAIN
    with pytest.raises(UserError, match=problem) as caught:
        example(tokenizer, "chat", turns(TALK) | fields)
    assert caught.value.field == "rows.jsonl:1"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% if messages | length < 2 %}{{ raise_exception('no') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
)
def test_a_conversation_whose_answers_cannot_be_told_apart_is_refused(template):
    tokenizer = letters()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"rows.jsonl:1: the model's chat template"):
        example(tokenizer, "chat", turns(TALK))
    assert example(tokenizer, "chat", turns(TALK), learn_all=True).targets > 0


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("mark", ["", "{% generation %}{% endgeneration %}"])
def test_a_template_that_loops_without_end_is_ended(monkeypatch, mark):
    monkeypatch.setattr(rendering, "_RENDER_CPU_S", 0.2)
    tokenizer = letters()
    tokenizer.chat_template = mark + ENDLESS
    with pytest.raises(UserError, match=r"rows.jsonl:1: the chat template computes for more than"):
        example(tokenizer, "chat", turns(TALK))
    # What comes after it is not ended in its place.
    tokenizer.chat_template = PLAIN
    assert example(tokenizer, "chat", turns(TALK)).targets > 0


def test_comments_of_a_template_that_never_end_take_no_time():
    """Each begin of a comment, searched to the end of the template, would be a square of them."""
    tokenizer = letters()
    tokenizer.chat_template = "{#" * 500_000
    with pytest.raises(UserError, match="cannot be compiled"):
        example(tokenizer, "chat", turns(TALK))


def test_a_tokenizer_whose_pattern_tries_too_long_is_the_rows_error():
    tries = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}
    tokenizer = letters()
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    written["pre_tokenizer"] = {**tries, "invert": False}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(written))
    with pytest.raises(UserError, match=r"rows.jsonl:1: the model's tokenizer fails over it"):
        example(tokenizer, "text", {"text": f"{'a' * 64}b"})


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'x' * 70000000 }}", "makes more than 64 MiB"),
        ("{{ range(10 ** 9) | list }}", "refuses the turns"),
        ("{{ 1 // 0 }}", "refuses the turns"),
    ],
)
def test_what_a_template_makes_is_bounded(template, problem):
    tokenizer = letters()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=problem):
        example(tokenizer, "chat", turns(TALK))


@pytest.mark.parametrize("form", ["Llama-3", "Llama-2", "Llama-2 with EOS"])
def test_bos_and_eos_of_a_text_that_was_rendered_elsewhere_stand_once(form):
    """A server tokenizes the text of a chat without tokens of its own around it."""
    tokenizer = FORMS[form]()
    text = "<s><|user|>Paris<|assistant|>Hello</s>"
    served = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = example(tokenizer, "text", {"text": text})
    assert list(whole.ids) == served
    prompt, _, completion = text.partition("Hello")
    made = example(tokenizer, "completion", {"prompt": prompt, "completion": f"Hello{completion}"})
    assert list(made.ids) == served
    assert tokenizer.decode([made.ids[at] for at in learnt(made)]).strip() == "Hello</s>"
    bare = example(tokenizer, "text", {"text": "<|user|>Paris<|assistant|>Hello"})
    assert bare.ids.count(tokenizer.bos_token_id) == 1
    assert bare.ids.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("mark", ["{% generation %}", "{%+ generation %}", "{%- generation +%}"])
def test_the_mark_of_an_answer_counts_in_each_of_its_spellings_and_not_in_comments(mark):
    tokenizer = letters()
    tokenizer.chat_template = MARKED
    expected = example(tokenizer, "chat", turns(LONGER))
    tokenizer.chat_template = MARKED.replace("{% generation %}", mark)
    assert example(tokenizer, "chat", turns(LONGER)) == expected
    tokenizer.chat_template = PLAIN
    expected = example(tokenizer, "chat", turns(LONGER))
    tokenizer.chat_template = f"{{# was {mark}\n once #}}{PLAIN}"
    assert example(tokenizer, "chat", turns(LONGER)) == expected


@pytest.mark.parametrize("template", ["{% if %}", "{{ messages | fromjson }}"])
def test_a_template_that_cannot_be_compiled_is_no_fault_of_a_row(template):
    tokenizer = letters()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=r"cannot be compiled.*line 1") as caught:
        example(tokenizer, "chat", turns(TALK))
    assert caught.value.field == "spec.model.name"
    tokenizer.chat_template = "{{ today() }}"
    with pytest.raises(UserError, match="'today' is undefined") as caught:
        example(tokenizer, "chat", turns(TALK))
    assert "chat_template_kwargs" in caught.value.remedy


def test_templates_without_a_default_are_no_fault_of_a_row():
    tokenizer = letters()
    tokenizer.chat_template = {"tool_use": PLAIN, "rag": PLAIN}
    with pytest.raises(UserError, match="named rag, tool_use, and none") as caught:
        example(tokenizer, "chat", turns(TALK))
    assert caught.value.field == "spec.model.name"


def test_a_composite_model_may_name_its_stops_with_its_text_half(tmp_path):
    tokenizer = letters()
    tokenizer.name_or_path = str(tmp_path)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [65, 66]}}')
    assert stop_tokens(tokenizer) == {65, 66, tokenizer.eos_token_id}


def test_a_completion_of_turns_is_learnt_behind_its_prompt_as_trl_does():
    tokenizer = letters()
    tokenizer.chat_template = PLAIN
    messages = turns(LONGER)["messages"]
    made = example(tokenizer, "completion", {"prompt": messages[:3], "completion": messages[3:]})
    prompt = tokenizer.apply_chat_template(messages[:3], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.decode(made.ids) == whole
    assert tokenizer.decode([made.ids[at] for at in learnt(made)]) == whole.removeprefix(prompt)
    with pytest.raises(UserError, match="`completion` is not an answer to the prompt"):
        example(tokenizer, "completion", {"prompt": messages[:2], "completion": messages[1:]})


def test_an_answer_without_a_prompt_is_context():
    tokenizer = letters()
    tokenizer.chat_template = PLAIN
    row = row_of(DatasetRecord("rows.jsonl:1", turns((("assistant", "hi"), *TALK))), "chat")
    rendered = Conversations(tokenizer, learn_all=False).rendered(row)
    assert [rendered.text[a:b] for a, b in rendered.learnt] == ["Hello Paris</s>\n"]


def test_answers_that_begin_a_conversation_are_told():
    found, notes = spoken(PLAIN, (("assistant", "hi"), ("assistant", "you")))
    assert found == ["you</s>\n"]
    assert "answers are not learnt: they begin their conversations" in notes
    assert "(first in rows.jsonl:1)" in notes
    with pytest.raises(UserError, match="begins the conversation, so nothing asks for it"):
        spoken(PLAIN, (("assistant", "hi"), ("user", "you")))


def spoken(template, talk, *, specials=(), eos=None, learn_all=False):
    """Return what is learnt of a conversation, and the notes of it."""
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    if eos:
        tokenizer.eos_token = eos
    tokenizer.chat_template = template
    rows = RowTokenizer(tokenizer, max_length=900, learn_all=learn_all)
    row = row_of(DatasetRecord("rows.jsonl:1", turns(talk)), "chat")
    rendered = rows._conversations.rendered(row)
    rows.example(row)
    return [rendered.text[a:b] for a, b in rendered.learnt], " ".join(rows.notes())


FIRST = (("user", "Greet Paris"), ("assistant", "Hello Paris"))
BOTH = (*FIRST, ("user", "And Rome"), ("assistant", "Hello Rome"))
EACH = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
ASKED = "{% if add_generation_prompt %}<|assistant|>"
# By the way in which templates of the field write what follows the last turn.
BEHIND = {
    "Phi-3: an end of the text where nothing is asked": (
        EACH + ASKED + "{% else %}{{ eos_token }}{% endif %}",
        ["Hello Paris<|end|>\n", "Hello Rome<|end|>\n</s>"],
    ),
    "gpt-oss: the last answer ends otherwise": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ '</s>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        + ASKED
        + "{% endif %}",
        ["Hello Paris", "Hello Rome</s>"],
    ),
    "Command A: a question that nobody has asked": (
        "{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "<|turn|><|assistant|>",
        ["Hello Paris</s>", "Hello Rome</s>"],
    ),
    "the same where a question says more": (
        "{% for m in messages %}<|turn|><|{{ m.role }}|>{{ '<|end|>' if m.role == 'assistant' }}"
        "{{ m.content }}</s>{% endfor %}<|turn|><|assistant|>"
        "{% if add_generation_prompt %}<|end|>{% endif %}",
        ["Hello Paris</s>", "Hello Rome</s>"],
    ),
    "plain words": (
        "{% for m in messages %}{{ m.role.upper() }}: {{ m.content }}\n{% endfor %}"
        "{{ 'ASSISTANT: ' if add_generation_prompt else 'ATLAST' }}",
        ["Hello Paris\n", "Hello Rome\n"],
    ),
    "vLLM's ChatML: an end where another turn follows": (
        "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}"
        "{% if add_generation_prompt or not loop.last %}</s>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant {% endif %}",
        ["Hello Paris</s>", "Hello Rome"],
    ),
    "GLM: nothing": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        + ASKED
        + "{% endif %}",
        ["Hello Paris", "Hello Rome"],
    ),
}


@pytest.mark.parametrize("how", BEHIND)
def test_an_answer_ends_with_its_turn_whatever_the_template_writes_behind_it(how):
    template, expected = BEHIND[how]
    specials = ("<|end|>", "<|turn|>", "<|user|>", "<|assistant|>")
    found, notes = spoken(template, BOTH, specials=specials)
    assert found == expected
    assert "are not learnt" not in notes
    assert spoken(template, FIRST, specials=specials)[0] == [expected[-1].replace("Rome", "Paris")]


def test_rows_that_teach_no_end_are_told():
    template, _ = BEHIND["GLM: nothing"]
    assert "nothing teaches the model to stop in 1 rows" in spoken(template, FIRST)[1]
    ended = EACH + ASKED + "{% endif %}"
    assert "nothing teaches" in spoken(ended, FIRST)[1]
    assert "nothing teaches" not in spoken(ended, FIRST, specials=["<|end|>"], eos="<|end|>")[1]


@pytest.mark.parametrize("form", ["text", "completion"])
def test_a_tokenizer_without_an_end_is_told(form):
    tokenizer = letters()
    tokenizer.eos_token = None
    rows = RowTokenizer(tokenizer, max_length=50)
    fields = {"text": "hello", "prompt": "hello", "completion": " you"}
    rows.example(row_of(DatasetRecord("rows.jsonl:1", fields), form))
    assert "nothing teaches the model to stop in 1 rows: the model's tokenizer" in " ".join(
        rows.notes()
    )


def test_the_models_list_of_ends_counts(tmp_path):
    tokenizer = letters()
    tokenizer.name_or_path = str(tmp_path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 10**6]}))
    tokenizer.chat_template = EACH + ASKED + "{% endif %}"
    rows = RowTokenizer(tokenizer, max_length=90)
    rows.example(row_of(DatasetRecord("rows.jsonl:1", turns(FIRST)), "chat"))
    assert list(rows.notes()) == []


NAMED = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]


@pytest.mark.parametrize(
    ("own", "older", "files", "expected"),
    [
        (None, "older", [], "older"),
        ("own", "older", [], "own"),
        ("own", "older", ["preprocessor_config.json"], "older"),
        ("own", "older", ["processor_config.json"], "older"),
        ("own", "older", ["processor_config.json", "chat_template.jinja"], "jinja"),
        ("own", None, ["processor_config.json"], "own"),
        (None, NAMED, [], {"default": "named", "tool_use": "tools"}),
    ],
)
def test_the_template_is_the_one_that_servers_take(tmp_path, own, older, files, expected):
    tokenizer = letters()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": own}))
    for name in files:
        (tmp_path / name).write_text("jinja" if name.endswith("jinja") else "{}")
    if older:
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": older}))
    assert read_tokenizer(tmp_path).chat_template == expected


@pytest.mark.parametrize("words", ["{}", "[]", '{"chat_template": ""}', '{"chat_template": [{}]}'])
def test_a_file_for_a_template_without_one_is_named(tmp_path, words):
    letters().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.json").write_text(words)
    (tmp_path / "processor_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"chat_template.json has no `chat_template`"):
        read_tokenizer(tmp_path)


def test_an_answer_of_which_the_template_writes_nothing_is_refused():
    parts = (
        "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}{{ part.text }}"
        "{% endfor %}</s>{% endfor %}" + ASKED + "{% endif %}"
    )
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* writes nothing of messages\[1\]"):
        spoken(parts, FIRST)


@pytest.mark.parametrize("learn_all", [False, True])
def test_a_template_with_marks_that_writes_nothing_of_an_answer_is_refused(learn_all):
    parts = (
        "{% for m in messages %}<|{{ m.role }}|>{% generation %}{% for part in m.content %}"
        "{{ part.text }}{% endfor %}</s>{% endgeneration %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* writes nothing of messages\[1\]"):
        spoken(parts, FIRST, learn_all=learn_all)


CALLED = (*FIRST, ("tool", "4711"), ("assistant", "Rome it is"))
# Command A's form: it writes nothing of a tool's turn, and a question behind each text.
DEAF = (
    "{% for m in messages if m.role != 'tool' %}<|turn|><|{{ m.role }}|>{{ m.content }}</s>"
    "{% endfor %}<|turn|><|assistant|>"
)


def test_turns_of_which_the_template_writes_nothing_are_told_and_teach_no_question():
    found, notes = spoken(DEAF, CALLED, specials=("<|turn|>", "<|user|>", "<|assistant|>"))
    assert found == ["Hello Paris</s>", "Rome it is</s>"]
    assert "turns are not in the text: the model's chat template writes nothing of them" in notes
    assert "rows.jsonl:1" in notes
    assert "not in the text" not in spoken(EACH + ASKED + "{% endif %}", CALLED)[1]


def test_thoughts_that_the_template_leaves_out_are_told():
    thought = (("user", "Greet Paris"), ("assistant", "<think>\nIn French?\n</think>\n\nSalut"))
    cuts = EACH.replace("m.content", "m.content.split('</think>')[-1]") + ASKED + "{% endif %}"
    assert "answers are learnt without a part" in spoken(cuts, thought)[1]
    moves = EACH.replace("m.content", "m.content.replace('\n', '')") + ASKED + "{% endif %}"
    assert "without a part" not in spoken(moves, thought)[1]


def test_where_asking_and_writing_differ_the_difference_is_shown():
    thinks = EACH + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    with pytest.raises(UserError, match=r"it asks by '<think>', and writes nothing there"):
        spoken(thinks, FIRST)
    # As SGLang's for DeepSeek V3.1: the two differ by blanks.
    indented = EACH.replace("m.content", "(' ' * 8 if m.role == 'assistant' else '') + m.content")
    with pytest.raises(UserError, match=r"it asks by '\(\)', and writes ' {4}' there"):
        spoken(indented + ASKED + "    (){% endif %}", FIRST)


DATED = "{{ strftime_now('%d %b %Y') }}" + PLAIN


def test_a_template_sees_the_time_at_which_the_job_began():
    tokenizer = letters()
    tokenizer.chat_template = DATED
    begun = datetime(2024, 2, 29, 23, 59, tzinfo=UTC)
    rows = RowTokenizer(tokenizer, max_length=500, now=begun)
    made = rows.example(row_of(DatasetRecord("rows.jsonl:1", turns(TALK)), "chat"))
    assert tokenizer.decode(made.ids).startswith("29 Feb 2024")
    (note,) = rows.notes()
    assert "the date" in note
    assert "29 Feb 2024" in note
    assert rows.unlike_before
    # Rendering by the same tokenizer elsewhere sees the clock.
    assert "2024" not in tokenizer.apply_chat_template(turns(TALK)["messages"], tokenize=False)


@pytest.mark.parametrize(
    "draws",
    [
        "{{ ['a', 'b', 'c', 'd', 'e', 'f', 'g'] | random }}",
        "{{ lipsum(n=1, html=False, min=3, max=9) }}",
    ],
)
def test_what_a_template_draws_by_chance_follows_from_the_row(draws):
    tokenizer = letters()
    tokenizer.chat_template = f"{draws}{PLAIN}"
    before = random.getstate()
    ids = {example(tokenizer, "chat", turns(LONGER)).ids for _ in range(8)}
    assert len(ids) == 1
    assert random.getstate() == before


TWICE = (*FIRST, ("assistant", "Once more"), *BOTH[2:])
MARKS = ("<|end|>", "<|turn|>", "<|user|>", "<|assistant|>")
# By how templates ask behind an answer: what is learnt of two answers in a row, and one more.
ANSWERED_TWICE = {
    "vLLM's ChatML: by no header": (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
        "{% if add_generation_prompt or not loop.last %}</s>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|turn|>assistant\n"
        "{{ '' }}{% endif %}",
        ["Hello Paris</s>", "Once more</s>", "Hello Rome"],
    ),
    "Falcon: by no header, in words": (
        "{% for m in messages %}{{ '' if loop.first else '\n' }}{{ m.role.title() }}: "
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ '\n' }}"
        "{% if messages[-1].role != 'assistant' %}Assistant: {% endif %}{% endif %}",
        ["Hello Paris", "Once more", "Hello Rome"],
    ),
    "Apriel: by no header, behind an end": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|assistant|>"
        "{% endif %}",
        ["Hello Paris</s>\n", "Once more</s>\n", "Hello Rome</s>\n"],
    ),
    "ToolACE: by a header, whoever has spoken, and whether asked or not": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}<|assistant|>",
        None,
    ),
    "Phi-4-mini: the same with a turn that begins by the question": (
        "{% for m in messages %}<|turn|><|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
        "<|turn|><|assistant|>",
        ["Hello Paris</s>", "Once more</s>", "Hello Rome</s>"],
    ),
}


@pytest.mark.parametrize("how", ANSWERED_TWICE)
def test_answers_behind_answers_hold_no_header(how):
    template, expected = ANSWERED_TWICE[how]
    found, notes = spoken(template, TWICE, specials=MARKS)
    assert found == (expected or ["Hello Paris</s>", "Once more</s>", "Hello Rome</s>"])
    assert "are not learnt" not in notes
    # The second of two is the last one as well.
    assert spoken(template, TWICE[:3], specials=MARKS)[0][0] == found[0]
    assert "assistant" not in "".join(spoken(template, TWICE[:3], specials=MARKS)[0]).lower()


def test_what_follows_a_stop_of_the_last_turn_is_not_learnt():
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = BEHIND["Phi-3: an end of the text where nothing is asked"][0]
    read = Conversations(tokenizer, learn_all=False, stops=("</s>", "<|end|>"))
    for talk, last in ((FIRST, "Hello Paris<|end|>\n"), (BOTH, "Hello Rome<|end|>\n")):
        rendered = read.rendered(row_of(DatasetRecord("rows.jsonl:1", turns(talk)), "chat"))
        begin, end = rendered.learnt[-1]
        assert rendered.text[begin:end] == last
    assert read.unlike_before == "what follows the last answer is not learnt"


@pytest.mark.parametrize("form", ["completion", "preference"])
def test_answers_to_a_prompt_hold_no_question_behind_them(form):
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = BEHIND["Command A: a question that nobody has asked"][0]
    user, *answers = (
        [{"role": role, "content": content}] for role, content in (*FIRST, ("assistant", "No"))
    )
    names = {"completion": ("completion",), "preference": ("chosen", "rejected")}[form]
    fields = {"prompt": user, **dict(zip(names, answers, strict=False))}
    row = row_of(DatasetRecord("rows.jsonl:1", fields), form)
    for each, said in ((row, "Hello Paris</s>"), (row.rejected, "No</s>")):
        if each is not None:
            rendered = Conversations(tokenizer, learn_all=False).rendered(each)
            assert [rendered.text[begin:end] for begin, end in rendered.learnt] == [said]


ADDRESS = "<function f at 0x7fab6a38d4e0>"


@pytest.mark.parametrize(
    "wrong", ["{{ messages | map(attribute='role') }}", "{{ raise_exception }}", "{{ 'a'.upper }}"]
)
def test_a_template_that_writes_an_address_is_refused_and_a_row_may_hold_one(wrong):
    with pytest.raises(UserError, match=r"rows.jsonl:1: .* which is another in each run"):
        spoken(wrong + EACH + ASKED + "{% endif %}", FIRST)
    asked = (("user", f"What is {ADDRESS}?"), FIRST[1])
    assert spoken(EACH + ASKED + "{% endif %}", asked)[0] == ["Hello Paris<|end|>\n"]


# Laguna's form: the mark holds the header, and what is asked by depends on a setting.
HEADER_MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>"
    "{{ '<think>' + m.thought + '</think>' if m.thought else '</think>' }}{{ m.content }}</s>"
    "{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|></think>{% endif %}"
)


def test_a_header_in_a_templates_mark_is_not_learnt():
    found, notes = spoken(HEADER_MARKED, BOTH, specials=MARKS)
    assert found == ["Hello Paris</s>", "Hello Rome</s>"]
    assert "servers ask for them otherwise" not in notes


def test_marked_answers_that_are_asked_for_otherwise_are_told():
    tokenizer = letters()
    tokenizer.add_special_tokens({"additional_special_tokens": [*MARKS, "<think>", "</think>"]})
    tokenizer.chat_template = HEADER_MARKED
    rows = RowTokenizer(tokenizer, max_length=900)
    fields = turns(BOTH)
    fields["messages"][1]["thought"] = "Which one?"
    made = rows.example(row_of(DatasetRecord("rows.jsonl:1", fields), "chat"))
    said = tokenizer.decode([made.ids[at] for at in learnt(made)])
    assert said == "<think>Which one?</think>Hello Paris</s>Hello Rome</s>"
    assert "1 answers are learnt as the model's chat template marks them, and servers ask" in (
        " ".join(rows.notes())
    )


def test_a_template_that_reads_tools_in_every_row_says_so():
    needs = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + PLAIN
    with pytest.raises(UserError, match="Give each row its `tools`"):
        spoken(needs, FIRST)
    with pytest.raises(UserError, match="Write the turns, and their order"):
        spoken("{{ none | length }}", FIRST)


def test_a_difference_is_shown_from_the_begin_of_its_token():
    asks = EACH.replace("<|end|>", "</s>") + "{% if add_generation_prompt %}<|user|>{% endif %}"
    with pytest.raises(UserError, match=r"'<\|user\|>', and writes '<\|assistant\|>' there"):
        spoken(asks, FIRST, specials=MARKS)


# Sarashina's form: it writes nothing of others, and asks by a header behind a user's turn alone.
ASKS_USERS = (
    "{% for m in messages if m.role in ('user', 'assistant') %}### {{ m.role.title() }}: "
    "{{ m.content }}\n{% endfor %}{% if messages[-1].role == 'user' %}### Assistant:{% endif %}"
)


@pytest.mark.parametrize(
    ("talk", "expected"),
    [
        (CALLED, [" Hello Paris\n", " Rome it is\n"]),
        ((("system", "Be kind"), FIRST[1], *BOTH[2:]), [" Hello Paris\n", " Hello Rome\n"]),
        ((("system", "Be kind"), FIRST[1]), [" Hello Paris\n"]),
    ],
)
def test_answers_behind_others_than_users_hold_no_header(talk, expected):
    assert spoken(ASKS_USERS, talk)[0] == expected
    tokenizer = letters()
    tokenizer.chat_template = ASKS_USERS
    messages = turns(talk)["messages"]
    fields = {"prompt": messages[:-1], "completion": messages[-1:]}
    row = row_of(DatasetRecord("rows.jsonl:1", fields), "completion")
    rendered = Conversations(tokenizer, learn_all=False).rendered(row)
    assert [rendered.text[begin:end] for begin, end in rendered.learnt] == expected[-1:]


@pytest.mark.parametrize(
    ("template", "talk", "told"),
    [
        (ASKS_USERS, CALLED, "answers are learnt without a header before them"),
        (HEADER_MARKED, BOTH, "answers are learnt without a header before them"),
        (
            BEHIND["Phi-3: an end of the text where nothing is asked"][0],
            BOTH,
            "answers are learnt to the end of their turn",
        ),
        (EACH + ASKED + "{% endif %}", BOTH, ""),
    ],
)
def test_answers_that_are_recognised_otherwise_are_told_with_their_first_row(template, talk, told):
    _, notes = spoken(template, talk, specials=MARKS)
    assert told in notes
    assert ("(first in rows.jsonl:1)" in notes) == bool(told)


def test_an_error_shows_nothing_of_what_is_said():
    thinks = "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning }}{{ m.content }}{% endfor %}"
    tokenizer = letters()
    tokenizer.chat_template = thinks + ASKED + "<think>{% endif %}"
    fields = turns(FIRST)
    fields["messages"][1]["reasoning"] = "Which one?"
    with pytest.raises(UserError, match="it asks by '<think>', and writes nothing there") as caught:
        example(tokenizer, "chat", fields)
    assert "Which" not in str(caught.value)


def test_thoughts_that_end_with_the_word_of_a_header_are_learnt():
    thinks = EACH.replace(
        "m.content", "(m.reasoning ~ '</think>') * (m.role == 'assistant') ~ m.content"
    )
    tokenizer = letters()
    tokenizer.chat_template = thinks + ASKED + "{% endif %}"
    fields = turns(CALLED)
    fields["messages"][1]["reasoning"] = ""
    fields["messages"][3]["reasoning"] = "That is for the assistant"
    row = row_of(DatasetRecord("rows.jsonl:1", fields), "chat")
    rendered = Conversations(tokenizer, learn_all=False).rendered(row)
    begin, end = rendered.learnt[-1]
    assert rendered.text[begin:end].startswith("That is for the assistant</think>Rome it is")


def test_a_template_that_changes_a_value_is_refused_with_what_to_do():
    changes = "{% set found = [] %}{% if tools %}{% set _ = found.append(1) %}{% endif %}" + PLAIN
    tokenizer = letters()
    tokenizer.chat_template = changes
    with pytest.raises(
        UserError, match=r"'list' object is unsafe\. Correct chat_template"
    ) as caught:
        example(tokenizer, "chat", {**turns(FIRST), "tools": [WEATHER]})
    assert caught.value.field == "rows.jsonl:1"
    assert spoken(changes, FIRST)[0] == ["Hello Paris</s>\n"]


# As Llama 4's: a turn that has a list of calls writes them, and is none of text.
CALLING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.tool_calls is not defined and "
    "m.function_call is not defined %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("none", [{"tool_calls": []}, {"tool_calls": "[]", "function_call": {}}])
def test_a_list_of_no_calls_is_none(none):
    tokenizer = letters()
    tokenizer.chat_template = CALLING
    fields = turns(FIRST)
    expected = example(tokenizer, "chat", fields)
    fields["messages"][1] |= none
    rows = RowTokenizer(tokenizer, max_length=500)
    assert rows.example(row_of(DatasetRecord("rows.jsonl:1", fields), "chat")) == expected
    assert "calls" in rows.unlike_before


# As SGLang's for DeepSeek V4: it knows thoughts, and writes them where a setting says so.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if thinking and m.reasoning_content %}"
    "{{ m.reasoning_content }}</think>{% endif %}{% if m.role == 'assistant' %}GENERATION"
    "{{ m.content }}</s>END{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("marks", [("", ""), ("{% generation %}", "{% endgeneration %}")])
@pytest.mark.parametrize("learn_all", [False, True])
def test_thoughts_in_their_own_field_that_are_left_out_are_told(marks, learn_all):
    template = THINKING.replace("GENERATION", marks[0]).replace("END", marks[1])
    fields = turns(FIRST)
    fields["messages"][1]["reasoning_content"] = "Which one?"
    for settings in ({}, {"thinking": True}):
        tokenizer = letters()
        tokenizer.chat_template = template
        rows = RowTokenizer(tokenizer, max_length=500, learn_all=learn_all)
        given = {**fields, "chat_template_kwargs": settings}
        rows.example(row_of(DatasetRecord("rows.jsonl:1", given), "chat"))
        told = "1 answers are learnt without a part" in " ".join(rows.notes())
        assert told == (not settings)


def test_an_answer_whose_words_the_template_has_itself_is_refused_where_it_is_not_written():
    judges = "Say yes or no.<|user|>{{ messages[0].content }}<|end|>\n<|assistant|>"
    for learn_all in (False, True):
        with pytest.raises(UserError, match=r"writes nothing of messages\[1\]"):
            spoken(judges, (("user", "Paris?"), ("assistant", "yes")), learn_all=learn_all)
