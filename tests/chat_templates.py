"""Chat templates as models have them, written out, and a tokenizer that has their special tokens."""

from typing import Any

from .tiny_tokenizers import byte_tokenizer

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

CHATML_MARKED = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}{{ message.content + '<|im_end|>\\n' }}{%- endgeneration -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# A default system prompt, tools in it, tool calls, and tool results in one turn of the user.
QWEN_2_5 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be kind.' }}{%- endif %}
    {{- '\\n# Tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>' + tool_call.function.name + (tool_call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>' + message.content + '</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Thinking is kept in the last answer only, and that one has an empty one if it has none.
QWEN_3 = """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set thought = '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.index0 > ns.last_user and (loop.last or thought) %}
        {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# The generation prompt begins to think, which earlier answers do not.
QWEN_3_THINKING = QWEN_3.replace(
    "'<|im_start|>assistant\\n' }}{%- endif %}", "'<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
)

# BOS, and contents are stripped.
LLAMA_3 = """\
{%- for message in messages -%}
{%- if loop.first -%}{{ bos_token }}{%- endif -%}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

# Turns must alternate; the system prompt stands in the first turn of the user.
GEMMA = """\
{{- bos_token -}}
{%- set ns = namespace(prefix='') -%}
{%- if messages[0]['role'] == 'system' -%}
{%- set ns.prefix = messages[0]['content'] + '\\n\\n' -%}
{%- set messages = messages[1:] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{%- if loop.first -%}{{ ns.prefix }}{%- endif -%}
{{ message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# No generation prompt; the system prompt stands in the first turn of the user.
MISTRAL = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.first and system is defined %}
        {{- '[INST] ' + system + '\\n\\n' + message.content + ' [/INST]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}
"""

# The same, but the system prompt stands in the last turn of the user, so an earlier turn changes when others follow.
MISTRAL_LAST = MISTRAL.replace(
    "loop.first and", "loop.index0 == (messages | length) - 1 - (messages[-1].role == 'assistant') and"
)

# EOS after the last message, whatever it is, unless an answer is asked for.
PHI_3 = """\
{%- for message in messages -%}
{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
"""

# The last answer ends with another token than those before it.
HARMONY = """\
{%- for message in messages -%}
{{ '<|start|>' + message.role + '<|message|>' + message.content }}
{%- if loop.last and message.role == 'assistant' -%}{{ '<|return|>' }}{%- else -%}{{ '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""

VICUNA = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ message.content + ' ' }}
{%- elif message.role == 'user' -%}{{ 'USER: ' + message.content + ' ' }}
{%- else -%}{{ 'ASSISTANT: ' + message.content + eos_token }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""

SPECIAL = [
    *("<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|end|>", "<|return|>", "<|start|>", "<|message|>"),
]


def chat_tokenizer(template: str | None, **settings: Any) -> Any:
    """A byte-level tokenizer with a chat template; <s> is BOS, </s> is EOS."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(SPECIAL, special_tokens=True)
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = template
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer
