"""A tiny model with random weights that has learnt a few answers by heart.

What it writes after other prompts depends on every token of the prompt, so that a prompt which
changes is found by its answer. It needs numpy and safetensors only, and its files are the same on
every machine.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.float32]

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
FILLING = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")

Answers = dict[str, list[str]]
"""Answers in tokens, by the word of the last message that calls for them.

A token of one character is the byte of that number. After " breaks" the model's numbers overflow;
`count` has no end.
"""
BREAKING = " breaks"
# So many that their text is on its way when the model breaks.
BREAK = [*(f" {number}." for number in range(250)), BREAKING]
COMMON: Answers = {
    "hello": ["Hello", ", how", " are you", "?"],
    "think": ["<think>", "\nIt is", " simple.", "\n</think>", "\n\nThe answer", " is 4", "."],
    "count": [" one", " two", " three", " four", " five", " six", " seven", " eight", " nine",
              " ten", " eleven", " twelve"],
}  # fmt: skip
ANSWERS: Answers = {
    **COMMON,
    "call": ["<tool_call>", '\n{"name": ', '"weather"', ', "arguments": ', '{"city": ', '"Rome"',
             ', "days": ', "3}", "}", "\n</tool_call>"],
    "both": ["<think>\n", "I need", " both.\n", "</think>\n\n", "Let me see", ":\n", "<tool",
             "_call>\n", '{"name": "weather", ', '"arguments": {"city": "Oslo"}', "}\n</tool",
             "_call>\n<tool_call>\n", '{"name": "time", "arguments"', ": {}}",
             "\n</tool_call>\n"],
    "patch": ["\n<tool_call>", '{"name": "patch", "arg', 'uments": {"input": "*** Be', "gin",
              ' \\"pa', "\\u00fc\\n", 'tch"}', "}</tool_call>"],
    "fence": ["```json\n", '{"name": "wea', 'ther", "arguments', '": {"city": "Ro', 'me"}}\n',
              "```"],
    "bare": ['{"name": "time",', ' "arguments": {', "}}\n"],
    "broken": ["<tool_call>{", '"name": "weather", "argu', 'ments": {"city" "', "Rome",
               '"}}</tool_', "call>"],
    "wave": ["Gr\u00fc\u00dfe ", "\xf0", "\x9f", "\x91", "\x8b", " \u4f60\u597d"],
}  # fmt: skip


def cut(text: str) -> list[str]:
    """Return a text in different pieces of 7 characters, or more where they would be alike."""
    pieces: list[str] = []
    piece = ""
    for letter in text:
        piece += letter
        if len(piece) >= 7 and piece not in pieces:
            pieces.append(piece)
            piece = ""
    return [*pieces[:-1], pieces[-1] + piece]


TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
Write <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}

<think>
{{ message.reasoning_content }}
</think>
{%- endif %}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}
{%- set last = messages[-1].content | default("", true) %}
{%- for word in WORDS %}{% if last.startswith("say " + word) %}{{ "<|" + word + "|>" }}{% endif %}
{%- endfor %}
{%- endif %}"""

WORD_TEXT = """
the of and to in is you that it he was for on are as with his they at be this have from or had by
not word but what some we can out other were all there when up use your how said an each she which
do their time if will way about many then them write would like so these her long make thing see him
two has look more day could go come did number sound no most people my over know water than call
first who may down side been now find any new work part take get place made live where after back
little only round man year came show every good me give our under name very through just form
sentence great think say help low line differ turn cause much mean before move right boy old too
same tell does set three want air well also play small end put home read hand port large spell add
even land here must big high such follow act why ask men change went light kind off need house
picture try us again animal point mother world near build self earth father
"""
WORDS = WORD_TEXT.split()

NUM_RANDOM, NUM_PRIVATE = 64, 320  # channels: of the random model, and one for each learnt token
HIDDEN, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS = NUM_RANDOM + NUM_PRIVATE, 2, 4, 2
HEAD, INNER = 32, 160
CONTEXT = 16384
OVERFLOWING = 1e38  # times the number in a channel it is infinite
LEARNT = 200.0  # of a learnt token in its own channel: it decides the next token


def write_model(directory: Path, answers: Answers, chats: bool = True) -> Path:
    """Write the files of the model, and return the directory.

    Args:
        directory: it is made.
        answers: those that the model has learnt by heart.
        chats: whether the model has a chat template; a base model has none.
    """
    directory.mkdir(parents=True)
    vocabulary, merges = _vocabulary()
    added = _added_tokens(answers)
    ids = dict(vocabulary)
    ids.update({text: len(vocabulary) + index for index, text in enumerate(added)})
    _write(directory / "tokenizer.json", _tokenizer(vocabulary, merges, added))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    template = TEMPLATE.replace("WORDS", json.dumps(list(answers)))
    _write(
        directory / "tokenizer_config.json",
        settings | ({"chat_template": template} if chats else {}),
    )
    _write(directory / "config.json", _config(ids))
    weights = _weights(ids, _learnt(ids, answers))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1))


# --- tokens ---------------------------------------------------------------------------------------


def _byte_letters() -> dict[int, str]:
    """Return the letter of each byte in byte-level BPE, as GPT-2 has them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain},
            **{byte: chr(256 + index) for index, byte in enumerate(others)}}  # fmt: skip


def _vocabulary() -> tuple[dict[str, int], list[list[str]]]:
    """Return the ids of bytes and words, and the merges that make the words."""
    letters = _byte_letters()
    vocabulary = {letter: index for index, letter in enumerate(letters.values())}
    merges = []
    for word in WORDS:
        whole = letters[ord(" ")]
        for letter in word:
            if whole + letter not in vocabulary:
                merges.append([whole, letter])
                vocabulary[whole + letter] = len(vocabulary)
            whole += letter
    return vocabulary, merges


def _added_tokens(answers: Answers) -> list[str]:
    """Return the tokens behind the vocabulary; those in `<|...|>` are special."""
    special = [END_OF_TEXT, TURN_START, TURN_END, *FILLING, *(f"<|{word}|>" for word in answers)]
    pieces = [piece for answer in answers.values() for piece in answer if len(piece) > 1]
    return [*special, *pieces]


def _tokenizer(
    vocabulary: dict[str, int], merges: list[list[str]], added: list[str]
) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocabulary) + index, "content": text, **flags,
             "special": text.startswith("<|")}
            for index, text in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }  # fmt: skip


# --- weights --------------------------------------------------------------------------------------


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(ids),
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": ids[END_OF_TEXT],
        "eos_token_id": ids[TURN_END],
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def _weights(ids: dict[str, int], learnt: dict[int, int]) -> dict[str, Array]:
    """Return random weights, and in channels of their own what is learnt.

    Args:
        ids: of all tokens.
        learnt: the token that follows a token.
    """
    random = np.random.RandomState(20)  # its numbers are the same in every version of numpy

    def matrix(rows: int, columns: int, scale: float) -> Array:
        return (random.standard_normal((rows, columns)) * scale).astype(np.float32)

    embed, head = matrix(len(ids), HIDDEN, 1.0), np.zeros((len(ids), HIDDEN), np.float32)
    embed[:, NUM_RANDOM:] = 0
    words = [ids[_byte_letters()[ord(" ")] + word] for word in WORDS]
    head[words, :NUM_RANDOM] = matrix(len(words), NUM_RANDOM, 0.4)
    channels = dict(zip(learnt, range(NUM_RANDOM, HIDDEN), strict=False))
    for token, channel in channels.items():
        embed[token, channel], head[learnt[token], channel] = LEARNT, 4
    breaking = [channels[ids[BREAKING]]] if BREAKING in ids else []
    weights = {"model.embed_tokens.weight": embed, "lm_head.weight": head,
               "model.norm.weight": np.ones(HIDDEN, np.float32)}  # fmt: skip
    for layer in range(NUM_LAYERS):
        name = f"model.layers.{layer}"
        sizes = {
            "self_attn.q_proj": (NUM_HEADS * HEAD, HIDDEN),
            "self_attn.k_proj": (NUM_KV_HEADS * HEAD, HIDDEN),
            "self_attn.v_proj": (NUM_KV_HEADS * HEAD, HIDDEN),
            "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for part, (rows, columns) in sizes.items():
            weight = matrix(rows, columns, 0.15)
            if rows == HIDDEN and part in ("self_attn.o_proj", "mlp.down_proj"):
                weight[NUM_RANDOM:] = 0
            elif part == "self_attn.v_proj":
                weight[:, breaking] = OVERFLOWING
            weights[f"{name}.{part}.weight"] = weight
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def _learnt(ids: dict[str, int], answers: Answers) -> dict[int, int]:
    """Return the token that follows each token of an answer."""
    letters = _byte_letters()
    following: dict[int, int] = {}
    for word, answer in answers.items():
        tokens = [ids[letters[ord(piece)] if len(piece) == 1 else piece] for piece in answer]
        last = tokens[0] if word == "count" else ids[TURN_END]
        for token, next_token in zip([ids[f"<|{word}|>"], *tokens], [*tokens, last], strict=True):
            assert token not in following, f"{word}: a token stands twice in the answers"
            following[token] = next_token
    assert len(following) <= NUM_PRIVATE
    return following
