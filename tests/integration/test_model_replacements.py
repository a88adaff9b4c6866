"""A checkpoint without a tokenizer is served with another's, as a base model or with a template."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from quadriga.client import Client
from quadriga.sampling.params import SamplingParams
from tests.server import ROOT, running_server

pytestmark = pytest.mark.timeout(120)
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)


@pytest.fixture
def flags(tmp_path: Path, llama_dir: Path) -> list[str]:
    """The flags of a bare checkpoint with the tokenizer of a directory without a template."""
    bare, tokenizer = tmp_path / "bare", tmp_path / "tokenizer"
    for directory, names in (
        (bare, ("config.json", "model.safetensors")),
        (tokenizer, ("tokenizer.json", "tokenizer_config.json")),
    ):
        directory.mkdir()
        for name in names:
            shutil.copy(llama_dir / name, directory)
    settings = tokenizer / "tokenizer_config.json"
    config = json.loads(settings.read_text())
    del config["chat_template"]
    settings.write_text(json.dumps(config))
    return ["--model", str(bare), "--tokenizer", str(tokenizer), "--worker-threads", "1"]


def test_the_ask_line_of_a_base_model_works_as_it_is(tmp_path: Path, flags: list[str]) -> None:
    with running_server(tmp_path / "log", *flags) as server:
        command = re.findall(r" {3,}ask +(.+)", server.log.read_text())[-1]
        assert "--plain" in command
        words = [*shlex.split(command), "--max-new-tokens", "4"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


def test_a_template_of_a_file_makes_the_prompts_of_chats(tmp_path: Path, flags: list[str]) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}")
    with (
        running_server(tmp_path / "log", *flags, "--chat-template", str(template)) as server,
        Client(server.endpoint) as client,
    ):
        chat = client.generate([{"role": "user", "content": "hello"}], GREEDY)
        plain = client.generate("user says hello", GREEDY)
    assert chat.token_ids == plain.token_ids
