"""MODEL without --model, and the advice for flags that this server does not have."""

import pytest

from quadriga.server.config import served_models
from quadriga.server.config.flags import FOREIGN_FLAGS, REMOVED_FLAGS, flag_fields, flag_name
from quadriga.server.config.parser import ServerParser, in_flags
from quadriga.server.config.server_config import ServerConfig, from_namespace


def parse(line: str) -> ServerConfig:
    return from_namespace(ServerParser("quadriga serve").parse_flags(line.split()))


def flags_of_the_server() -> set[str]:
    return {flag_name(field.name) for field in flag_fields(*ServerConfig().groups())}


def complaint(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(line)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "line",
    ["gpt2 --port 80", "--port 80 gpt2", "--no-http gpt2 --port 80", "--port 80 --model gpt2"],
)
def test_the_model_may_stand_anywhere_without_its_flag(line: str) -> None:
    config = parse(line)
    assert (config.model.model, config.http.port) == ("gpt2", 80)


def test_models_are_named_with_and_without_the_flag() -> None:
    assert parse("gpt2 --model gpt2").model.model == "gpt2"
    for line in ("gpt2 --model llama", "gpt2 llama", "--model gpt2 --model llama"):
        namespace = ServerParser("serve").parse_flags(line.split())
        assert [model.name for model in served_models.from_namespace(namespace).models] == [
            "gpt2",
            "llama",
        ]


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("--max-bach-size 3", "no flag --max-bach-size; near it: --max-batch-size"),
        ("--no-prefix-cashe", "near it: --no-prefix-cache"),
        ("--qqqqqqqq=3", "no flag --qqqqqqqq; --help-all shows all flags"),
        ("--max-num-seqs 8", "vLLM's --max-num-seqs is --max-running-requests here"),
        ("--max-model-len=8", "vLLM's --max-model-len is --context-length here"),
        ("-c 4096 model", "llama.cpp's -c is --context-length here"),
        ("-ngl 99", "llama.cpp's -ngl is not needed here: --device has all layers"),
        ("--max-open-batches 3", "--max-open-batches is no flag any more: 100 may be open; a"),
        ("--tp-size 2 --foo", "SGLang's --tp-size is --tp here; there is no flag --foo"),
    ],
)
def test_a_flag_that_does_not_exist_is_an_error_that_names_the_right_one(
    line: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert advice in complaint(line, capsys)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("dp is 1 and prefill_replicas is auto", "--dp is 1 and --prefill-replicas is auto"),
        (
            "max_total_tokens is 5: page_size 2 does not",
            "--max-total-tokens is 5: --page-size 2 does not",
        ),
        ("tp is 3; start with --max-loras 2", "--tp is 3; start with --max-loras 2"),
        ("serve.yaml: max_loras is 'a'", "serve.yaml: max_loras is 'a'"),
        ("the model is large, and no port is free", "the model is large, and no port is free"),
        ("/data/max_loras/a: 'page_size'", "/data/max_loras/a: 'page_size'"),
    ],
)
def test_messages_on_the_command_line_name_flags(message: str, shown: str) -> None:
    assert in_flags(message) == shown


def test_flags_of_other_servers_lead_to_flags_that_exist_and_are_none_themselves() -> None:
    ours = flags_of_the_server()
    named = {word.strip(";") for foreign in FOREIGN_FLAGS.values() for word in foreign.here.split()
             if word.startswith("--")}  # fmt: skip
    assert named <= ours
    assert not ours & FOREIGN_FLAGS.keys()


def test_advice_for_flags_of_earlier_versions_names_flags_that_exist() -> None:
    ours = flags_of_the_server()
    named = {word.strip(",") for text in REMOVED_FLAGS.values() for word in text.split()
             if word.startswith("--")}  # fmt: skip
    assert named <= ours
    assert not ours & REMOVED_FLAGS.keys()
    assert not FOREIGN_FLAGS.keys() & REMOVED_FLAGS.keys()
