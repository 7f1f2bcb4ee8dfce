"""Twelve tools, forty requests with the calls that answer them, and formats of tool calls.

Each format is a chat template that writes what models of its kind are trained on, and no more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_CHATML = """
{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}%CALL%{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

FORMATS = {
    "Qwen": _CHATML.replace(
        "%CALL%",
        """<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>""",
    ),
    "Qwen, coder": _CHATML.replace(
        "%CALL%",
        """<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value }}
</parameter>
{% endfor %}</function>
</tool_call>""",
    ),
    "Hermes": _CHATML.replace(
        "%CALL%",
        """<tool_call>
{"arguments": {{ call.function.arguments | tojson }}, "name": "{{ call.function.name }}"}
</tool_call>""",
    ),
    "Llama 3": """<|begin_of_text|>
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool | tojson }}

{% endfor %}<|eot_id|>{% endif %}
{%- for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{% for call in message.tool_calls or [] -%}
{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- endfor %}{{ message.content }}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    "Mistral": """<s>
{%- for message in messages %}
{%- if message.role == "user" %}
{%- if tools %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception("an id has nine characters") }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, \
"id": "{{ call.id }}"}
{%- endfor %}]</s>
{%- else %} {{ message.content }}</s>
{%- endif %}
{%- endfor %}""",
    "Gemma": """{% macro written(value) -%}
{%- if value is string %}<escape>{{ value }}<escape>
{%- elif value is mapping -%}
{ {%- for name, one in value | items -%}
{{ name }}:{{ written(one) }}{{ "," if not loop.last }}{% endfor -%} }
{%- elif value is sequence -%}
[{% for one in value %}{{ written(one) }}{{ "," if not loop.last }}{% endfor %}]
{%- else %}{{ value | tojson }}{% endif -%}
{%- endmacro -%}
{%- if tools %}<start_of_turn>developer
{% for tool in tools %}<start_function_declaration>{{ written(tool.function) }}\
<end_function_declaration>{% endfor %}<end_of_turn>
{% endif %}
{%- for message in messages %}<start_of_turn>\
{{ "model" if message.role == "assistant" else message.role }}
{% for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}\
{{ written(call.function.arguments) }}<end_function_call>{% endfor %}{{ message.content }}\
<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
    "gpt-oss": """{%- if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|start|>{{ message.role }}
{%- for call in message.tool_calls or [] %}<|channel|>commentary \
to=functions.{{ call.function.name }} <|constrain|>json<|message|>\
{{ call.function.arguments | tojson }}<|call|>{% endfor %}
{%- if message.content %}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
}
"""Name -> chat template."""


class Call(NamedTuple):
    """What a user asks, and the call that answers it."""

    request: str
    name: str
    arguments: dict[str, Any]


def _tool(name: str, description: str, optional: int = 0, **parameters: Any) -> dict[str, Any]:
    """A tool of these parameters, of which the last `optional` may be left out."""
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean"}
    properties: dict[str, Any] = {}
    for key, kind in parameters.items():
        if isinstance(kind, tuple):
            properties[key] = {"type": "string", "enum": list(kind)}
        elif isinstance(kind, list):
            properties[key] = {"type": "array", "items": {"type": kinds[kind[0]]}}
        else:
            properties[key] = {"type": kinds[kind]}
    required = list(parameters)[: len(parameters) - optional]
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = [
    _tool("get_weather", "The weather.", 1, city=str, unit=("celsius", "fahrenheit"), days=int),
    _tool("search_flights", "Flights.", 1, origin=str, destination=str, date=str, passengers=int),
    _tool("book_table", "A table.", restaurant=str, people=int, time=str),
    _tool("convert_currency", "Money.", amount=float, from_currency=str, to_currency=str),
    _tool("send_email", "Mail.", 1, recipient=str, subject=str, body=str, attachments=[str]),
    _tool(
        "create_event", "Calendar.", 1, title=str, start=str, duration_minutes=int, invitees=[str]
    ),
    _tool("run_query", "SQL.", database=str, query=str, read_only=bool),
    _tool("list_files", "Files.", 1, directory=str, recursive=bool),
    _tool("read_file", "A file.", 2, path=str, first_line=int, last_line=int),
    _tool("set_reminder", "A reminder.", text=str, time=str, priority=("low", "normal", "high")),
    _tool("translate_text", "Translates.", text=str, target_language=str, formal=bool),
    _tool("current_time", "What time it is."),
]

CALLS = [
    Call("Will it rain in Bergen over the next 3 days? In Celsius please.", "get_weather",
         {"city": "Bergen", "unit": "celsius", "days": 3}),
    Call("How hot is Phoenix right now, in Fahrenheit?", "get_weather",
         {"city": "Phoenix", "unit": "fahrenheit"}),
    Call("Weather for Lisbon for a week, Celsius.", "get_weather",
         {"city": "Lisbon", "unit": "celsius", "days": 7}),
    Call("Do I need a coat in Ulaanbaatar today?", "get_weather",
         {"city": "Ulaanbaatar", "unit": "celsius", "days": 1}),
    Call("Find flights from Hamburg to Porto on 2025-07-14 for 2 people.", "search_flights",
         {"origin": "Hamburg", "destination": "Porto", "date": "2025-07-14", "passengers": 2}),
    Call("I want to fly from Osaka to Seoul on 2025-03-02.", "search_flights",
         {"origin": "Osaka", "destination": "Seoul", "date": "2025-03-02"}),
    Call("Any flights Chicago to Denver 2025-11-30, 4 passengers?", "search_flights",
         {"origin": "Chicago", "destination": "Denver", "date": "2025-11-30", "passengers": 4}),
    Call("Get me from Nairobi to Addis Ababa on 2026-01-09.", "search_flights",
         {"origin": "Nairobi", "destination": "Addis Ababa", "date": "2026-01-09"}),
    Call("Book a table for 4 at Trattoria Da Enzo at 19:30.", "book_table",
         {"restaurant": "Trattoria Da Enzo", "people": 4, "time": "19:30"}),
    Call("A table for two at The Green Lantern, 20:00.", "book_table",
         {"restaurant": "The Green Lantern", "people": 2, "time": "20:00"}),
    Call("Reserve at Sakura House for 6 people at 18:15.", "book_table",
         {"restaurant": "Sakura House", "people": 6, "time": "18:15"}),
    Call("What are 250 euros in Swiss francs?", "convert_currency",
         {"amount": 250, "from_currency": "EUR", "to_currency": "CHF"}),
    Call("Convert 1999.99 USD to JPY.", "convert_currency",
         {"amount": 1999.99, "from_currency": "USD", "to_currency": "JPY"}),
    Call("How much is 75 GBP in SEK?", "convert_currency",
         {"amount": 75, "from_currency": "GBP", "to_currency": "SEK"}),
    Call("Mail maria.lopez@example.com with the subject Invoice 4711: The invoice is attached. "
         "Attach invoice_4711.pdf.", "send_email",
         {"recipient": "maria.lopez@example.com", "subject": "Invoice 4711",
          "body": "The invoice is attached.", "attachments": ["invoice_4711.pdf"]}),
    Call("Tell tom@example.org by mail, subject Lunch: See you at noon.", "send_email",
         {"recipient": "tom@example.org", "subject": "Lunch", "body": "See you at noon."}),
    Call("Write to support@example.net, subject Broken link: The download page gives an error.",
         "send_email",
         {"recipient": "support@example.net", "subject": "Broken link",
          "body": "The download page gives an error."}),
    Call("Email the minutes to board@example.com, subject Minutes of May: Please find the minutes "
         "attached. Attach minutes.docx and budget.xlsx.", "send_email",
         {"recipient": "board@example.com", "subject": "Minutes of May",
          "body": "Please find the minutes attached.",
          "attachments": ["minutes.docx", "budget.xlsx"]}),
    Call("Put Design review into my calendar, 2025-05-06T14:00, 45 minutes, with lena@example.com.",
         "create_event",
         {"title": "Design review", "start": "2025-05-06T14:00", "duration_minutes": 45,
          "invitees": ["lena@example.com"]}),
    Call("Dentist on 2025-09-01T08:30 for 30 minutes.", "create_event",
         {"title": "Dentist", "start": "2025-09-01T08:30", "duration_minutes": 30}),
    Call("Create an event Team offsite at 2025-06-20T09:00, 480 minutes, invite ann@example.com "
         "and raj@example.com.", "create_event",
         {"title": "Team offsite", "start": "2025-06-20T09:00", "duration_minutes": 480,
          "invitees": ["ann@example.com", "raj@example.com"]}),
    Call("How many orders are in the sales database?", "run_query",
         {"database": "sales", "query": "SELECT COUNT(*) FROM orders", "read_only": True}),
    Call("In the inventory database set the price of item 17 to 9.5.", "run_query",
         {"database": "inventory", "query": "UPDATE items SET price = 9.5 WHERE id = 17",
          "read_only": False}),
    Call("Show the 10 newest customers of the sales database.", "run_query",
         {"database": "sales",
          "query": "SELECT * FROM customers ORDER BY created_at DESC LIMIT 10",
          "read_only": True}),
    Call("Which products in inventory are out of stock?", "run_query",
         {"database": "inventory", "query": "SELECT name FROM products WHERE stock = 0",
          "read_only": True}),
    Call("What is in /var/log?", "list_files", {"directory": "/var/log"}),
    Call("List everything below src/components, subfolders too.", "list_files",
         {"directory": "src/components", "recursive": True}),
    Call("Show me the files in ~/Documents/taxes, not in its subfolders.", "list_files",
         {"directory": "~/Documents/taxes", "recursive": False}),
    Call("Open config/settings.yaml.", "read_file", {"path": "config/settings.yaml"}),
    Call("Read lines 120 to 180 of src/parser/lexer.py.", "read_file",
         {"path": "src/parser/lexer.py", "first_line": 120, "last_line": 180}),
    Call("Show README.md up to line 40.", "read_file",
         {"path": "README.md", "first_line": 1, "last_line": 40}),
    Call("What does /etc/hosts say?", "read_file", {"path": "/etc/hosts"}),
    Call("Remind me to water the plants at 18:00, low priority.", "set_reminder",
         {"text": "water the plants", "time": "18:00", "priority": "low"}),
    Call("Remind me to call the insurance company at 09:15. It is important!", "set_reminder",
         {"text": "call the insurance company", "time": "09:15", "priority": "high"}),
    Call("Set a reminder to take out the bins at 21:30.", "set_reminder",
         {"text": "take out the bins", "time": "21:30", "priority": "normal"}),
    Call("Translate Where is the nearest pharmacy? into Japanese, formally.", "translate_text",
         {"text": "Where is the nearest pharmacy?", "target_language": "Japanese",
          "formal": True}),
    Call("How do I say Good luck tomorrow! to a friend in Spanish?", "translate_text",
         {"text": "Good luck tomorrow!", "target_language": "Spanish", "formal": False}),
    Call("Please translate The meeting has been moved to Thursday. into formal German.",
         "translate_text",
         {"text": "The meeting has been moved to Thursday.", "target_language": "German",
          "formal": True}),
    Call("What time is it?", "current_time", {}),
    Call("Do I still have time before noon?", "current_time", {}),
]  # fmt: skip


def conversation(call: Call) -> list[dict[str, Any]]:
    """Messages of a request and the call that answers it."""
    function = {"name": call.name, "arguments": call.arguments}
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "a1b2c3d4e", "function": function}],
    }
    return [{"role": "user", "content": call.request}, answer]


def recorded(tokenizer: Any, template: str, call: Call) -> tuple[list[int], list[int]]:
    """Prompt and output of a call in a format."""
    messages = conversation(call)
    render = tokenizer.apply_chat_template
    how = {"tools": TOOLS, "tokenize": False, "chat_template": template}
    prompt = render(messages[:1], add_generation_prompt=True, **how)
    text = render(messages, **how)
    assert text.startswith(prompt), "a template writes the call behind its own prompt"
    encoded = tokenizer([prompt, text[len(prompt) :]], add_special_tokens=False).input_ids
    return encoded[0], encoded[1]
