"""Greedy text with a draft model, compared with plain decoding.

python 01_generate.py [TARGET [DRAFT]]
"""

import sys

from transformers import AutoTokenizer

import foredraft

embedded = (str(foredraft.zoo.path("python-8m")), str(foredraft.zoo.path("python-1m")))
target, draft = (*sys.argv[1:3], *embedded[len(sys.argv[1:3]) :])

tokenizer = AutoTokenizer.from_pretrained(target)
inputs = tokenizer("def read_lines(path):\n    ", return_tensors="pt")

for drafter in ("none", f"draft-model:{draft}"):  # measured speed decides in every round how much is drafted
    speculator = foredraft.Speculator(target, drafter=drafter)
    out = speculator.generate(**inputs, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
    print(f"--- {drafter}: {out.stats.tokens_per_second:.0f} tokens/s, {out.stats.summary()}\n")
    speculator.close()
