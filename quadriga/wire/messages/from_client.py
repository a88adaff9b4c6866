"""client -> tokenizer_proc: one half of the public link, described in docs/protocol.md."""

from typing import Any

import msgspec

from quadriga.sampling.params import SamplingParams

PROTOCOL_VERSION = 1
# A larger public frame is refused with an error; one of twice this size ends the connection.
MAX_FRAME_BYTES = 16 * 1024 * 1024
# Bounds of one chat, which quadriga/wire/chat_limits.py checks.
MAX_TURNS = 4096
MAX_ROLE_CHARS = 64
MAX_NAME_CHARS = 256
MAX_TOOL_CALLS = 4096
MAX_TOOLS = 1024
MAX_TEMPLATE_ARGS = 64
MAX_PROGRESS_IDS = 64
MAX_TRACE_IDS = 64


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn of a chat; a map on the wire. Empty fields are not passed to the chat template.

    Attributes:
        name: name of the tool that answers.
        tool_calls: tool calls of an assistant's turn.
        tool_call_id: id of the call that a tool answers.
        reasoning_content: reasoning of an assistant's turn.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: list[dict[str, Any]] = []
    tool_call_id: str = ""
    reasoning_content: str = ""


class ChatOptions(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Input of a chat template beside the messages; a map on the wire.

    Attributes:
        tools: JSON schemas of functions in OpenAI's form.
        template_args: further variables of the template, for example enable_thinking.
        continue_final_message: the answer continues the last message, which is the assistant's;
            then `add_generation_prompt` must be false.
        add_generation_prompt: end the prompt with the beginning of the assistant's next turn.
    """

    tools: list[dict[str, Any]] = []
    template_args: dict[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Ask for one completion.

    Attributes:
        prompt: a string, or a chat as a list of ChatMessage maps.
        stream: send chunks as tokens come; False: one chunk at the end.
        truncate_prompt: keep the last tokens of a prompt that is longer than the context; None:
            the server's --allow-auto-truncate.
        prompt_token_ids: int32 bytes, in place of a prompt, which is then empty.
        priority: -1000 to 1000, the largest first, if the server schedules by priority.
        queue_timeout: seconds from arrival until the request must be admitted; then it ends with
            deadline_exceeded. None: the server's --queue-timeout.
        timeout: the same until its end. None: the server's --request-timeout.
        chat: input of the chat template, if the prompt is a chat.
        clamp_max_new_tokens: if the context leaves less than max_new_tokens, generate that number
            instead of failing.
        resent: the client has sent the request before, over a connection that was lost. A known
            request continues; a Replay precedes its other messages, empty if the request starts
            again from its first token.
        acknowledge: send an Accepted before all other messages of the request.
        tenant: owner of a gateway's request; ignored from other clients.
        keep_s: seconds for which the request goes on while its client is gone. None: it is aborted
            with the loss of its client.
        traceparent: the caller's span, as in W3C Trace Context; a malformed one is ignored.
    """

    version: int
    request_id: str
    prompt: str | list[ChatMessage]
    params: SamplingParams = SamplingParams()
    stream: bool = True
    truncate_prompt: bool | None = None
    prompt_token_ids: bytes | None = None
    priority: int = 0
    queue_timeout: float | None = None
    timeout: float | None = None
    chat: ChatOptions = ChatOptions()
    clamp_max_new_tokens: bool = False
    resent: bool = False
    acknowledge: bool = False
    tenant: str = ""
    keep_s: float | None = None
    traceparent: str = ""


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Abort a request of this client, or all if the id is empty. Unknown ids are ignored."""

    version: int
    request_id: str


class Ping(msgspec.Struct, tag="ping", array_like=True, frozen=True):
    """Ask for a Pong, which the frontend sends at once."""

    version: int


class GetInfo(msgspec.Struct, tag="get_info", array_like=True, frozen=True):
    """Ask for an Info, which is collected from all processes."""

    version: int
    request_id: str


class Tokenize(msgspec.Struct, tag="tokenize", array_like=True, frozen=True):
    """Ask for the Tokens that a Generate of this prompt would have.

    Attributes:
        with_text: the answer has the text of the prompt too, a chat as its template writes it.
    """

    version: int
    request_id: str
    prompt: str | list[ChatMessage]
    chat: ChatOptions = ChatOptions()
    with_text: bool = False


class Detokenize(msgspec.Struct, tag="detokenize", array_like=True, frozen=True):
    """Ask for the Text of token ids (int32 bytes)."""

    version: int
    request_id: str
    token_ids: bytes
    skip_special_tokens: bool = True


class FlushCache(msgspec.Struct, tag="flush_cache", array_like=True, frozen=True):
    """Drop cached prefixes that no request uses.

    The answer is an Info with the additional value `flushed_pages`.
    """

    version: int
    request_id: str


class GetProgress(msgspec.Struct, tag="get_progress", array_like=True, frozen=True):
    """Ask for the ProgressAnswer of some requests of this client, at most MAX_PROGRESS_IDS."""

    version: int
    request_id: str
    request_ids: list[str]


class GetTraces(msgspec.Struct, tag="get_traces", array_like=True, frozen=True):
    """Ask for the Traces of ended requests of this client, at most MAX_TRACE_IDS."""

    version: int
    request_id: str
    request_ids: list[str]


class Watch(msgspec.Struct, tag="watch", array_like=True, frozen=True):
    """Watch the live feed for some seconds, or longer; it is answered by the feed's messages.

    Attributes:
        seconds: time from now on, at most MAX_WATCH_S; 0: stop.
        replica: number of the replica whose steps are watched.
    """

    version: int
    request_id: str
    seconds: float = 10.0
    replica: int = 0


ClientMessage = (
    Generate
    | Abort
    | Ping
    | GetInfo
    | Tokenize
    | Detokenize
    | FlushCache
    | GetProgress
    | GetTraces
    | Watch
)
