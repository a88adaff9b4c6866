"""A request in the shape in which Claude Code sends it."""

from typing import Any

TOOL_NAMES = (
    "Task", "Bash", "BashOutput", "KillShell", "Glob", "Grep", "Read", "Edit", "Write",
    "NotebookEdit", "WebFetch", "TodoWrite", "SlashCommand", "ExitPlanMode",
    "mcp__tracker__list_tickets",
)  # fmt: skip
EPHEMERAL = {"type": "ephemeral"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={nonce};"


def _tool(name: str) -> dict[str, Any]:
    """Return a tool whose schema has the keywords of the client's own schemas."""
    properties = {
        "command": {"type": "string", "description": "What to run. " * 20},
        "timeout": {"type": "number", "minimum": 0, "maximum": 600000},
        "mode": {"type": "string", "enum": ["content", "files_with_matches", "count"]},
        "replace_all": {"type": "boolean", "default": False},
        "todos": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"enum": ["pending", "in_progress", "completed"], "type": "string"},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        },
    }
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": ["command"],
        "additionalProperties": False,
    }
    description = f"{name}: a tool of the client. " * 10
    return {"name": name, "description": description, "input_schema": schema}


def claude_code_request(model: str, nonce: str = "eb6c6") -> dict[str, Any]:
    """Return the body of the second request of a session, after one call of a tool."""
    tools = [_tool(name) for name in TOOL_NAMES]
    tools[-1]["cache_control"] = EPHEMERAL
    reminder = "<system-reminder>\nThe to-do list is empty.\n</system-reminder>"
    return {
        "model": model,
        "max_tokens": 32000,
        "stream": True,
        "metadata": {"user_id": '{"device_id":"0f","account_uuid":"","session_id":"1b-2c"}'},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "system": [
            {"type": "text", "text": BILLING.format(nonce=nonce)},
            {"type": "text", "text": "You are a coding agent.", "cache_control": EPHEMERAL},
            {"type": "text", "text": "\nUse the tools.", "cache_control": EPHEMERAL},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": "List the files."},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I need ls.", "signature": "EqQBCkgIBh"},
                    {"type": "text", "text": "I list them."},
                    {
                        "type": "tool_use",
                        "id": "toolu_01D7FLrfh4GYq7yT1ULFeyMV",
                        "name": "Bash",
                        "input": {"command": "ls"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "tool_use_id": "toolu_01D7FLrfh4GYq7yT1ULFeyMV",
                        "type": "tool_result",
                        "content": "README.md\nsetup.py",
                        "is_error": False,
                        "cache_control": EPHEMERAL,
                    }
                ],
            },
        ],
        "tools": tools,
    }
