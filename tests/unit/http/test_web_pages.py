"""Which web pages may call the gateway, and what its own pages may load."""

from typing import Any

import aiohttp
import pytest
import yarl

from quadriga.errors import ConfigError
from quadriga.server.config.frontend_args import API_KEY_VARIABLE
from quadriga.server.config.server_config import ServerConfig
from tests.unit.http.server_info import info_of
from tests.unit.scripted_ring import ScriptedRing, gateway_before, run_at_gateway

EVIL = "https://evil.example"
CROSS_SITE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
OPENED = {**CROSS_SITE, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
TEXT = {"Content-Type": "text/plain;charset=UTF-8"}
BODY = b'{"prompt": "x", "max_tokens": 2}'
POSTS = ("/v1/completions", "/abort_request", "/flush_cache", "/v1/what_if", "/v1/files", "/none")


async def status_of(
    gateway: Any, method: str, path: str, headers: dict[str, str], data: bytes | None = None
) -> tuple[int, str]:
    """Return the status of an answer, and the code of its error."""
    url = yarl.URL(gateway.args.url + path, encoded=True)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers, data=data) as response,
    ):
        if response.content_type != "application/json" or response.status < 400:
            return response.status, ""
        body = await response.json()
        error = body["error"]
        return response.status, error if isinstance(error, str) else error["code"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000", "Host": "localhost:8000"},
        {"Origin": EVIL, **CROSS_SITE},
        CROSS_SITE,
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
        {"Origin": "http://[", "Host": "localhost"},
        {**OPENED, "Origin": "null"},
    ],
)
async def test_a_page_of_another_origin_can_do_nothing_at_a_server_without_keys(
    headers: dict[str, str],
) -> None:
    ring = ScriptedRing(["a"])
    async with gateway_before(ring) as (_, gateway):
        for path in POSTS:
            answer = await status_of(gateway, "POST", path, TEXT | headers, BODY)
            assert answer == (403, "foreign_origin"), path
        form = {"Content-Type": "multipart/form-data; boundary=X"} | headers
        assert (await status_of(gateway, "POST", "/v1/files", form, b"--X--"))[0] == 403
        assert ring.submitted == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://chat.example.org"},
        {"Origin": "https://Localhost:8000", "Host": "localhost:8000"},
    ],
)
async def test_programs_and_the_servers_own_page_are_answered(headers: dict[str, str]) -> None:
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        answer = await status_of(gateway, "POST", "/v1/completions", headers, BODY)
        assert answer == (200, "")


async def test_a_link_of_another_page_opens_the_page_but_loads_no_part_of_one() -> None:
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        shown = {"Accept": "text/html"}
        assert (await status_of(gateway, "GET", "/", OPENED | shown))[0] == 200
        assert (await status_of(gateway, "GET", "/docs", OPENED))[0] == 200
        for part in ("/", "/ui/index.js", "/v1/models", "/metrics"):
            assert (await status_of(gateway, "GET", part, CROSS_SITE))[0] == 403, part
        frame = OPENED | {"Sec-Fetch-Dest": "iframe"}
        assert (await status_of(gateway, "GET", "/docs", frame))[0] == 403
        assert (await status_of(gateway, "GET", "/health", CROSS_SITE))[0] == 200


async def test_pages_that_are_named_are_answered_and_others_are_not() -> None:
    async with gateway_before(ScriptedRing(["a"]), allowed_origins="https://a.example") as (
        _,
        gateway,
    ):
        for origin, expected in (("https://a.example", 200), (EVIL, 403)):
            headers = {"Origin": origin, **CROSS_SITE}
            answer = await status_of(gateway, "POST", "/v1/completions", headers, BODY)
            assert answer[0] == expected
        preflight = {"Origin": EVIL, "Access-Control-Request-Method": "POST"}
        assert (await status_of(gateway, "OPTIONS", "/v1/completions", preflight))[0] == 403


async def test_where_a_key_is_asked_for_the_key_decides_and_not_the_page() -> None:
    async with gateway_before(ScriptedRing(["a"]), api_key="k") as (_, gateway):
        headers = {"Origin": EVIL, "Host": "evil.example", **CROSS_SITE}
        assert (await status_of(gateway, "POST", "/v1/completions", headers, BODY))[0] == 401
        headers["Authorization"] = "Bearer k"
        assert (await status_of(gateway, "POST", "/v1/completions", headers, BODY))[0] == 200


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("x", False),
        ("[::1", False),
        ("localhost", True),
        ("LOCALHOST:1", True),
        ("localhost.", True),
        ("a.localhost", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("10.1.2.3", True),
        ("host.docker.internal:8000", True),
    ],
)
async def test_on_loopback_without_a_key_only_the_names_of_this_machine_are_known(
    host: str, is_known: bool
) -> None:
    async with gateway_before(ScriptedRing(["a"])) as (_, gateway):
        for path in ("/v1/models", "/", "/docs", "/server_info"):
            answer = await status_of(gateway, "GET", path, {"Host": host})
            assert answer == ((200, "") if is_known else (403, "unknown_host")), path
        assert (await status_of(gateway, "GET", "/livez", {"Host": host}))[0] == 200, "a probe"


@pytest.mark.parametrize("flags", [{}, {"host": "0.0.0.0"}, {"api_key": "k"}])
async def test_the_names_of_a_proxy_are_those_of_a_flag(flags: dict[str, str]) -> None:
    key = {"Authorization": "Bearer k"}

    hosts = "chat.example.org, *.example.net"
    async with gateway_before(ScriptedRing(["a"]), allowed_hosts=hosts, **flags) as (_, gateway):
        for host, status in (
            ("chat.example.org", 200), ("a.b.example.net", 200), ("example.net", 403),
            ("evil.example", 403), ("localhost", 200),
        ):  # fmt: skip
            answer = await status_of(gateway, "GET", "/v1/models", {"Host": host, **key})
            assert answer[0] == status, host


def test_beyond_loopback_any_name_is_taken_as_proxies_and_services_send_others() -> None:
    async def test(gateway: Any) -> None:
        answer = await status_of(gateway, "GET", "/v1/models", {"Host": "quadriga.default.svc"})
        assert answer == (200, "")

    run_at_gateway(ScriptedRing(["a"]), test, host="0.0.0.0")
    run_at_gateway(ScriptedRing(["a"]), test, allowed_hosts="*")


def test_no_answer_may_be_framed_or_guessed_and_pages_run_their_own_script_only() -> None:
    async def test(gateway: Any) -> None:
        async with aiohttp.ClientSession(gateway.args.url) as session:
            for path in ("/", "/docs", "/v1/models", "/nothing"):
                async with session.get(path, headers={"Accept": "text/html"}) as response:
                    policy = response.headers["Content-Security-Policy"]
                    assert "frame-ancestors 'none'" in policy, path
                    assert "unsafe" not in policy and "default-src 'none'" in policy
                    assert response.headers["X-Frame-Options"] == "DENY"
                    assert response.headers["X-Content-Type-Options"] == "nosniff"
                    assert response.headers["Server"] == "quadriga"

    run_at_gateway(ScriptedRing(["a"]), test)
    run_at_gateway(ScriptedRing(["a"]), test, no_ui=True)


@pytest.mark.parametrize("hosts", ["http://a.example", "a.example:80", "a b", "a.*.example"])
def test_a_name_that_is_none_is_refused_at_the_start(hosts: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts has"):
        ServerConfig().replace(allowed_hosts=hosts).validate()


@pytest.mark.parametrize("value", ["", ",", " , "])
def test_a_variable_without_a_key_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, value)
    with pytest.raises(ConfigError, match="has no key"):
        ServerConfig().validate()


async def test_a_router_without_a_key_reads_the_metrics_only_where_a_flag_allows_it() -> None:
    for allowed in (False, True):
        ring = ScriptedRing(["a"], **info_of())
        flags: dict[str, Any] = {"api_key": "secret", "metrics_without_key": allowed}
        async with gateway_before(ring, **flags) as (_, gateway):
            status, _code = await status_of(gateway, "GET", "/metrics", {})
            assert status == (200 if allowed else 401)
            assert (await status_of(gateway, "GET", "/v1/models", {}))[0] == 401
