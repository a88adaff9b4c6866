"""What a request's sampling is where it does not say."""

from typing import Any

import msgspec

from quadriga.errors import ConfigError, InvalidRequest
from quadriga.sampling.params import NEUTRAL, SamplingDefaults, SamplingParams
from quadriga.sampling.validation import validate_params


def sampling_defaults(source: str, generation_config: dict[str, Any]) -> SamplingDefaults:
    """source: --sampling-defaults. ConfigError where the model's own cannot be used."""
    if source == "openai":
        return NEUTRAL
    own = {
        name: generation_config[name]
        for name in SamplingDefaults.__struct_fields__
        if generation_config.get(name) is not None
    }
    try:
        defaults = msgspec.convert(own, SamplingDefaults)
        validate_params(SamplingParams().filled(defaults), vocab_size=1)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(
            f"the model's generation_config.json cannot be used: {error};"
            " start with --sampling-defaults openai"
        ) from None
    return defaults
