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

for drafter, shape in (("none", None), (f"draft-model:{draft}", "chain(5)")):  # without a shape, measured speed decides in every round
    speculator = foredraft.Speculator(target, drafter=drafter, shape=shape)
    out = speculator.generate(**inputs, max_new_tokens=64, do_sample=False)
    print(tokenizer.decode(out.sequences[0], skip_special_tokens=True))
    print(
        f"--- {drafter}: {out.stats.target_passes} forward passes for {out.stats.new_tokens} tokens, "
        f"{out.stats.acceptance_length:.2f} tokens per pass, {out.stats.tokens_per_second:.0f} tokens/s\n"
    )
    speculator.close()
