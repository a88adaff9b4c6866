"""The handler of POST /v1/chat/completions."""

from aiohttp import web

from http_proc.apis.openai.answer_form import AnswerForm
from http_proc.apis.openai.chat_fields import chat_call
from http_proc.apis.openai.chat_stream import ChatStream
from http_proc.apis.openai.usage import StreamUsage
from http_proc.chat.answers import ChatAnswer, collect_chat, stream_chat
from http_proc.chat.prepare import prepare_chat
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY, ResponseHead
from http_proc.protocol.chat_messages import check_counts
from http_proc.protocol.logprobs import chat_logprobs, prompt_logprobs
from http_proc.protocol.sampling import CHAT, check_receipt, take_sampling
from http_proc.protocol.schema import (
    ChatBody,
    ChatChoice,
    ChatRequest,
    last_ids,
    usage_body,
)
from http_proc.protocol.timings import timings_body
from http_proc.responses import json_response


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a chat n times."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    check_counts(body)
    sampling = take_sampling(body, CHAT, {})
    fields = convert(body, ChatRequest, CHAT)
    gateway.check_model(fields.model)
    check_receipt(fields)
    call = chat_call(fields, sampling)
    prepared = await prepare_chat(gateway, call)
    head = gateway.head(request, "chatcmpl")
    with gateway.open_group(head.id, prepared.names) as group:
        stream = call.stream or prepared.reader.needs_chunks
        group.submit(call.messages, prepared.params, stream, prepared.options)
        prompt_ids: list[int] | None = None
        if fields.return_token_ids:
            rendered = await gateway.ring.render(call.messages, prepared.options["chat"])
            prompt_ids = rendered.token_ids
        if call.stream:
            counts_reasoning = prepared.reader.separates_reasoning
            usage = StreamUsage(fields.stream_options, prepared.params.n, counts_reasoning)
            renderer = ChatStream(head, usage, AnswerForm.of(fields), prompt_ids)
            return await stream_chat(request, group, prepared, renderer)
        answers = await collect_chat(request, group, prepared)
        answer = _body(head, answers, AnswerForm.of(fields))
        if prompt_ids is not None:
            usages = [each.completion.usage for each in answers]
            answer.prompt_token_ids = last_ids(prompt_ids, usages[0].prompt_tokens)
            for choice, each in zip(answer.choices, answers, strict=True):
                choice.token_ids = each.completion.token_ids
        if fields.receipt:
            answer.receipts = await group.receipts([each.completion for each in answers])
    return json_response(answer)


def _body(head: ResponseHead, answers: list[ChatAnswer], form: AnswerForm) -> ChatBody:
    choices = []
    for index, answer in enumerate(answers):
        completion = answer.completion
        choices.append(
            ChatChoice(
                index,
                form.message(answer.parsed),
                form.finish_reason(answer.finish_reason),
                None if completion.logprobs is None else chat_logprobs(completion.logprobs),
                completion.matched_stop,
            )
        )
    usage = usage_body([answer.completion.usage for answer in answers], len(answers))
    usage = usage.with_reasoning([answer.num_reasoning_tokens for answer in answers])
    timings = timings_body([answer.completion for answer in answers])
    body = ChatBody(head.id, head.created, head.model, choices, usage, timings)
    if (logprobs := answers[0].completion.prompt_logprobs) is not None:
        body.prompt_logprobs = prompt_logprobs(logprobs)
    return body
