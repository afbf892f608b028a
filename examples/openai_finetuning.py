"""Finetune with OpenAI's client on your own cluster, cell by cell.

Editors that know `# %%` run it like a notebook; `python examples/openai_finetuning.py` runs it as a
whole. It reads OPENAI_BASE_URL and OPENAI_API_KEY of `windrow serve-api`, as the client does, and
CHAT_BASE_URL of the server that you already call.
"""

# %% The client: only its address differs from OpenAI's.
import json
import os
import time

from openai import OpenAI

client = OpenAI()
print("models:", [model.id for model in client.models.list()])

# %% Rows: a conversation in each line. Some are kept aside to compare with the base model.
QUESTIONS = {
    "Where is my parcel?": "On its way. You can follow it under Orders.",
    "May I send it back?": "Yes, within 30 days. The label is under Orders.",
    "How do I pay?": "By card or by invoice, at the end of your order.",
    "Do you ship abroad?": "We ship to all of Europe, in three to five days.",
}
SYSTEM = {"role": "system", "content": "You answer for a shop, in at most two sentences."}


def rows_of(questions: list[str]) -> bytes:
    """Return the rows of some questions, as JSON lines."""
    lines = []
    for question in questions:
        turns = [
            SYSTEM,
            {"role": "user", "content": question},
            {"role": "assistant", "content": QUESTIONS[question]},
        ]
        lines.append(json.dumps({"messages": turns}))
    return "\n".join(lines).encode()


*trained_on, kept_aside = QUESTIONS
training = client.files.create(file=("rows.jsonl", rows_of(trained_on)), purpose="fine-tune")
validation = client.files.create(file=("kept.jsonl", rows_of([kept_aside])), purpose="fine-tune")

# %% The job. A field that the server cannot honour is refused by its name.
job = client.fine_tuning.jobs.create(
    model=os.environ.get("BASE_MODEL", "chat"),
    training_file=training.id,
    validation_file=validation.id,
    suffix="shop-tone",
    method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}},
)
print(job.id, job.status)

# %% Follow the job. It waits while decode needs all compute, and resumes from its checkpoint.
seen: set[str] = set()
while job.status not in ("succeeded", "failed", "cancelled"):
    time.sleep(10)
    job = client.fine_tuning.jobs.retrieve(job.id)
    events = list(client.fine_tuning.jobs.list_events(job.id))
    for event in reversed([event for event in events if event.id not in seen]):
        print(event.message)
        seen.add(event.id)
if job.error is not None and job.error.message:
    raise SystemExit(f"{job.error.param}: {job.error.message}")

# %% Losses of each step, as a table.
for result in job.result_files:
    print(client.files.content(result).text)
print("tuned model:", job.fine_tuned_model)

# %% Ask the server that you already call: the base model, and by its own name the tuned one.
if chat_url := os.environ.get("CHAT_BASE_URL"):
    chat = OpenAI(base_url=chat_url)
    tuned = str(job.fine_tuned_model)
    base = tuned.rpartition(":")[0]  # as the server names it; job.model may be its last part
    for model in (base, tuned):
        answer = chat.chat.completions.create(
            model=model, messages=[SYSTEM, {"role": "user", "content": kept_aside}]
        )
        print(model, "says:", answer.choices[0].message.content)

# %% Preferences: two answers to each prompt, of which the first is the better one.
pairs = [
    {
        "input": {"messages": [SYSTEM, {"role": "user", "content": question}]},
        "preferred_output": [{"role": "assistant", "content": answer}],
        "non_preferred_output": [{"role": "assistant", "content": f"Well ... {answer}"}],
    }
    for question, answer in QUESTIONS.items()
]
preferences = client.files.create(
    file=("pairs.jsonl", "\n".join(map(json.dumps, pairs)).encode()), purpose="fine-tune"
)
taste = client.fine_tuning.jobs.create(
    model=os.environ.get("BASE_MODEL", "chat"),
    training_file=preferences.id,
    suffix="shop-taste",
    method={"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1}}},
)
print(taste.id, taste.status)
