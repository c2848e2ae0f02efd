"""A drafter of your own: propose what followed the last token the previous time.

python 03_write_a_drafter.py [TARGET]
"""

import sys

from transformers import AutoTokenizer

import foredraft


class Echo(foredraft.Drafter):
    name = "echo"
    summary = "what followed the last token the previous time"

    def draft(self, request: foredraft.DraftRequest) -> foredraft.TokenTree:
        return request.chains([self.after(row.ids) for row in request.rows])

    def after(self, ids: list[int]) -> list[int]:
        last = next((index for index in range(len(ids) - 2, -1, -1) if ids[index] == ids[-1]), None)
        return [] if last is None else ids[last + 1 :]


target = sys.argv[1] if len(sys.argv) > 1 else str(foredraft.zoo.path("python-8m"))
tokenizer = AutoTokenizer.from_pretrained(target)
inputs = tokenizer("def area(width, height):\n    return width * height\n\ndef", return_tensors="pt")

plain = foredraft.Speculator(target, drafter="none", dtype="float32")
echo = foredraft.Speculator(target, drafter=Echo(), draft_length=4, dtype="float32")
expected = plain.generate(**inputs, max_new_tokens=48, do_sample=False)
drafted = echo.generate(**inputs, max_new_tokens=48, do_sample=False)

print(tokenizer.decode(drafted.sequences[0], skip_special_tokens=True))
print(f"--- {drafted.stats.accepted} of {drafted.stats.drafted} draft tokens accepted")
assert drafted.sequences.tolist() == expected.sequences.tolist()  # a drafter changes the speed, never the text
