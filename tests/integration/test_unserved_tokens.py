"""A model whose tokenizer and config name ids that it does not have, served by real processes."""

from collections.abc import Iterator

import pytest

from quadriga.client import Client, SamplingParams
from quadriga.errors import InvalidRequest
from tests.server import Server, running_server
from tests.tiny_models import SPECIAL, add_unserved_tokens, tiny_llama

RULE = f"holds 512 (the token '{SPECIAL}'): ids of this model are 0 to 511"
GREEDY = SamplingParams(temperature=0, max_new_tokens=6)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("model")
    model = add_unserved_tokens(tiny_llama(directory / "tiny", eos_token_id=[2, 99999]))
    flags = ["--model", str(model), "--max-total-tokens", "4096", "--worker-threads", "1"]
    with running_server(directory / "log", *flags) as running:
        yield running


def test_requests_with_such_a_token_are_refused_and_no_process_dies(server: Server) -> None:
    with Client(server.endpoint) as client:
        pids = client.info()["pids"]
        expected = client.generate("a", GREEDY)
        for _ in range(5):  # a fourth crash of the worker would end the server
            for prompt, params in (
                (f"a{SPECIAL}", SamplingParams(prompt_logprobs=1)),
                ([{"role": "user", "content": SPECIAL}], SamplingParams()),
                ("a", SamplingParams(bad_words=[SPECIAL])),
            ):
                with pytest.raises(InvalidRequest) as caught:
                    client.generate(prompt, params)
                assert RULE in str(caught.value)
        assert client.generate("a", GREEDY).token_ids == expected.token_ids
        assert client.info()["pids"] == pids


def test_grammars_and_least_lengths_work(server: Server) -> None:
    with Client(server.endpoint) as client:
        chosen = client.generate("a", SamplingParams(regex="[ab]{3}", seed=1))
        assert len(chosen.text) == 3 and set(chosen.text) <= {"a", "b"}
        assert chosen.finish_reason == "stop"
        longer = client.generate("a", SamplingParams(min_new_tokens=5, max_new_tokens=8, seed=2))
        assert len(longer.token_ids) >= 5


def test_the_log_names_the_ids_once(server: Server) -> None:
    log = server.log.read_text()
    assert log.count(f"'{SPECIAL}' (512)") == log.count("eos_token_id names 99999") == 1
