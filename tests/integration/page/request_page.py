"""A ring that has a trace of each of its requests, and the way to one of them."""

from quadriga.client.types import Completion
from quadriga.wire.trace import Attributes, RequestTrace, Span, SpanEvent, TraceContext
from tests.browser import Page
from tests.integration.page.chat_page import ask, until_answered
from tests.integration.page.page_ring import OpenRing

TO_STORY = "a[aria-label='Where the time of this answer went']"


def story(request_id: str, began: float) -> RequestTrace:
    """Return a trace of one second from `began`, Unix seconds, on, with a retraction."""

    def span(name: str, process: str, began_ms: int, ended_ms: int, *events: SpanEvent) -> Span:
        began_at, ended_at = began + began_ms / 1000, began + ended_ms / 1000
        attributes: Attributes = {"tokens": 7}
        if name == "decode":
            steps = {"steps": 7, "max_rows": 20, "compute_ms": 150.0, "longest_gap_ms": 110.0}
            prompts = {"prompt_parts": 3, "prompt_tokens": 812, "prompt_steps_ms": 90.0}
            attributes |= steps | prompts
        return Span(name, process, began_at, ended_at, attributes, list(events))

    def event(name: str, at_ms: int, reason: str) -> SpanEvent:
        return SpanEvent(name, began + at_ms / 1000, {"reason": reason})

    queued = SpanEvent("queued", began + 0.1, {"waiting_before": 4})
    spans = [
        span("tokenize", "tokenizer_proc", 0, 100),
        span("queue", "scheduler_proc", 100, 300, queued, event("waits", 150, "pages")),
        span("prefill", "scheduler_proc", 300, 400),
        Span("forward", "worker_proc", began + 0.3, began + 0.4, parent=2),
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
        self.began_at = 0.0

    async def traces(self, request_ids: list[str]) -> list[RequestTrace]:
        return [story(name, self.began_at) for name in request_ids]

    def completion(self) -> Completion:
        completion = super().completion()
        self.began_at = completion.timings.submitted
        completion.timings.received = self.began_at
        completion.timings.detokenized = self.began_at + 1
        return completion


async def to_story(page: Page) -> None:
    await ask(page, "Hello")
    await until_answered(page)
    await page.click(TO_STORY)
    await page.until("document.querySelector('.waterfall')")
