"""Codex and Claude Code themselves have a session with an MCP server at the gateway.

The model is scripted. `make agents` installs both clients by npm into a folder of their own and
runs these tests. The clients get homes of their own, and proxies that refuse every other address.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from llguidance import LLTokenizer

from quadriga.sampling.params import SamplingParams, grammar_of
from quadriga.server.grammars.grammar import compile_grammar, to_library_form
from quadriga.wire.client import RequestProgress
from tests.unit.scripted_ring import ScriptedRing, gateway_before

SESSION_TIMEOUT_S = 60.0
QUESTION = "Which tickets are open?"
RESULT = "Ticket 7: the lamp is broken"
ANSWER = "One ticket is open, number 7."
TOOL = "mcp__tracker__list_tickets"
# Claude Code offers tools of MCP servers whose names have up to 128 characters.
LONG_TOOL = "list_tickets_" + "of_the_other_tracker_" * 4
MCP_SERVER = f"""
import json, sys

def tool(name):
    schema = {{"type": "object", "properties": {{"status": {{"type": "string"}}}}}}
    return {{"name": name, "description": "List the open tickets.", "inputSchema": schema}}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method, answer = message["method"], {{}}
    if method == "initialize":
        answer = {{"protocolVersion": message["params"]["protocolVersion"],
                   "capabilities": {{"tools": {{}}}},
                   "serverInfo": {{"name": "tracker", "version": "1"}}}}
    elif method == "tools/list":
        answer = {{"tools": [tool("list_tickets"), tool({LONG_TOOL!r})]}}
    elif method == "tools/call":
        text = {RESULT!r} + " " + message["params"]["name"]
        answer = {{"content": [{{"type": "text", "text": text}}]}}
    print(json.dumps({{"jsonrpc": "2.0", "id": message["id"], "result": answer}}), flush=True)
"""
CODEX_CONFIG = """
model = "tiny"
model_provider = "quadriga"
web_search = "disabled"

[model_providers.quadriga]
name = "Quadriga"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = {idle_timeout_ms}

[mcp_servers.tracker]
command = "{python}"
args = ["{server}"]
default_tools_approval_mode = "approve"
"""

pytestmark = pytest.mark.timeout(90)


class AgentRing(ScriptedRing):
    """A model that calls a tool of the client, and then says what it returned.

    Args:
        tool: name of the tool.
        call: text of the call.
        num_questions: number of questions for the progress of the first request that has tools,
            after which it is answered; 0: it is answered at once.

    Attributes:
        tool: name of the tool.
        call: text of the call.
        results: the results of the tool that chats had.
        offered: the tools of the last chat that had any, by name.
        asked: parameters of the last request.
    """

    def __init__(self, tool: str, call: str, num_questions: int = 0) -> None:
        super().__init__([], context_length=32768)
        self.num_questions = num_questions
        self.tool = tool
        self.call = call
        self.results: list[str] = []
        self.offered: dict[str, dict[str, Any]] = {}
        self.asked = SamplingParams()

    def submit(self, prompt: Any, params: Any, **options: Any) -> Any:
        functions = [tool["function"] for tool in options["chat"].tools or ()]
        tools = {function["name"]: function for function in functions}
        self.asked = params
        self.offered = tools or self.offered
        results = [turn["content"] for turn in prompt if turn["role"] == "tool"]
        self.results += results
        if results:
            self.pieces = [ANSWER[:9], ANSWER[9:]]
        elif self.tool in tools:
            self.pieces = ["I look.\n", self.call[:20], self.call[20:]]
        else:
            self.pieces = ['{"title": "Open tickets"}']
        return super().submit(prompt, params, **options)

    def _answer(self, handle: Any, sink: Any) -> None:
        if self.num_questions == 0:
            super()._answer(handle, sink)

    async def progress(self, request_ids: list[str], timeout: float) -> list[RequestProgress]:
        if self.num_questions:
            self.num_questions -= 1
            if self.num_questions == 0:
                self._answer(self.handles[-1], self.sinks[-1])
        return await super().progress(request_ids, timeout)


def client_program(name: str, package: str) -> str:
    """Return the path of a client. Skip the test if it is not installed or does not run."""
    folder = os.environ.get("AGENTS_DIR", "")
    path = os.pathsep.join([f"{folder}/node_modules/.bin", os.environ.get("PATH", "")])
    program = shutil.which(name, path=path)
    if program is None:
        pytest.skip(f"{name} is not installed: npm install --global {package}, or make agents")
    if shutil.which("node") is None:
        pytest.skip(f"{name} needs Node, which is not on the PATH")
    return program


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a client that has no settings and reaches only this machine."""
    dead = "http://127.0.0.1:1"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    proxies = {name: dead for upper in names for name in (upper, upper.lower())}
    local = "127.0.0.1,localhost"
    return {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home), **proxies,
            "NO_PROXY": local, "no_proxy": local}  # fmt: skip


async def check_forced_calls(url: str, ring: AgentRing) -> None:
    """Force calls of the client's own tools: any of them, and each. The grammars compile."""
    tools, names = list(ring.offered.values()), list(ring.offered)
    ring.tool, vocabulary = "", LLTokenizer("byte")
    chat = [{"type": "function", "function": tool} for tool in tools]
    messages = [
        {"name": tool["name"], "description": tool.get("description"),
         "input_schema": tool["parameters"]}
        for tool in tools
    ]  # fmt: skip
    asked: list[tuple[str, Any, Any]] = [("chat/completions", chat, "required")]
    asked.append(("messages", messages, {"type": "any"}))
    for name in names:
        function = {"type": "function", "function": {"name": name}}
        asked.append(("chat/completions", chat, function))
        asked.append(("messages", messages, {"type": "tool", "name": name}))
    turns = [{"role": "user", "content": QUESTION}]
    async with aiohttp.ClientSession() as session:
        for path, given, choice in asked:
            body = {"model": "tiny", "max_tokens": 9, "messages": turns, "tools": given}
            body["tool_choice"] = choice
            async with session.post(f"{url}/v1/{path}", json=body) as response:
                assert response.status == 200, (choice, await response.text())
            grammar = grammar_of(ring.asked)
            assert grammar is not None
            compile_grammar(vocabulary, to_library_form(grammar, vocabulary))


async def output_of(command: list[str], directory: Path, variables: dict[str, str]) -> str:
    """Run a client to its end and return what it printed. End it, and its children, at the end."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=directory,
        env=variables,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SESSION_TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text
    return text


def marked(name: str) -> str:
    call = json.dumps({"name": name, "arguments": {"status": "open"}})
    return f"<tool_call>\n{call}\n</tool_call>"


def fenced(name: str) -> str:
    call = json.dumps({"name": name, "arguments": {"status": "open"}}, indent=2)
    return f"```json\n{call}\n```"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "mcp.py").write_text(MCP_SERVER)
    return tmp_path


@pytest.mark.parametrize(
    ("written", "num_questions"),
    [(marked, 0), (fenced, 0), pytest.param(marked, 12, id="after a long prefill")],
)
def test_codex_calls_a_tool_of_its_mcp_server_and_uses_the_result(
    directory: Path, written: Any, num_questions: int
) -> None:
    codex = client_program("codex", "@openai/codex")
    ring = AgentRing(TOOL, written(TOOL), num_questions)

    async def session() -> None:
        async with gateway_before(ring, sse_ping_interval=0.5) as (url, _):
            config = CODEX_CONFIG.format(
                url=url,
                python=sys.executable,
                server=directory / "mcp.py",
                idle_timeout_ms=3000 if num_questions else 60_000,
            )
            (directory / "home" / "config.toml").write_text(config)
            variables = environment(directory / "home")
            variables["CODEX_HOME"] = str(directory / "home")
            command = [codex, "exec", "--json", "--skip-git-repo-check", QUESTION]
            output = await output_of(command, directory / "work", variables)
            assert len(ring.results) == 1 and f"{RESULT} list_tickets" in ring.results[0], output
            await check_forced_calls(url, ring)
        assert "exec_command" in ring.offered
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        items = [line["item"] for line in lines if line["type"] == "item.completed"]
        (call,) = [item for item in items if item["type"] == "mcp_tool_call"]
        assert (call["server"], call["tool"]) == ("tracker", "list_tickets")
        assert call["status"] == "completed" and call["arguments"] == {"status": "open"}
        assert items[-1]["text"] == ANSWER
        assert lines[-1]["type"] == "turn.completed"

    asyncio.run(session())


@pytest.mark.parametrize("written", [marked, fenced])
@pytest.mark.parametrize("tool", ["list_tickets", LONG_TOOL])
def test_claude_code_calls_a_tool_of_its_mcp_server_and_uses_the_result(
    directory: Path, tool: str, written: Any
) -> None:
    claude = client_program("claude", "@anthropic-ai/claude-code")
    name = f"mcp__tracker__{tool}"
    ring = AgentRing(name, written(name))
    servers = {"tracker": {"command": sys.executable, "args": [str(directory / "mcp.py")]}}
    (directory / "mcp.json").write_text(json.dumps({"mcpServers": servers}))

    async def session() -> None:
        async with gateway_before(ring) as (url, _):
            variables = environment(directory / "home") | {
                "ANTHROPIC_BASE_URL": url,
                "ANTHROPIC_AUTH_TOKEN": "none",
                "ANTHROPIC_MODEL": "tiny",
                "ANTHROPIC_DEFAULT_OPUS_MODEL": "tiny",
                "ANTHROPIC_DEFAULT_SONNET_MODEL": "tiny",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "tiny",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            }
            command = [claude, "-p", QUESTION, "--output-format", "json", "--allowedTools", name]
            command += ["--mcp-config", str(directory / "mcp.json"), "--strict-mcp-config"]
            output = await output_of(command, directory / "work", variables)
            assert len(ring.results) == 1 and f"{RESULT} {tool}" in ring.results[0], output
            await check_forced_calls(url, ring)
        result = json.loads(output.splitlines()[-1])
        assert not result["is_error"] and result["result"] == ANSWER, output
        assert result["num_turns"] == 2 and not result["permission_denials"]
        assert {"Bash", "Edit", name} <= set(ring.offered)

    asyncio.run(session())
