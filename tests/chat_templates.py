"""Small chat templates with the markers of published ones, for models that call tools and think; and tokenizers that
know the markers as those models' do."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny_tokenizers import write_byte_level_tokenizer

# As Qwen2.5: tools in the system message, calls in tags, what tools said as a user's message.
QWEN = (
    "{%- if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    'Call a function so: <tool_call>\n{"name": <name>, "arguments": <object>}\n</tool_call><|im_end|>\n{%- endif %}'
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor %}<|im_end|>\n{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: thinks unless it is told not to; the answer itself begins with the thought.
QWEN3 = QWEN + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
# As DeepSeek-R1: the prompt opens the thought.
R1 = (
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content.split('</think>')[-1] }}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# As Nemotron Nano 2: likewise, unless a message says otherwise.
NEMOTRON = (
    "{%- set ns = namespace(thinks=true) %}{%- for message in messages %}<SPECIAL_11>{{ message.role }}\n"
    "{%- if '/think' in message.content %}{% set ns.thinks = true %}"
    "{%- elif '/no_think' in message.content %}{% set ns.thinks = false %}{% endif %}"
    "{{- message.content.split('</think>')[-1] }}{% endfor %}"
    "{%- if add_generation_prompt %}<SPECIAL_11>Assistant\n{{ '<think>\n\n' if ns.thinks else '<think></think>' }}"
    "{%- endif %}"
)
# As Granite 3.3: thinks where it is told to, and then has tags around the answer.
GRANITE = (
    "{%- if thinking %}Write thoughts between <think></think> and answers between <response></response>.\n{% endif %}"
    "{%- for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)
# As those of older models: no tools, and the roles alternate.
PLAIN = (
    "{%- for message in messages %}"
    "{%- if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('unknown role') }}{%- endif %}"
    "[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{%- if add_generation_prompt %}[assistant]{% endif %}"
)
# As Llama 3.1: one call, an object with parameters.
LLAMA = (
    "{%- if tools %}<|start_header_id|>system<|end_header_id|>\nEnvironment: ipython\n"
    'Answer with {"name": function name, "parameters": dictionary}.\n'
    "{% for tool in tools %}{{ tool | tojson(indent=4) }}\n{% endfor %}<|eot_id|>{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.tool_calls %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{%- endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n"
    '{"name": "{{ message.tool_calls[0].function.name }}", '
    '"parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>'
    "{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n{{ message.content }}<|eot_id|>"
    "{%- else %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n{{ message.content }}<|eot_id|>{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n{% endif %}"
)
# As Mistral-7B-v0.3: a list behind a token, ids of nine characters.
MISTRAL = (
    "{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{%- elif message.tool_calls %}[TOOL_CALLS] [{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{%- endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last else '' }}{%- endfor %}]"
    "{%- elif message.role == 'tool' %}"
    '[TOOL_RESULTS] {"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- else %} {{ message.content }}{%- endif %}"
    "{%- endfor %}"
)
MISTRAL_ARGS = MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]name[ARGS]{}[")
TAGGED_HEAD = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
)
TAGGED_TAIL = "{%- endfor %}<|im_end|>\n{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# As Qwen3-Coder: an argument in a tag, on lines of its own.
CODER = TAGGED_HEAD + (
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
) + TAGGED_TAIL  # fmt: skip
# As Seed-OSS: the same in one line.
SEED = (
    CODER.replace(">\n{{ value", ">{{ value")
    .replace("tojson }}\n", "tojson }}")
    .replace("tool_call>", "seed:tool_call>")
)
# As GLM-4.5: names and values of arguments in tags that are tokens; thinks.
GLM = TAGGED_HEAD + (
    "<tool_call>{{ call.function.name }}\n{% for key, value in call.function.arguments | items %}"
    "<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value if value is string else value | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>"
) + TAGGED_TAIL + "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"  # fmt: skip
# As MiniMax-M2: all calls in one pair of tags.
MINIMAX = TAGGED_HEAD + (
    "{%- if loop.first %}<minimax:tool_call>\n{% endif %}"
    '<invoke name="{{ call.function.name }}">\n{% for key, value in call.function.arguments | items %}'
    '<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}'
    "</invoke>\n{%- if loop.last %}</minimax:tool_call>{% endif %}"
) + TAGGED_TAIL  # fmt: skip
# As gpt-oss: channels; a thought stands beside calls only.
GPT_OSS = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>"
    "{%- if tools %}<|start|>developer<|message|>namespace functions {\n"
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}}<|end|>{%- endif %}"
    "{%- for message in messages %}{%- if message.tool_calls %}"
    "{%- if message.content and message.thinking %}{{ raise_exception('content and thinking') }}{%- endif %}"
    "{%- if message.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{%- elif message.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>"
    "{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As DeepSeek-R1-0528: calls in a block of JSON; arguments are joined as text, tools are not described.
DEEPSEEK = (
    "{%- set ns = namespace(system='', is_tool=false) %}{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{% endif %}{% endfor %}"
    "{{ ns.system }}{%- for message in messages %}{%- set ns.is_tool = message['role'] == 'tool' %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] + '<｜Assistant｜>' }}"
    "{%- elif message['tool_calls'] is defined and message['tool_calls'] is not none %}"
    "{{ message['content'] + '<｜tool▁calls▁begin｜>' }}{%- for tool in message['tool_calls'] %}"
    "{{ ('' if loop.first else '\n') + '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'"
    " + tool['function']['name'] + '\n```json\n' + tool['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}"
    "{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1] }}"
    "{%- elif ns.is_tool %}{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{% endif %}"
    "{%- endfor %}"
)
# As DeepSeek-V3.1, in vLLM's template that describes tools: the same without a block.
DEEPSEEK31 = (
    "{%- if tools is defined and tools is not none %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    + DEEPSEEK.replace("+ tool['type'] + '<｜tool▁sep｜>'", "")
    .replace("'\n```json\n'", "'<｜tool▁sep｜>'").replace("'\n```<", "'<").replace("'\n'", "''")
    + "{%- if add_generation_prompt and not ns.is_tool %}{{ '<think>' if thinking else '</think>' }}{% endif %}"
)  # fmt: skip
# As Kimi-K2: a call has its id in place of a name.
KIMI = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for message in messages -%}<|im_{{ message['role'] }}|>"
    "{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}"
    "{{ message['content'] }}<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}"
    "<|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>"
    "{%- if tool_call['function']['arguments'] is string %}{{ tool_call['function']['arguments'] }}"
    "{%- else %}{{ tool_call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>"
    "{%- endfor -%}<|tool_calls_section_end|>"
    "{%- elif message['role'] == 'tool' -%}{{ '## Return of ' + message.tool_call_id + '\n' + message['content'] }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)
# As Magistral and Gemma 4: thoughts are between special tokens.
MAGISTRAL = "{%- for message in messages %}[INST]{{ message.content.split('[/THINK]')[-1] }}[/INST]{% endfor %}"
GEMMA4 = (
    "{%- for message in messages %}<|turn>{{ message.role }}\n{{ message.content.split('<channel|>')[-1] }}<turn|>\n"
    "{%- endfor %}{%- if add_generation_prompt %}<|turn>model\n"
    "{%- if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}{% endif %}"
)
TEMPLATES = {
    "qwen": QWEN, "qwen3": QWEN3, "r1": R1, "llama": LLAMA, "mistral": MISTRAL, "mistral_args": MISTRAL_ARGS,
    "coder": CODER, "seed": SEED, "glm": GLM, "minimax": MINIMAX, "gpt_oss": GPT_OSS, "plain": PLAIN,
    "deepseek": DEEPSEEK, "deepseek31": DEEPSEEK31, "kimi": KIMI,
    "magistral": MAGISTRAL, "gemma4": GEMMA4, "nemotron": NEMOTRON,
    "granite": GRANITE,
}  # fmt: skip
FORMATS = {
    "qwen": "hermes", "qwen3": "hermes", "llama": "llama3", "mistral": "mistral", "mistral_args": "mistral_args",
    "coder": "qwen3_coder", "seed": "seed_oss", "glm": "glm45", "minimax": "minimax_m2", "gpt_oss": "harmony",
    "deepseek": "deepseek_v3", "deepseek31": "deepseek_v31", "kimi": "kimi_k2", "plain": "generic",
}  # fmt: skip
REASONING = {
    "qwen3": "think", "r1": "think", "glm": "think", "gpt_oss": "harmony", "magistral": "mistral", "gemma4": "gemma4",
    "nemotron": "think", "granite": "granite", "deepseek": "think", "deepseek31": "think",
}  # fmt: skip
DEEPSEEK_MARKERS = [f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
KIMI_MARKERS = (
    "tool_calls_section_begin", "tool_calls_section_end", "tool_call_begin", "tool_call_end",
    "tool_call_argument_begin",
)  # fmt: skip
SPECIAL = {
    "deepseek": DEEPSEEK_MARKERS, "kimi": [f"<|{name}|>" for name in KIMI_MARKERS],
    "llama": ["<|python_tag|>"], "mistral": ["[TOOL_CALLS]"], "mistral_args": ["[TOOL_CALLS]", "[ARGS]"],
    "glm": ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "gpt_oss": [f"<|{name}|>" for name in ("channel", "message", "start", "end", "call", "constrain", "return")],
    "magistral": ["[THINK]", "[/THINK]"], "gemma4": ["<|channel>", "<channel|>"],
}  # fmt: skip
ORDINARY = {  # tokens that texts are shown with
    "deepseek": ["<think>", "</think>"],
    "deepseek31": [*DEEPSEEK_MARKERS, "<think>", "</think>"],
    "qwen": ["<tool_call>", "</tool_call>"],
    "qwen3": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "r1": ["<think>", "</think>"],
    "coder": ["<tool_call>", "</tool_call>"],
    "glm": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "minimax": ["<minimax:tool_call>", "</minimax:tool_call>"],
}


def write_talker(path: Path, kind: str, vocab_size: int) -> None:
    """A tokenizer with the chat template and the tokens of `kind`, a key of TEMPLATES."""
    import tokenizers

    special, ordinary = SPECIAL.get(kind, []), ORDINARY.get(kind, [])
    write_byte_level_tokenizer(path, vocab_size - len(special) - len(ordinary))
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    library.add_special_tokens(special)
    library.add_tokens(ordinary)
    library.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = TEMPLATES[kind]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
