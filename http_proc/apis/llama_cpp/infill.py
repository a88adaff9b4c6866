"""The handler of POST /infill, llama.cpp's endpoint for editors: the text between two others."""

import msgspec
from aiohttp import web

from http_proc.apis.llama_cpp.answers import InfillStream, infill_answer, selected
from http_proc.apis.llama_cpp.bodies import InfillRequest
from http_proc.endpoints.request_body import convert, read_object
from http_proc.gateway import GATEWAY
from http_proc.protocol.errors import invalid
from http_proc.protocol.filling import fill_format, fill_params
from http_proc.protocol.response_format import with_grammar
from http_proc.protocol.sampling import take_sampling
from http_proc.responses import collect, json_response, stream_events
from quadriga.fill_format import ContextFile
from quadriga.sampling.params import SamplingParams

# llama.cpp's names of the sampling fields -> SamplingParams' names. InfillRequest has those whose
# values differ.
LLAMA_CPP = {name: name for name in (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop",
    "ignore_eos", "json_schema",
)} | {"repeat_penalty": "repetition_penalty"}  # fmt: skip
# The request's name of each field of the ring, beside the sampling fields.
NAMES = {"prompt": "input_prefix", "max_new_tokens": "n_predict", "logprobs": "n_probs"}


async def infill(request: web.Request) -> web.StreamResponse:
    """Return the text between a prefix and a suffix."""
    gateway = request.app[GATEWAY]
    body = await read_object(request)
    sampling = take_sampling(body, LLAMA_CPP, {})
    call = convert(body, InfillRequest)
    gateway.check_model(call.model)
    sampling = with_grammar(sampling, "grammar", {"ebnf": call.grammar} if call.grammar else {})
    known = fill_format(await gateway.ring_info.static(), gateway.model, "input_suffix")
    files = [ContextFile(file.filename, file.text) for file in call.input_extra]
    prompt = known.prompt(call.input_prefix, call.input_suffix, files) + call.prompt
    params = fill_params(_params(sampling.params, call), known)
    head = gateway.head(request, "infill")
    names = {**NAMES, **sampling.names}
    with gateway.open_group(head.id, names) as group:
        group.submit(prompt, params, call.stream, {})
        if call.stream:
            renderer = InfillStream(head.model, params, call.response_fields)
            return await stream_events(request, group, renderer, names)
        (completion,) = await collect(request, group)
    answer = infill_answer(head.model, completion, params, completion.text)
    return json_response(selected(msgspec.to_builtins(answer), call.response_fields))


def _params(params: SamplingParams, call: InfillRequest) -> SamplingParams:
    """Return the parameters with those whose values llama.cpp writes otherwise."""
    return msgspec.structs.replace(
        params,
        max_new_tokens=call.n_predict if call.n_predict >= 0 else None,
        seed=call.seed if call.seed >= 0 else None,
        logprobs=call.n_probs or None,
        logit_bias=_logit_bias(call),
    )


def _logit_bias(call: InfillRequest) -> dict[int, float]:
    given = call.logit_bias
    pairs = given.items() if isinstance(given, dict) else given
    try:
        return {int(key): -100.0 if bias is False else float(bias) for key, bias in pairs}
    except ValueError:
        raise invalid(
            f"logit_bias has a key that is no token id: {list(dict(pairs))}; write ids",
            "logit_bias",
        ) from None
