"""Shared by the processor tests: ragged batches as `generate` prepares them, options, and `transformers` row by row as reference."""

from __future__ import annotations

import copy
from functools import cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from foredraft.logits.processors import row_pipelines
from foredraft.tree import TokenTree

VOCAB, EOS, PAD = 12, 1, 0
LENGTHS = (7, 1, 4)
PARENTS = torch.tensor(
    [
        [-1, 0, 0, 1, 1, 2, 3, 6],
        [-1, 0, 1, 2, 3, 4, 5, 6],
        [-1, 0, 0, 0, 3, 3, 4, 4],
    ]
)


@cache
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=64
    )
    return LlamaForCausalLM(config).eval()


def random_prompts(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 5, (length,), generator=generator) for length in lengths]  # few tokens, so that n-grams repeat


def padded_batch(prompts, side="left"):
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), PAD), torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        where = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        ids[row, where], mask[row, where] = prompt, 1
    return ids, mask


def prepared(ids, mask, **options):
    """The LogitsProcessorList that `generate` prepares, and the GenerationConfig beside it."""
    seen = {}

    def capture(_, input_ids, logits_processor, generation_config, **kwargs):
        seen.update(processors=logits_processor, config=generation_config)
        return input_ids

    options = {"max_new_tokens": 6, "eos_token_id": EOS, "pad_token_id": PAD, "top_k": 0, **options}
    model().generate(ids, attention_mask=mask, custom_generate=capture, **copy.deepcopy(options))
    return seen["processors"], seen["config"]


class InBatch(LogitsProcessor):
    """The user's code, shown a row alone as it is in the padded batch; a prefix function is asked for the row's batch id."""

    def __init__(self, code, row, padding):
        self.code, self.row, self.padding = code, row, torch.full((1, padding), PAD)

    def __call__(self, input_ids, scores):
        return self.code(torch.cat([self.padding.expand(len(input_ids), -1), input_ids], 1), scores)

    def allowed(self, _, sentence):
        return self.code(self.row, torch.cat([self.padding[0], sentence]))


def references(prompts, options):
    """`transformers`' own list for each row alone; the user's code sees the row as it is in the batch."""
    lists, width = [], max(map(len, prompts))
    for row, prompt in enumerate(prompts):
        mine = dict(options)
        if "prefix_allowed_tokens_fn" in mine:
            mine["prefix_allowed_tokens_fn"] = InBatch(options["prefix_allowed_tokens_fn"], row, width - len(prompt)).allowed
        if "logits_processor" in mine and not any(type(each).__module__ == hf.__name__ for each in mine["logits_processor"]):
            own = [InBatch(each, row, width - len(prompt)) for each in mine["logits_processor"]]
            mine["logits_processor"] = LogitsProcessorList(own)
        lists.append(prepared(prompt[None], torch.ones(1, len(prompt), dtype=torch.long), **mine)[0])
    return lists


def committed_rows(prompts, new=(0, 0, 0), seed=2):
    """``committed [R, capacity]`` with rubbish after each row's prompt and ``new`` further tokens, and the lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [len(prompt) + count for prompt, count in zip(prompts, new)]
    committed = torch.randint(2, VOCAB, (len(prompts), max(lengths) + 3), generator=generator)
    for row, prompt in enumerate(prompts):
        committed[row, : len(prompt)] = prompt
        committed[row, lengths[row] :] = -7
    return committed, lengths


def random_tree(committed, lengths, parents=None, nodes=6, valid=None, seed=3):
    generator = torch.Generator().manual_seed(seed)
    nodes = nodes if parents is None else parents.shape[1]
    tokens = torch.randint(1, 6, (len(lengths), nodes), generator=generator)
    tokens[:, 0] = committed[torch.arange(len(lengths)), torch.tensor(lengths) - 1]
    return TokenTree.from_chain(tokens, valid=valid) if parents is None else TokenTree(tokens, parents, valid)


def node_history(committed, lengths, tree, row, node):
    return torch.cat([committed[row, : lengths[row]], tree.tokens[row, tree.path(row, node)[1:]]])


def expected(lists, logits, committed, lengths, tree):
    scores = logits.float().clone()
    for row, processors in enumerate(lists):
        for node in range(tree.nodes):
            if tree.valid is None or tree.valid[row, node]:
                ids = node_history(committed, lengths, tree, row, node)[None]
                scores[row, node] = processors(ids, logits[row, node].to(torch.float32, copy=True)[None])[0]
    return scores


def random_logits(tree, dtype=torch.float32, seed=4):
    return (3 * torch.randn(tree.rows, tree.nodes, VOCAB, generator=torch.Generator().manual_seed(seed))).to(dtype)


def batch_pipelines(prompts, options, side="left"):
    processors, config = prepared(*padded_batch(prompts, side), **options)
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    return row_pipelines(
        processors,
        prompt_lengths=lengths,
        padded_length=width,
        min_new_tokens=config.min_new_tokens,
        prompts=prompts,
        paddings=[[PAD] * (width - length) for length in lengths],
    )


def prefix_function(row, sentence):
    """Depends on the row, the length and every token of the sentence."""
    return [(int(sentence.sum()) + row + len(sentence) + k) % VOCAB for k in (0, 1, 3, 4, 5, 6, 8, 9)]


class Fingerprint(LogitsProcessor):
    """A user's processor: every token of the history, its place and its length show in the scores. Writes in place."""

    def __call__(self, input_ids, scores):
        position = torch.arange(1, input_ids.shape[1] + 1)
        mark = ((input_ids + 1) * position**2).sum(1, keepdim=True)  # integers: exact however they are grouped
        scores += mark * torch.arange(1, scores.shape[1] + 1) % 7
        return scores


class OwnPenalty(hf.RepetitionPenaltyLogitsProcessor):
    """A subclass of a known class is the user's own."""


SAMPLE = {"do_sample": True}
WARPERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "top_h": {"top_h": 0.6},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.3},
}
CASES = {
    **{name: {**SAMPLE, **options} for name, options in WARPERS.items()},
    "renormalize": {"renormalize_logits": True},
    "suppress": {"suppress_tokens": [3, 5]},
    "begin_suppress": {"begin_suppress_tokens": [3, 5]},
    "begin_suppress_after_forced_bos": {"begin_suppress_tokens": [3, 5], "forced_bos_token_id": 4},
    "forced_bos": {"forced_bos_token_id": 4},
    "forced_eos": {"forced_eos_token_id": [EOS, 9]},
    "min_new_tokens": {"min_new_tokens": 3},
    "min_length": {"min_length": 6},
    "min_length_past_the_padding": {"min_length": 9, "max_new_tokens": 12},
    "exponential_decay": {"exponential_decay_length_penalty": (2, 1.5)},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "own_repetition_penalty": {"logits_processor": LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.4, 2)])},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "no_repeat_trigram": {"no_repeat_ngram_size": 3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.6},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[3], [4, 5], [6, 7], [7, 8, 2], [5, 2]]},
    "sequence_bias": {"sequence_bias": {(a, b): float(a - b) for a in range(2, VOCAB) for b in range(VOCAB)} | {(2,): 1.5}},
    "prefix": {"prefix_allowed_tokens_fn": prefix_function},
    "foreign": {"logits_processor": LogitsProcessorList([Fingerprint()])},
    "own_subclass": {"logits_processor": LogitsProcessorList([OwnPenalty(1.7)])},
    "everything": {
        **SAMPLE,
        "temperature": 0.8,
        "top_k": 8,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[3], [4, 5]],
        "min_new_tokens": 2,
        "forced_eos_token_id": EOS,
        "logits_processor": LogitsProcessorList([Fingerprint()]),
        "renormalize_logits": True,
    },
    "built_in_everything": {
        **SAMPLE,
        "temperature": 0.8,
        "top_k": 8,
        "typical_p": 0.9,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "sequence_bias": {(2, 3): 1.5, (4,): -2.0},
        "min_new_tokens": 2,
        "forced_eos_token_id": EOS,
        "exponential_decay_length_penalty": (1, 1.2),
        "begin_suppress_tokens": [6],
    },
}


def reached(lists, logits, committed, lengths, tree):
    """``[R, N]`` bool: no token above the node, nor its own, got probability 0."""
    p = expected(lists, logits, committed, lengths, tree).softmax(-1)
    keep = torch.ones(tree.rows, tree.nodes, dtype=torch.bool)
    for row in range(tree.rows):
        for node in range(1, tree.nodes):
            parent = tree.parents[row, node]
            keep[row, node] = keep[row, parent] and p[row, parent, tree.tokens[row, node]] > 0
    return keep


def assert_same(scores, reference, keep=None):
    assert scores.dtype == torch.float32
    keep = torch.ones(scores.shape[:2], dtype=torch.bool) if keep is None else keep
    assert torch.equal(scores[keep], reference[keep])
