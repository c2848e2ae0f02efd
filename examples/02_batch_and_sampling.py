"""A sampled batch: seeds, a tree of draft tokens, log-probabilities, streaming.

python 02_batch_and_sampling.py [TARGET [DRAFT]]
"""

import sys

from transformers import AutoTokenizer

import foredraft

embedded = (str(foredraft.zoo.path("python-8m")), str(foredraft.zoo.path("python-1m")))
target, draft = (*sys.argv[1:3], *embedded[len(sys.argv[1:3]) :])

tokenizer = AutoTokenizer.from_pretrained(target, padding_side="left")
prompts = ["class Stack:\n    ", "import os\n", "def mean(values):\n    return "]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
sampling = {"max_new_tokens": 32, "do_sample": True, "temperature": 0.8, "top_p": 0.95, "seed": 7}

# Four candidates for the next token, two after each, one after each of those: one forward pass scores all of them.
speculator = foredraft.Speculator(target, drafter=f"draft-model:{draft}", shape="product(4,2,1)")
out = speculator.generate(**inputs, **sampling, output_logprobs=2)
for text, row, logprobs in zip(tokenizer.batch_decode(out.sequences, skip_special_tokens=True), out.stats.rows, out.logprobs):
    print(f"{text}\n--- {row.acceptance_length:.2f} tokens per pass; first token has log-probability {logprobs.chosen[0]:.2f}\n")
print(f"rule: {out.stats.rule}; lossless: {out.stats.lossless}")

# With the match rule the text depends on the seed alone: not on the drafter, not on the shape.
texts = []
for drafter, shape in ((f"draft-model:{draft}", "chain(4)"), ("prompt-lookup", "product(2,2)"), ("none", "chain(0)")):
    each = foredraft.Speculator(target, drafter=drafter, shape=shape, rule="match", dtype="float32")
    texts.append(each.generate(**inputs, **sampling).sequences.tolist())
assert texts[0] == texts[1] == texts[2]

# Tokens arrive in groups: those that one round kept.
for tokens in speculator.stream(**tokenizer("class Queue:", return_tensors="pt"), **sampling):
    print(repr(tokenizer.decode(tokens)), end=" ", flush=True)
print()
