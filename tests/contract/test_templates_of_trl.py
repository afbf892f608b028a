"""Each chat template that TRL keeps of real models: what is learnt is the answers, to their ends.

The vocabulary knows letters, and the marks that a template writes, as tokens; a checkpoint would
name them. The answers and the questions are words that no template has of its own.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.vocabularies import letters

from windrow.errors import UserError
from windrow.rows import DatasetRecord, row_of
from windrow_sidecar.finetune.data.conversation import Conversations

TEMPLATES = Path(sys.prefix) / "trl" / "trl" / "chat_templates"
# Tokens of the templates: in bars, angles or brackets, and those of Gemma 4.
TOKENS = re.compile(
    r"<[|\uff5c][^|\uff5c<>\n'\"]{1,40}[|\uff5c]>|<\|turn>|<turn\|>|<[a-z_]*_of_[a-z_]*>|</?think>"
)
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eot|>", "<turn|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "<|return|>", "<|end|>", "<end_of_utterance>"),
)
ASKED, ANSWERS = ("Quux one", "Quux two"), ("Zyzzyva one", "Zyzzyva two")
PLAIN = tuple(
    {"role": role, "content": content}
    for pair in zip(ASKED, ANSWERS, strict=True)
    for role, content in zip(("user", "assistant"), pair, strict=True)
)
# A call's answer comes back as a turn that some templates do not write.
CALLED = (*PLAIN[:2], {"role": "tool", "content": "Quux two"}, PLAIN[3])
# The next turn's begin: no answer ends with it.
HEADER = re.compile(r"user|assistant|chatbot|model|tool|start", re.IGNORECASE)


def learnt(template: str, turns) -> tuple[list[str], Conversations]:
    """Return the parts of a conversation's text that are learnt."""
    tokenizer = letters()
    tokens = sorted(set(TOKENS.findall(template)))
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.eos_token = next((end for end in ENDS if end in tokens), tokenizer.eos_token)
    tokenizer.chat_template = template
    row = row_of(DatasetRecord("rows.jsonl:1", {"messages": list(turns)}), "chat")
    read = Conversations(tokenizer, learn_all=False, stops=(tokenizer.eos_token,))
    rendered = read.rendered(row)
    return [rendered.text[begin:end] for begin, end in rendered.learnt], read


@pytest.mark.extended
@pytest.mark.parametrize("turns", [PLAIN, CALLED], ids=["plain", "called"])
def test_the_answers_of_each_template_are_learnt_and_nothing_of_others(turns):
    if not TEMPLATES.is_dir():
        pytest.skip("TRL is not beside the environment: make test installs it there")
    wrong, read = {}, 0
    for path in sorted(TEMPLATES.glob("*.jinja")):
        if path.stem.endswith("_training"):
            continue  # it marks what is learnt
        try:
            parts, said = learnt(path.read_text(), turns)
        except UserError as refused:
            if refused.field != "rows.jsonl:1" or not refused.remedy:
                wrong[path.stem] = str(refused)
            continue
        read += 1
        lost = 2 - len(parts) - said.unasked.count - said.rewritten.count
        if lost or any("Quux" in part for part in parts):
            wrong[path.stem] = parts
        for part in parts:
            answer = next((each for each in ANSWERS if each in part), None)
            if answer is None or HEADER.search(part.partition(answer)[2]):
                wrong[path.stem] = parts
    assert not wrong
    assert read >= 10
