"""What it costs to encode conversations with their targets, against the tokenizer's own call.

    python benchmarks/chat.py

Conversations of 1 and 4 questions with answers (3 and 15 lines of the standard library) and a system prompt, 128 in a
batch. `apply_chat_template` is the tokenizer's call on the batch: for a template with generation marks
with `return_assistant_tokens_mask=True`; for the others the plain call, which knows of no targets. `encode` is what
PackedDataset does with the same batch: it reads the messages, renders, tokenizes, finds the answers, and makes arrays
of ids and targets. In turns, batch by batch, either one first, in one process. Ratio: median over the batches of the
time of one by that of the other; CPU: the same of CPU time, which other programs disturb less.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from data import exit_status, show, show_versions, snippets, tokenizer

BATCH = 128
BATCHES = 3
ROUNDS = 24
WANTED = 1.10

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
MARKED = CHATML.replace(
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}{% else %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endif %}",
)
LLAMA = """\
{%- for message in messages -%}
{{ '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant<|end|>\\n\\n' }}{%- endif -%}
"""
THINKING = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.index0 > ns.last -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}
{{ message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
TEMPLATES = {"ChatML": CHATML, "ChatML with marks": MARKED, "Llama 3 (strips)": LLAMA, "Qwen 3 (thinks last)": THINKING}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>"]


def conversations(asked: list[str], answered: list[str], *, questions: int) -> list[list[dict[str, str]]]:
    choose = np.random.default_rng(questions)
    found = []
    for _ in range(BATCH * BATCHES):
        messages = [{"role": "system", "content": "You are a helpful assistant."}]
        for _ in range(questions):
            messages.append({"role": "user", "content": asked[choose.integers(len(asked))]})
            messages.append({"role": "assistant", "content": answered[choose.integers(len(answered))]})
        found.append(messages)
    return found


def seconds(call: Callable[[int], object], first: int) -> tuple[float, float]:
    begin, cpu = time.perf_counter(), time.process_time()
    call(first)
    return time.perf_counter() - begin, time.process_time() - cpu


def compare(template: str, chats: list[list[dict[str, str]]], its_tokenizer: Any) -> tuple[int, np.ndarray]:
    """(tokens, [runs, 2, 2]: of ours and theirs wall and CPU seconds of each run)"""
    from streampack.encode import Encoder, Policies
    from streampack.sources import SequenceSource
    from streampack.tables import Block, Position

    its_tokenizer.chat_template = template
    marks = {"return_assistant_tokens_mask": True} if "generation %}" in template else {}
    encoder = Encoder(
        its_tokenizer, format="messages", text_column="text", append_eos="auto", limit=None, policies=Policies()
    )
    block = Block(
        source=SequenceSource([], name="chats"),
        position=Position(0, 0, 0, 0),
        shards=np.zeros(len(chats), dtype=np.int64),
        indices=np.arange(len(chats)),
        data=[{"messages": chat} for chat in chats],
    )

    def ours(first: int) -> object:
        return encoder.encode(block, range(first, first + BATCH))

    def theirs(first: int) -> object:
        return its_tokenizer.apply_chat_template(chats[first : first + BATCH], return_dict=True, **marks)

    tokens = sum(len(one.ids) for first in range(0, len(chats), BATCH) for one in ours(first))  # also warms up
    theirs(0)
    runs = []
    for turn in range(ROUNDS):
        for first in range(0, len(chats), BATCH):
            pair = [ours, theirs] if turn % 2 else [theirs, ours]
            taken = {call: seconds(call, first) for call in pair}
            runs.append([taken[ours], taken[theirs]])
    return tokens, np.array(runs)


def main() -> int:
    show_versions()
    its_tokenizer = tokenizer()
    its_tokenizer.add_tokens(SPECIAL, special_tokens=True)
    lines: list[list[object]] = []
    asked, answered = snippets(20_000), snippets(20_000, size=15)
    for questions in (1, 4):
        chats = conversations(asked, answered, questions=questions)
        for name, template in TEMPLATES.items():
            tokens, runs = compare(template, chats, its_tokenizer)
            ratios = runs[:, 0] / runs[:, 1]
            ratio, cpu = np.median(ratios, axis=0)
            ours, theirs = np.median(runs[:, :, 0], axis=0) * 1000
            spread = f"{np.quantile(ratios[:, 0], 0.25):.2f} .. {np.quantile(ratios[:, 0], 0.75):.2f}"
            verdict = "ok" if ratio <= WANTED else "MISS"
            size = tokens // len(chats)
            lines.append(
                [
                    questions,
                    name,
                    size,
                    f"{ours:.1f}",
                    f"{theirs:.1f}",
                    f"{ratio:.2f}",
                    spread,
                    f"{cpu:.2f}",
                    WANTED,
                    verdict,
                ]
            )
    print(f"Milliseconds for a batch of {BATCH} conversations:\n")
    head = ["questions", "template", "tokens each", "encode", "apply_chat_template", "ratio", "middle half", "CPU"]
    show([*head, "wanted", "verdict"], lines)
    return exit_status(lines)


if __name__ == "__main__":
    sys.exit(main())
