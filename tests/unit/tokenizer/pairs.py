"""Requests for scores, prepared for a model of a directory."""

from pathlib import Path

from quadriga.sampling.params import SamplingParams
from quadriga.sampling.pooling import Pooling
from quadriga.server.config.engine_args import ModelArgs
from quadriga.server.config.frontend_args import FrontendArgs
from quadriga.server.models.formats.tokenizer import load_tokenizer
from quadriga.server.models.resolve import resolve_model
from quadriga.wire.client import PROTOCOL_VERSION, Generate
from tokenizer_proc.preparation.chat import ChatTemplate
from tokenizer_proc.preparation.encode import Encoder
from tokenizer_proc.preparation.prepare import Preparer


def preparer_of(directory: Path) -> Preparer:
    model = resolve_model(ModelArgs(model=str(directory)))
    encoder = Encoder(load_tokenizer(directory), ChatTemplate(directory, None))
    return Preparer(FrontendArgs(), model, encoder)


def prepared(preparer: Preparer, prompt: object, pooling: Pooling, **fields: object) -> Generate:
    params = SamplingParams(pooling=pooling)
    message = Generate(PROTOCOL_VERSION, "r", prompt, params, **fields)  # type: ignore[arg-type]
    return preparer.prepare(message).request


def pooling_of(request: Generate) -> Pooling:
    assert request.params.pooling is not None
    return request.params.pooling
