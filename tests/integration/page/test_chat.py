"""The chat of the page: messages, versions, parameters, and what the browser keeps."""

import asyncio
import json
from typing import Any

import pytest

from quadriga.errors import QueueFull, RequestFailed
from tests.browser import Page
from tests.integration.page.chat_page import (
    MESSAGE,
    OPEN,
    ask,
    button,
    follow_and_send,
    set_settings,
    text_of,
    until_answered,
    until_saved,
    until_text,
)
from tests.integration.page.page_ring import (
    THINKING,
    ChoicesRing,
    GivenRing,
    OpenRing,
    fair_logprobs,
)
from tests.integration.page.page_session import in_browser
from tests.unit.scripted_ring import ScriptedRing

# As an earlier version has kept it.
WITHOUT_IDS = """new Promise((done, failed) => {
    const opening = indexedDB.open('quadriga');
    opening.onerror = failed;
    opening.onsuccess = () => {
        const store = opening.result.transaction('conversations', 'readwrite')
            .objectStore('conversations');
        store.openCursor().onsuccess = ({ target: { result: cursor } }) => {
            if (!cursor) { opening.result.close(); return done(); }
            const text = JSON.stringify(cursor.value).replace(/"id":\\d+,/g, '');
            cursor.update(JSON.parse(text));
            cursor.continue();
        };
    };
})"""
NEW_CHAT = "a.button.primary"
TOOLS = json.dumps([{"name": "weather", "parameters": {"type": "object", "properties": {}}}])


def chats(ring: ScriptedRing) -> list[list[tuple[str, str]]]:
    """Return role and content of the messages of each request."""
    return [[(one["role"], one["content"]) for one in prompt] for prompt, _, _ in ring.submitted]


def test_a_message_is_answered_with_markdown_and_figures(chromium: str) -> None:
    ring = ScriptedRing(["A **bold**", " word\n\n```python\n", "print(1)\n```"])

    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_answered(page)
        assert await text_of(page, ".answer strong") == "bold"
        assert await text_of(page, ".answer .hljs-built_in") == "print"
        await until_text(page, ".figures", "to first token")
        await until_text(page, ".figures", "3 tokens")
        await until_text(page, ".conversations", "Hello")

    in_browser(chromium, ring, test)
    assert chats(ring) == [[("user", "Hello")]]


def test_a_conversation_goes_on_after_a_reload(chromium: str) -> None:
    ring = ScriptedRing(["Yes"])

    async def test(page: Page) -> None:
        await ask(page, "One")
        await until_answered(page)
        await until_saved(page, "One", "Yes")
        await page.reload()
        await until_answered(page)
        await ask(page, "Two")
        await until_answered(page, 2)

    in_browser(chromium, ring, test)
    assert chats(ring)[1] == [("user", "One"), ("assistant", "Yes"), ("user", "Two")]


def test_a_message_goes_to_the_conversation_of_a_link_that_was_followed_just_before(
    chromium: str,
) -> None:
    ring = ScriptedRing(["Yes"])

    async def test(page: Page) -> None:
        await ask(page, "One")
        await until_answered(page)
        await page.click(MESSAGE)
        await page.type("Two")
        await follow_and_send(page, NEW_CHAT)
        await until_text(page, "h1", "Two")
        await until_answered(page)
        await until_saved(page, "One", "Yes")
        await until_saved(page, "Two", "Yes")
        await page.reload()  # the first conversation has to be read again
        await until_answered(page)
        await page.click(MESSAGE)
        await page.type("Three")
        await follow_and_send(page, ".conversations li:last-child a")
        await until_text(page, "h1", "One")
        await until_answered(page, 2)

    in_browser(chromium, ring, test)
    one, two, three = (("user", text) for text in ("One", "Two", "Three"))
    assert chats(ring) == [[one], [two], [one, ("assistant", "Yes"), three]]


def test_a_new_chat_does_not_wait_for_the_answer_in_the_last_one(chromium: str) -> None:
    ring = OpenRing(["Once"])

    async def test(page: Page) -> None:
        await ask(page, "A tale")
        await until_text(page, ".answer", "Once")
        await page.click(MESSAGE)
        await page.type("Another")
        await follow_and_send(page, NEW_CHAT)
        await until_text(page, "h1", "Another")
        await until_text(page, ".answer", "Once")

    in_browser(chromium, ring, test)
    assert chats(ring) == [[("user", "A tale")], [("user", "Another")]]


def test_an_error_in_a_conversation_whose_link_was_followed_just_before_is_shown(
    chromium: str,
) -> None:
    ring = ScriptedRing(["Yes"])

    async def test(page: Page) -> None:
        await ask(page, "One")
        await until_answered(page)
        await set_settings(page, values={"logit_bias": "{"})
        await page.click(MESSAGE)
        await page.type("Two")
        await follow_and_send(page, NEW_CHAT)
        await until_text(page, ".error-bar", "Logit bias is not valid JSON")
        assert await page.evaluate(f"document.querySelector({MESSAGE!r}).value") == "Two"
        await page.click(".conversations a")
        await page.until("!document.querySelector('.error-bar')")

    in_browser(chromium, ring, test)
    assert len(ring.submitted) == 1


def test_stop_ends_the_request_and_keeps_the_text(chromium: str) -> None:
    ring = OpenRing(["Once", " upon"])

    async def test(page: Page) -> None:
        await ask(page, "A tale")
        await until_text(page, ".answer", "Once upon")
        await page.click(button("Stop"))
        await until_answered(page)
        await until_text(page, ".figures", "Stopped.")
        assert "Once upon" in await text_of(page, ".answer")
        await page.until(f"document.querySelector({button('Continue')!r})")

    in_browser(chromium, ring, test)
    assert ring.num_aborted == 1


def test_continue_goes_on_where_the_answer_was_stopped(chromium: str) -> None:
    ring = OpenRing(["Once"])

    async def test(page: Page) -> None:
        await ask(page, "A tale")
        await until_text(page, ".answer", "Once")
        await page.press("Escape")
        await until_answered(page)
        ring.pieces, ring.leaves_open = [" upon", " a time"], False
        await page.click(button("Continue"))
        await until_text(page, ".answer", "Once upon a time")
        await until_answered(page)

    in_browser(chromium, ring, test)
    assert chats(ring)[1] == [("user", "A tale"), ("assistant", "Once")]


def test_an_edited_message_and_a_second_answer_are_versions_beside_the_first(chromium: str) -> None:
    ring = ScriptedRing(["first"])

    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_answered(page)
        ring.pieces = ["second"]
        await page.click(button("Regenerate"))
        await until_text(page, ".answer", "second")
        await until_text(page, ".answer .versions", "2/2")
        await page.click(button("Version before"))
        await until_text(page, ".answer", "first")
        ring.pieces = ["third"]
        await page.click(button("Edit and send again"))
        await page.until("document.activeElement.matches('.edited textarea')")
        await page.type(" again")
        await page.press("Enter")
        await until_text(page, ".answer", "third")
        await until_text(page, ".question .versions", "2/2")

    in_browser(chromium, ring, test)
    assert chats(ring) == [[("user", "Hello")]] * 2 + [[("user", "Hello again")]]


def test_several_answers_stand_side_by_side_and_the_chosen_one_goes_on(chromium: str) -> None:
    ring = ChoicesRing(["x"])

    async def test(page: Page) -> None:
        await set_settings(page, numAnswers=2)
        await ask(page, "Name one")
        await until_answered(page, 2)
        await page.click(".side:nth-child(2) input[type=radio]")
        await page.until("document.querySelector('.side:nth-child(2)').dataset.selected === 'true'")
        await until_text(page, ".side:nth-child(2) .figures", "to first token")
        await ask(page, "Go on")
        await until_answered(page, 4)

    in_browser(chromium, ring, test)
    assert [params.n for _, params, _ in ring.submitted] == [2, 2]
    assert chats(ring)[1] == [("user", "Name one"), ("assistant", "x"), ("user", "Go on")]


def test_parameters_are_sent_and_what_is_no_number_is_said(chromium: str) -> None:
    ring = ScriptedRing(["x"])

    async def test(page: Page) -> None:
        await page.click(button("Settings"))
        await page.click("input[name=temperature]")
        await page.type("0.25")
        await page.click(".settings textarea")
        await page.type("Be brief")
        await page.click(button("Close settings"))
        await ask(page, "Hello")
        await until_answered(page)
        await set_settings(page, values={"logit_bias": "{"})
        await page.click(NEW_CHAT)
        await ask(page, "Hello")
        await until_text(page, ".error-bar", "Logit bias is not valid JSON")

    in_browser(chromium, ring, test)
    assert ring.submitted[0][1].temperature == 0.25
    assert chats(ring) == [[("system", "Be brief"), ("user", "Hello")]]


def test_a_json_schema_is_sent(chromium: str) -> None:
    ring = ScriptedRing(["{}"])
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}

    async def test(page: Page) -> None:
        await set_settings(page, grammar={"name": "json_schema", "text": json.dumps(schema)})
        await ask(page, "Hello")
        await until_answered(page)

    in_browser(chromium, ring, test)
    sent = ring.submitted[0][1].json_schema
    obeyed = json.loads(sent) if isinstance(sent, str) else sent
    # It is not strict: what no grammar can enforce is left out.
    assert obeyed == schema | {"x-guidance": {"lenient": True}}


def test_the_user_types_in_the_results_of_calls(chromium: str) -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    ring = ScriptedRing([call])

    async def test(page: Page) -> None:
        await set_settings(page, tools=TOOLS)
        await ask(page, "Rain?")
        await until_text(page, ".tool-call", '"city": "Rome"')
        ring.pieces = ["It rains"]
        await page.click(".tool-call textarea")
        await page.type("wet")
        await page.click(".tool-calls button.primary")
        await until_text(page, ".thread", "It rains")
        assert "wet" in await text_of(page, ".tool-result")

    in_browser(chromium, ring, test)
    assert chats(ring)[1][-1] == ("tool", "wet")


def test_probabilities_are_shown_by_token_and_another_token_is_a_new_version(chromium: str) -> None:
    ring = GivenRing(["One", " two"])
    ring.logprobs = fair_logprobs

    async def test(page: Page) -> None:
        await set_settings(page, hasProbabilities=True)
        await ask(page, "Count")
        await until_answered(page)
        await page.click(button("Token probabilities"))
        await page.evaluate("document.querySelector('[data-token=\"1\"]').focus()")
        await until_text(page, "table.alternatives", "other")
        assert "50.0 %" in await text_of(page, "table.alternatives")
        ring.pieces = [" more", "!"]
        await page.click(".alternatives .link")
        await until_text(page, ".answer", "Oneother more!")
        await page.click(button("Token probabilities"))
        shown = "[...document.querySelectorAll('.token')].map((one) => one.innerText)"
        assert await page.evaluate(shown) == ["One", "other", " more", "!"]
        # The new version branches itself.
        await page.evaluate("document.querySelector('[data-token=\"0\"]').focus()")
        ring.pieces = [" end"]
        await page.click(".alternatives .link")
        await until_text(page, ".answer", "other end")

    in_browser(chromium, ring, test)
    assert set(map(tuple, chats(ring))) == {(("user", "Count"),)}
    given = [params.first_token_ids for _, params, _ in ring.submitted if params is not None]
    assert given == [[], [1, 2], [2]]


def test_an_answer_whose_tokens_have_no_ids_goes_on_as_text(chromium: str) -> None:
    ring = ScriptedRing(["One", " two"])
    ring.logprobs = fair_logprobs

    async def test(page: Page) -> None:
        await set_settings(page, hasProbabilities=True)
        await ask(page, "Count")
        await until_answered(page)
        await until_saved(page, "Count", "One two")
        await page.evaluate(WITHOUT_IDS)
        await page.reload()
        await until_text(page, ".answer", "One two")
        await page.click(button("Token probabilities"))
        await page.evaluate("document.querySelector('[data-token=\"1\"]').focus()")
        ring.pieces = [" more"]
        await page.click(".alternatives .link")
        await until_text(page, ".answer", "Oneother more")

    in_browser(chromium, ring, test)
    assert chats(ring)[-1][-1] == ("assistant", "Oneother")


def test_thinking_is_folded_away_when_the_answer_begins(chromium: str) -> None:
    ring = OpenRing(["<think>\nLet me see"])
    ring.facts["answer_format"] = THINKING

    async def test(page: Page) -> None:
        await ask(page, "Hm?")
        await until_text(page, ".thinking[open]", "Let me see")
        ring.finish("\n</think>\n\nFour")
        await until_text(page, ".answer > .markdown", "Four")
        await page.until("document.querySelector('.thinking:not([open])')")

    in_browser(chromium, ring, test)


def test_an_error_of_the_server_is_shown_with_its_message(chromium: str) -> None:
    ring = ScriptedRing(["x"])
    ring.error = QueueFull("the queue is full: 7 of 7 requests wait")

    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_text(page, ".problem", "the queue is full")
        await until_text(page, ".problem", "429")
        ring.error = None
        await page.click(button("Regenerate"))
        await until_text(page, ".answer", "x")

    in_browser(chromium, ring, test, may_complain=True)


def test_an_error_in_a_stream_is_shown_below_its_text(chromium: str) -> None:
    ring = OpenRing(["Some text"])

    async def test(page: Page) -> None:
        await ask(page, "Hello")
        await until_text(page, ".answer", "Some text")
        ring.fail(RequestFailed("the worker died three times"))
        await until_text(page, ".problem", "the worker died three times")
        assert "Some text" in await text_of(page, ".answer")

    in_browser(chromium, ring, test)


def test_conversations_are_exported_imported_and_deleted(chromium: str) -> None:
    ring = ScriptedRing(["Yes"])

    async def test(page: Page) -> None:
        await page.evaluate(
            "URL.createObjectURL = (blob) => { window.file = blob.text(); return '#' }"
        )
        await page.until(f"document.querySelector({MESSAGE!r})")
        await ask(page, "Hello")
        await until_answered(page)
        await until_text(page, ".conversations", "Hello")
        await page.click(button("Export all conversations"))
        await page.until("window.file")
        text = await page.evaluate("window.file")
        (record,) = json.loads(text)["conversations"]
        assert [one["content"] for one in record["messages"]] == ["Hello", "Yes"]
        await page.evaluate("window.confirm = () => true")
        await page.click(button("Delete all conversations"))
        await page.until("!document.querySelector('.conversations li')")
        for content in (text, '{"messages": [{"role": "user", "content": "Of the API"}]}'):
            await import_text(page, content)
        await until_text(page, ".conversations", "Of the API")
        await until_text(page, ".conversations", "Hello")
        await import_text(page, "{}")
        await until_text(page, ".error-bar", "neither conversations")

    in_browser(chromium, ring, test)


async def import_text(page: Page, text: str) -> None:
    await page.evaluate(
        "(() => { const input = document.querySelector('input[type=file]');"
        " const data = new DataTransfer();"
        f" data.items.add(new File([{json.dumps(text)}], 'x.json'));"
        " input.files = data.files;"
        " input.dispatchEvent(new Event('change', { bubbles: true })) })()"
    )


def test_a_chat_by_keys_alone(chromium: str) -> None:
    ring = OpenRing(["Once"])

    async def test(page: Page) -> None:
        await page.until(f"document.querySelector({MESSAGE!r})")
        await page.evaluate("document.activeElement.blur()")
        await page.press("/")
        await page.type("A tale")
        await page.press("Enter")
        await until_text(page, ".answer", "Once")
        await page.press("Escape")
        await until_answered(page)
        ring.pieces = ["Twice"]
        for _ in range(40):
            await page.press("Tab", 8)
            if await focused(page) == "Regenerate":
                break
        await page.press("Enter")
        await until_text(page, ".answer", "Twice")
        await page.until(f"document.querySelector({OPEN!r})")

    in_browser(chromium, ring, test)


async def focused(page: Page) -> Any:
    return await page.evaluate("document.activeElement.getAttribute('aria-label')")


def test_an_answer_shows_its_speed_while_it_runs(chromium: str) -> None:
    ring = OpenRing(["one "])

    async def test(page: Page) -> None:
        await ask(page, "Hello")
        for _ in range(12):
            ring.push("more ")
            await asyncio.sleep(0.05)
        await page.until(
            "/^[0-9.]+ tokens\\/s$/m.test(document.querySelector('.waiting').innerText)"
        )
        ring.finish()
        await until_answered(page)
        assert not await page.evaluate("document.querySelector('.waiting')")

    in_browser(chromium, ring, test)


@pytest.mark.parametrize(
    "name", ["/models/Qwen2.5-Coder-1.5B-Q4_K_M.gguf", "Qwen/Qwen2.5-Coder-1.5B-Q4_K_M"]
)
def test_the_head_has_the_last_part_of_the_models_name(chromium: str, name: str) -> None:
    async def test(page: Page) -> None:
        await page.until("document.querySelector('.model')?.innerText")
        await page.until("document.querySelector('.model').innerText !== ''")
        assert await text_of(page, ".model") == "Qwen2.5-Coder-1.5B-Q4_K_M"
        assert name in await page.evaluate("document.querySelector('.model').title")

    in_browser(chromium, ScriptedRing(["x"]), test, served_model_name=name)
