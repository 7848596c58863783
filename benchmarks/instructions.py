"""Instruction-like examples that every machine has: functions of Python's standard library.

The prompt is signature and docstring, the completion is the body. Or a JSONL file with `prompt` and `completion`.
"""

import ast
import json
import platform
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import data
import numpy as np

IGNORE = -100
VOCABULARY = 2048
Pair = tuple[str, str]


def functions_with_docstrings() -> list[Pair]:
    """(signature and docstring, body) of each function of the standard library that has both, each once. Found once."""

    def write(path: Path) -> None:
        path.write_text("".join(json.dumps(pair) + "\n" for pair in _search_functions()), encoding="utf-8")

    found = Path(data.kept(f"instructions-{platform.python_version()}.jsonl", write))
    return [tuple(json.loads(line)) for line in found.read_text(encoding="utf-8").splitlines()]


def _search_functions() -> list[Pair]:
    return list(dict.fromkeys(pair for text in data.source_files() for pair in pairs_of_source(text)))


def pairs_of_source(text: str) -> list[Pair]:
    """(signature and docstring, body) of each function that has both."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError):  # wrong on purpose, in tests of the standard library
        return []
    lines = text.splitlines(keepends=True)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) and node.body[1:]:
            border = node.body[0].end_lineno
            prompt, body = lines[node.lineno - 1 : border], lines[border : node.end_lineno]
            if body:  # else docstring and body are on one line
                found.append(("".join(prompt), "".join(body)))
    return found


def pairs_of_file(path: str) -> list[Pair]:
    """Of a JSONL file with `prompt` and `completion`, both texts.

    Raises:
        ValueError: naming the line that has not both.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        example = json.loads(line)
        pair = example.get("prompt"), example.get("completion")
        if not all(isinstance(text, str) for text in pair):
            raise ValueError(
                f"{path}, line {number}: needs the texts 'prompt' and 'completion'; it has {sorted(example)}"
            )
        found.append(pair)
    return list(dict.fromkeys(found))


def small_tokenizer(texts: Iterable[str], *, vocabulary: int = VOCABULARY) -> Any:
    """Byte-pair encoding trained on these texts, as a Transformers tokenizer."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = ByteLevelBPETokenizer()
    special = ["<eos>", "<pad>"]
    backend.train_from_iterator(texts, vocabulary, special_tokens=special, show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(backend.to_str()),
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def encode(tokenizer: Any, pairs: Sequence[Pair]) -> list[dict[str, list[int]]]:
    """`input_ids` and `labels`, which are -100 on the prompt. Both texts are encoded apart, so no token spans their
    border; the completion ends with the EOS token."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    bodies = tokenizer([completion for _, completion in pairs], add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [
        {"input_ids": prompt + body + end, "labels": [IGNORE] * len(prompt) + body + end}
        for prompt, body in zip(prompts, bodies, strict=True)
    ]


def split(
    examples: Sequence[dict[str, list[int]]], *, seq_len: int, train: int, held_out: int
) -> tuple[list[dict[str, list[int]]], list[dict[str, list[int]]]]:
    """(for training, held out): so many that fit into a row, chosen at random, always the same ones. Longer ones are
    left out for all ways alike, since some would truncate them.

    Raises:
        ValueError: if there are too few.
    """
    fitting = [example for example in examples if 2 < len(example["input_ids"]) <= seq_len]
    if len(fitting) < train + held_out:
        raise ValueError(
            f"{len(fitting)} of {len(examples)} examples have at most {seq_len} tokens, and {train} are wanted for "
            f"training and {held_out} held out; ask for fewer with --examples"
        )
    order = np.random.default_rng(0).permutation(len(fitting))[: train + held_out].tolist()
    chosen = [fitting[place] for place in order]
    return chosen[held_out:], chosen[:held_out]
