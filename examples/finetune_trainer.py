"""Fine-tune a chat model with Transformers' Trainer on packed conversations; stop it and go on.

    python examples/finetune_trainer.py                                # a minute on a CPU, without network
    python examples/finetune_trainer.py                                # after Ctrl-C or kill -9: the same run goes on
    torchrun --nproc-per-node 2 examples/finetune_trainer.py           # on two processes

(On a CPU, Transformers 4.57 cannot load the optimizer's state in several processes: there start two, and go on in one.)

The conversations are made here: letters to sort, and the answer. Only the tokens of answers are targets (the
tokenizer's chat template says which). They are packed into rows of 256 tokens, six or so in each, and do not see each
other. The set is trained on `--epochs` times, each conversation once in each epoch. Prints the loss and the tokens
that were trained on, the loss on held-out conversations after each epoch, and at the end how the model answers.
`--out` gets the Trainer's checkpoints, with a stream.json in each.
"""

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainingArguments, set_seed

import streampack
from streampack.trainer import PackedTrainer, count_steps, newest_checkpoint

TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message.role }}|>{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>"
    "{% endgeneration %}{% else %}{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--conversations", type=int, default=3000)
    parser.add_argument("--batch-size", type=int, default=4, help="rows in a batch of a process")
    parser.add_argument("--accumulate", type=int, default=2, help="batches in a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("runs/finetune_trainer"))
    return parser.parse_args()


def conversations(count: int, *, seed: int) -> Dataset:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        letters = draw.sample("abcdefghijklmnopqrstuvwxyz", draw.randint(3, 8))
        question = {"role": "user", "content": f"Sort {''.join(letters)}!"}
        rows.append({"messages": [question, {"role": "assistant", "content": "".join(sorted(letters))}]})
    return Dataset.from_list(rows)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and those of the chat template."""
    bytes_ = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=bytes_, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)


def packed(source: Dataset, tokenizer: PreTrainedTokenizerFast, name: str) -> streampack.PackedDataset:
    def encode(conversation: dict[str, Any]) -> dict[str, Any]:
        """The token ids, and which of them the assistant says."""
        return dict(
            tokenizer.apply_chat_template(
                conversation["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        )

    # Few lanes, since each ends the last epoch with a part-filled row; with a name, since the data are made anew.
    return streampack.PackedDataset(source, seq_len=256, lanes=4, transform=encode, source_name=name)


def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(model.device)
    length = prompt["input_ids"].shape[1]
    ids = model.generate(
        input_ids=prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return tokenizer.decode(ids[0, length:], skip_special_tokens=True)


def main() -> None:
    args = parse_arguments()
    tokenizer = make_tokenizer()
    train = packed(conversations(args.conversations, seed=0), tokenizer, f"{args.conversations} to sort, seed 0")
    held_out = packed(conversations(200, seed=1), tokenizer, "200 to sort, seed 1")
    arguments = TrainingArguments(
        output_dir=str(args.out),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        logging_steps=10,
        save_steps=args.save_every,
        save_total_limit=2,
        eval_strategy="epoch",
        prediction_loss_only=True,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),  # without it several processes on CPUs would train a model each
    )
    arguments.max_steps = count_steps(train, arguments)  # packs the epochs once, without training, to know
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer = PackedTrainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=train, eval_dataset=held_out)
    newest = newest_checkpoint(args.out)
    if newest is not None and trainer.is_world_process_zero():
        print(f"goes on from {newest}", flush=True)
    trainer.train(resume_from_checkpoint=newest)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps, held-out loss {loss:.6f}")
        trainer.model.eval()
        for question in ("Sort hgfedc!", "Sort python!"):
            with torch.no_grad():
                print(f"{question} {answer(trainer.model, tokenizer, question)}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
