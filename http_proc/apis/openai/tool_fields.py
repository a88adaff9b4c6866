"""OpenAI's fields of tools: tools, tool_choice, and the older functions and function_call."""

from typing import Any

from http_proc.chat.call import ToolChoice, ToolMode
from http_proc.protocol.errors import invalid
from http_proc.protocol.schema import ChatRequest, Message, Tool, ToolCall

_CHOICES = (
    'must be \'none\', \'auto\', \'required\', {"type": "function", "function": {"name": …}} or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}'
)


def tools_and_choice(fields: ChatRequest) -> tuple[list[Tool], ToolChoice]:
    """Return the tools that may be called, and whether they must be. Raise ApiError."""
    if fields.functions is not None:
        return _functions(fields)
    if fields.function_call is not None:
        raise invalid("function_call needs functions; with tools send tool_choice", "function_call")
    choice = fields.tool_choice
    if choice in ("none", "auto", "required"):
        return fields.tools, ToolChoice(ToolMode(choice))
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(fields.tools, choice.get("allowed_tools"))
    return fields.tools, ToolChoice(ToolMode.REQUIRED, _name(choice))


def _name(choice: str | dict[str, Any]) -> str:
    """Return the name in {"type": "function", "function": {"name"}}."""
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid(f"tool_choice {_CHOICES}", "tool_choice")
    return name


def _allowed(tools: list[Tool], allowed: Any) -> tuple[list[Tool], ToolChoice]:
    """Return the tools of a list of names; the model does not see the others."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, dict) else None
    listed = allowed.get("tools") if isinstance(allowed, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise invalid(f"tool_choice {_CHOICES}; mode is 'auto' or 'required'", "tool_choice")
    names = {_name(tool) for tool in listed}
    if unknown := names - {tool.function.name for tool in tools}:
        raise invalid(
            f"tool_choice allows {min(unknown)!r}, which is not among the tools", "tool_choice"
        )
    return [tool for tool in tools if tool.function.name in names], ToolChoice(ToolMode(mode))


# --- the older fields -----------------------------------------------------------------------------


def _functions(fields: ChatRequest) -> tuple[list[Tool], ToolChoice]:
    if fields.tools:
        raise invalid("functions and tools are the same field; leave functions out", "functions")
    tools = [Tool(function) for function in fields.functions or ()]
    choice = fields.function_call
    if choice is None or choice in ("none", "auto"):
        return tools, ToolChoice(ToolMode(choice or "auto"))
    name = choice.get("name") if isinstance(choice, dict) else None
    if not isinstance(name, str):
        raise invalid("function_call must be 'none', 'auto' or {\"name\": …}", "function_call")
    return tools, ToolChoice(ToolMode.REQUIRED, name)


def with_tool_calls(messages: list[Message]) -> list[Message]:
    """Return messages whose function calls, in the older form, are tool calls with ids."""
    converted: list[Message] = []
    call_id = ""
    for index, message in enumerate(messages):
        if message.function_call is not None:
            call_id = f"call{index:05d}"
            call = ToolCall(call_id, message.function_call)
            message = Message(
                role=message.role,
                content=message.content,
                name=message.name,
                tool_calls=[*(message.tool_calls or ()), call],
                reasoning_content=message.reasoning_content or message.reasoning,
            )
        elif message.role == "function" and call_id:
            message = Message(
                role="tool", content=message.content, name=message.name, tool_call_id=call_id
            )
        converted.append(message)
    return converted
