"""A server whose chat template runs away refuses the chat and serves the next one."""

from pathlib import Path

import pytest

from quadriga.client import Client
from quadriga.errors import InvalidRequest
from tests.server import running_server
from tests.tiny_models import CHAT_TEMPLATE

pytestmark = pytest.mark.timeout(120)

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = "{{ 'x' * 10 ** 10 }}"
SOURCE = (
    f"{{% if messages[0].content.startswith('loop') %}}{LOOP}{{% endif %}}"
    f"{{% if messages[0].content.startswith('memory') %}}{MEMORY}{{% endif %}}" + CHAT_TEMPLATE
)


def test_a_template_that_runs_away_costs_its_request_only(tmp_path: Path, llama_dir: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(SOURCE)
    flags = ["--model", str(llama_dir), "--chat-template", str(template)]
    with running_server(tmp_path / "log", *flags) as server, Client(server.endpoint) as client:
        pids = client.info()["pids"]
        for word in ("loop", "memory"):
            # The second one is longer than the messages that the event loop prepares.
            for content in (word, word + " x" * 4000):
                with pytest.raises(InvalidRequest, match="ran away: it takes more than"):
                    client.tokenize([{"role": "user", "content": content}])
        assert client.tokenize([{"role": "user", "content": "hi"}])
        assert client.info()["pids"] == pids
