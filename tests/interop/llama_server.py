"""Runs the server of llama.cpp, from the package xllamacpp, with a tiny model that this file writes.

The model is not downloaded. Its weights make each token follow from the token before, so it says exactly what `ANSWERS`
has. The chat template ends the prompt with the token that begins an answer, and picks it by the words of the newest
message. Everything else is the server's own work: tokens, streams, tool calls, reasoning, limits and usage.

`llama_server.py FOLDER [SETTING=VALUE ...]` runs in a virtual environment of its own. It prints a URL when it is ready,
and serves until stdin is closed. The settings are those of `xllamacpp.CommonParams`, as JSON.
"""

from __future__ import annotations

import json
import string
import sys
from itertools import pairwise
from pathlib import Path

import gguf
import numpy
import xllamacpp

END = "<|im_end|>"
LAYER_SIZE = 32
ENDLESS = "endless"

ANSWERS = {
    "plain": ["A plain ", "answer from ", "a real server", " — naïve, ", "<0xE6>", "<0x97>", "<0xA5>", "."],
    "read": [
        "Looking.",
        "\n<tool_call>\n",
        '{"name": "read_file", ',
        '"arguments": {"path": "READ',
        'ME.md"}}\n</tool_call>',
    ],
    "both": [
        '<tool_call>\n{"name": "read_file", "arguments": ',
        '{"path": "README.md"}}\n</tool_call>\n',
        '<tool_call>\n{"name": "list_files", ',
        '"arguments": {}}\n</tool_call>',
    ],
    "report": ["It is ", "a nest."],
    "think": ["<think>\n", "The user wants ", "to know why.", "\n</think>\n\n", "Because of ", "the twigs."],
    "summary": ["## Goal\n", "Build ", "a nest.\n", "## Next\n", "Find twigs."],
    "word": ['<tool_call>\n{"name": "report_word", ', '"arguments": {"word": ', '"ready"}}\n</tool_call>'],
    ENDLESS: ["hop ", "skip ", "jump "],
}
"""The tokens of each answer. No token occurs twice. The endless answer begins again after its last token."""

CUES = {
    "Your summary will replace": "summary",
    "Twigs and string.": "report",
    "Read it.": "read",
    "Read both.": "both",
    "Think.": "think",
    "Go on and on.": ENDLESS,
    "call report_word": "word",
}
"""The first of these that the newest message contains decides which answer is given, else it is the plain one."""

TEMPLATE = r"""
{%- if messages[0].role == 'system' or tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {%- if tools %}
        {{- 'Call functions with <tool_call></tool_call> tags. These are the functions:\n<tools>' }}
        {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
        {{- '\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- if not loop.first or message.content %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- set newest = messages[-1].content or '' %}
    CUES
{%- endif %}
"""


def chat_template() -> str:
    """The template of a Qwen model, but it ends with the token that begins an answer."""
    tests = "".join(f"{{%- elif '{words}' in newest %}}{{{{- '<|{name}|>' }}}}" for words, name in CUES.items())
    return TEMPLATE.strip().replace(
        "CUES", f"{{%- if false %}}{tests}{{%- else %}}{{{{- '<|plain|>' }}}}{{%- endif %}}"
    )


def vocabulary() -> dict[str, gguf.TokenType]:
    """All tokens. Text is split into pairs of letters, and into bytes where there is no pair."""
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    tokens = {"<unk>": gguf.TokenType.UNKNOWN, "<s>": control, "</s>": control, END: control, "<|im_start|>": control}
    tokens |= {f"<0x{byte:02X}>": gguf.TokenType.BYTE for byte in range(256)}
    tokens |= {first + second: normal for first in "▁" + string.ascii_lowercase for second in string.ascii_lowercase}
    for name, answer in ANSWERS.items():
        tokens[f"<|{name}|>"] = control
        tokens |= {token: gguf.TokenType.USER_DEFINED for token in answer if token not in tokens}
    return tokens


def write_model(path: Path) -> None:
    """Write the model: one layer that adds nothing, between one-hot embeddings and the table of next tokens."""
    tokens = vocabulary()
    ids = {token: number for number, token in enumerate(tokens)}
    size = len(tokens)
    model = gguf.GGUFWriter(path, "llama")
    model.add_vocab_size(size)
    model.add_context_length(1 << 20)
    model.add_embedding_length(size)
    model.add_block_count(1)
    model.add_feed_forward_length(LAYER_SIZE)
    model.add_head_count(1)
    model.add_head_count_kv(1)
    model.add_key_length(LAYER_SIZE)
    model.add_value_length(LAYER_SIZE)
    model.add_rope_dimension_count(LAYER_SIZE)
    model.add_layer_norm_rms_eps(1e-5)
    model.add_tokenizer_model("llama")
    model.add_token_list(list(tokens))
    model.add_token_types(list(tokens.values()))
    model.add_token_scores([0.0] * size)
    model.add_eos_token_id(ids[END])
    model.add_add_bos_token(False)
    model.add_add_space_prefix(False)
    model.add_chat_template(chat_template())
    follows = numpy.zeros((size, size), numpy.float32)
    for name, answer in ANSWERS.items():
        chain = [f"<|{name}|>", *answer, answer[0] if name == ENDLESS else END]
        for token, following in pairwise(chain):
            assert not follows[:, ids[token]].any(), f"{token!r} occurs twice"
            follows[ids[following], ids[token]] = 1
    model.add_tensor("token_embd.weight", numpy.eye(size, dtype=numpy.float32))
    model.add_tensor("output_norm.weight", numpy.ones(size, numpy.float32))
    model.add_tensor("output.weight", follows)
    small, wide, tall = (size,), (LAYER_SIZE, size), (size, LAYER_SIZE)
    layer = {"attn_norm": small, "attn_q": wide, "attn_k": wide, "attn_v": wide, "attn_output": tall}
    layer |= {"ffn_norm": small, "ffn_gate": wide, "ffn_up": wide, "ffn_down": tall}
    for name, shape in layer.items():
        model.add_tensor(f"blk.0.{name}.weight", numpy.zeros(shape, numpy.float32))
    model.write_header_to_file()
    model.write_kv_data_to_file()
    model.write_tensors_to_file()
    model.close()


def main(folder: Path, *settings: str) -> None:
    """Write the model if it is not there, and serve it until stdin is closed."""
    path = folder / "tiny.gguf"
    if not path.exists():
        write_model(path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {"tiny"}
    params.n_parallel = 1
    # threads that wait for each other are slow on a busy machine
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.use_jinja = True
    params.endpoint_metrics = True
    for setting in settings:
        name, _, value = setting.partition("=")
        setattr(params, name, json.loads(value))
    server = xllamacpp.Server(params)
    print(f"Listening on {server.listening_address}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
