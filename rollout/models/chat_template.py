"""Chat templates: Jinja in the sandbox and with the helpers that transformers gives them, so the same template renders the same text."""

from __future__ import annotations

import difflib
import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..errors import BadRequest, ConfigError, show

if TYPE_CHECKING:
    import jinja2

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_CONTENTS = {"content", "tool_calls", "function_call", "refusal", "audio", *_REASONING_KEYS}
"""one of them at least is in a message"""
_KEYS = frozenset(_CONTENTS | {"role", "name", "tool_call_id"})


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template once; `render` uses it many times.

    Raises:
        ConfigError: it is not valid Jinja, or jinja2 is not installed.
    """
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ConfigError("chat templates need jinja2: pip install 'jinja2>=3.1.6'") from error

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}` marks what an assistant wrote; here it renders its body."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        """`namespace()` without underscore attributes, which could reach interpreter internals."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            for name in dict(*args[1:], **kwargs):
                _check_attribute(name)
            jinja2.utils.Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_attribute(name)
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals.update(raise_exception=raise_exception, strftime_now=_strftime_now, dict=to_dict, namespace=Namespace)
    try:
        return env.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is not valid Jinja (line {error.lineno}): {error.message}") from error


def _check_attribute(name: Any) -> None:
    import jinja2

    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set the namespace attribute {name!r}")


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def render(
    template: jinja2.Template,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: dict[str, Any],
) -> str:
    """Render a conversation to text.

    Args:
        messages: {"role", "content", …}; keys whose value is None are dropped, as transformers does.
        add_generation_prompt: end with the header of an assistant turn.
        continue_final_message: end inside the last message, so that generation goes on with it.
        variables: what else the template may read, such as `tools` and `bos_token`.

    Raises:
        BadRequest: the messages are malformed, or the template refuses them.
    """
    import jinja2

    if continue_final_message and add_generation_prompt:
        raise BadRequest("give add_generation_prompt or continue_final_message, not both", field="continue_final_message")
    chat = [_checked(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not chat:
        raise BadRequest("messages must hold at least one message, got none", field="messages")
    if continue_final_message:
        chat[-1]["content"] = _final_text(chat[-1]) + _CONTINUE_TAG
    try:
        text = template.render(messages=chat, add_generation_prompt=add_generation_prompt, **variables)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadRequest(f"the chat template refused the messages: {error}", field="messages") from error
    return _cut_at_tag(text) if continue_final_message else text


def _checked(message: Any, path: str) -> dict[str, Any]:
    """A message without its null keys. Keys of the template's own pass; one that misspells an absent key of OpenAI's does not."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f'{path} must be an object with a string "role", got {show(message)}', field=path)
    kept = {key: value for key, value in message.items() if value is not None}
    for key in kept:
        meant = [] if key in _KEYS else difflib.get_close_matches(str(key), _KEYS.difference(message), 1, cutoff=0.8)
        if meant:
            raise BadRequest(f"{path}.{key} is not a known key (did you mean {meant[0]}?)", field=f"{path}.{key}")
    if not kept.keys() & _CONTENTS:
        raise BadRequest(f"{path}.content is missing: give a string, a list of parts, or tool_calls", field=f"{path}.content")
    content = kept.get("content", "")
    if not isinstance(content, str) and not (isinstance(content, list | tuple) and all(isinstance(part, dict | str) for part in content)):
        raise BadRequest(f"{path}.content must be a string or a list of parts, got {show(content)}", field=f"{path}.content")
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


def _final_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if not isinstance(content, str):
        raise BadRequest(f"continue_final_message needs a last message with text content, got {content!r:.200}", field="messages")
    return content


def _cut_at_tag(text: str) -> str:
    """Text up to the tag. A template that stripped the message also stripped the tag's space: then strip before it too."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise BadRequest("the chat template does not render the last message as it is, so it cannot be continued", field="messages")
    return text[:at] if text[at:].startswith(_CONTINUE_TAG) else text[:at].rstrip()
