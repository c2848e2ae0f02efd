"""Makes the model in this folder: random weights, a byte-level tokenizer, and a chat template that knows tools. ``python make.py``"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
WORDS = ("the", "user", "assistant", "system", "hello", "tool", "call", "name", "arguments", "city", "Paris")
TEMPLATE = """{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if no_thinking %}<think></think>{% endif %}{% endif %}"""


def merges_of(words):
    """Merges that build each word letter by letter."""
    found = []
    for word in words:
        found += [(word[:end], word[end]) for end in range(1, len(word)) if (word[:end], word[end]) not in found]
    return found


def main():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges_of(WORDS)
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys([*letters, *(a + b for a, b in merges)]))}
    tokenizer = Tokenizer(BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        model_max_length=2048,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(FOLDER)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(fast), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=2048, initializer_range=0.4, eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id,
        bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=fast.eos_token_id, pad_token_id=fast.pad_token_id)
    model.save_pretrained(FOLDER)


if __name__ == "__main__":
    main()
