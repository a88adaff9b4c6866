"""A ring that has a trace of each of its requests, and the way to one of them."""

from quadriga.wire.trace import RequestTrace, Span, SpanEvent, TraceContext
from tests.browser import Page
from tests.integration.page.chat_page import ask, until_answered
from tests.integration.page.page_ring import OpenRing

BEGAN_AT = 2e9
TO_STORY = "a[aria-label='Where the time of this answer went']"


def story(request_id: str) -> RequestTrace:
    """Return a trace of one second with a retraction."""

    def span(name: str, process: str, began_ms: int, ended_ms: int, *events: SpanEvent) -> Span:
        began_at, ended_at = BEGAN_AT + began_ms / 1000, BEGAN_AT + ended_ms / 1000
        return Span(name, process, began_at, ended_at, {"tokens": 7}, list(events))

    def event(name: str, at_ms: int, reason: str) -> SpanEvent:
        return SpanEvent(name, BEGAN_AT + at_ms / 1000, {"reason": reason})

    queued = SpanEvent("queued", BEGAN_AT + 0.1, {"waiting_before": 4})
    spans = [
        span("tokenize", "tokenizer_proc", 0, 100),
        span("queue", "scheduler_proc", 100, 300, queued, event("waits", 150, "pages")),
        span("prefill", "scheduler_proc", 300, 400),
        Span("forward", "worker_proc", BEGAN_AT + 0.3, BEGAN_AT + 0.4, parent=2),
        span("decode", "scheduler_proc", 400, 600, event("retracted", 600, "pages")),
        span("queue", "scheduler_proc", 600, 700),
        span("prefill", "scheduler_proc", 700, 800),
        span("decode", "scheduler_proc", 800, 990),
        span("detokenize", "detok_proc", 990, 1000),
    ]
    attributes: dict[str, bool | int | float | str] = {
        "gen_ai.usage.prompt_tokens": 12, "gen_ai.usage.completion_tokens": 34,
        "quadriga.cached_tokens": 5, "quadriga.retractions": 1,
    }  # fmt: skip
    context = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
    return RequestTrace(context, "llm_request", request_id, 0, spans, attributes)


class StoryRing(OpenRing):
    """A ring that ends its requests, and has a trace of each."""

    def __init__(self, pieces: list[str], leaves_open: bool = False) -> None:
        super().__init__(pieces)
        self.leaves_open = leaves_open

    async def traces(self, request_ids: list[str]) -> list[RequestTrace]:
        return [story(name) for name in request_ids]


async def to_story(page: Page) -> None:
    await ask(page, "Hello")
    await until_answered(page)
    await page.click(TO_STORY)
    await page.until("document.querySelector('.waterfall')")
