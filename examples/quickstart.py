"""Pack a stream, train on it, save where the stream is, go on from there: the example of the README, in small.

    python examples/quickstart.py    # seconds on a CPU, without network

Prints the loss of each step, what the rows held, and that the resumed stream went on with the next batch.
"""

import os
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import streampack

# The lines of Python's standard library as a stream, a token for each byte. Yours: load_dataset("some/dataset",
# split="train", streaming=True) and AutoTokenizer.from_pretrained("some/model").
source = load_dataset("text", data_files=str(Path(os.__file__).parent / "*.py"), split="train", streaming=True)
tokenizer = ByT5Tokenizer()

dataset = streampack.PackedDataset(source, tokenizer, seq_len=256, epochs=None)
loader = streampack.PackedLoader(dataset, batch_size=4, layout="rows")  # layout="flat" for flash attention

config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

batches = iter(loader)
for step in range(1, 21):
    loss = model(**next(batches)).loss  # examples in a row do not see each other
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")
stats = loader.stats
print(f"{stats['rows']} rows held {stats['tokens']} tokens of {stats['segments']} examples, fill {stats['fill']:.4f}")

state = loader.state_dict()  # plain values: torch.save it beside the model
expected = next(batches)

loader.load_state_dict(state)  # here, or in another process, on another number of GPUs and workers
resumed = next(iter(loader))
assert torch.equal(resumed["input_ids"], expected["input_ids"])
_, file, line = loader.provenance[0][0]  # which examples are in the row
print(f"resumed with the next batch, which begins with line {line + 1} of {os.path.basename(file)}")
