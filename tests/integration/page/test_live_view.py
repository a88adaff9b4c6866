"""The live view in a browser: lanes of 200 requests, reasons, keys, widths, a ring that fails."""

import asyncio

import msgspec
import pytest

from http_proc.page import live
from quadriga.errors import RequestFailed
from quadriga.wire.live import EventKind, LiveEvent, LiveProcess, LiveServer, LiveStep, RowKind
from tests.browser import Page
from tests.integration.page.live_page import NUM_REQUESTS, live_ring, until_live
from tests.integration.page.page_ring import OpenRing
from tests.integration.page.page_session import in_browser
from tests.unit.live_messages import make_request, make_step
from tests.unit.scripted_ring import ScriptedRing

TIP = "document.querySelector('.lanes-tip:not([hidden])')?.innerText ?? ''"
INKED = """(() => {
    const canvas = document.querySelector('.lanes-space canvas');
    const { width, height } = canvas;
    const data = canvas.getContext('2d').getImageData(width / 2, 0, width / 2, height).data;
    let count = 0;
    for (let i = 3; i < data.length; i += 4) count += data[i] > 0;
    return count;
})()"""


def test_200_requests_have_lanes_and_each_says_why_it_waits(chromium: str) -> None:
    async def test(page: Page) -> None:
        await until_live(page)
        text = await page.evaluate("document.querySelector('.live-legend').innerText")
        assert "wait: slots" in text or "wait: pages" in text or "wait: budget" in text
        await page.until(f"{INKED} > 5000")
        space = "document.querySelector('.lanes-space').offsetHeight"
        await page.until(f"{space} >= {18 * NUM_REQUESTS}")
        await page.evaluate("document.querySelector('.lanes-space canvas').focus()")
        for _ in range(3):
            await page.press("ArrowDown")
        tip = await page.evaluate(TIP)
        assert "request-2" in tip and "step" in tip
        await page.evaluate("document.querySelector('.lanes-scroll').scrollTop = 1e6")
        await page.evaluate(
            """(() => {
                const canvas = document.querySelector('.lanes-space canvas');
                const box = canvas.getBoundingClientRect();
                const at = { clientX: box.right - 8, clientY: box.bottom - 20, bubbles: true };
                canvas.dispatchEvent(new PointerEvent('pointermove', at));
            })()"""
        )
        await page.until(f"({TIP}).includes('waits:')")
        await page.press("Enter")
        await page.until("location.hash.startsWith('#/request/request-')")

    # The ring has no trace of the request that is opened.
    in_browser(chromium, live_ring(), test, at="/#/live", may_complain=True)


NAMES = """(() => {
    const drawn = new Set();
    const fill = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        drawn.add(text);
        return fill.call(this, text, ...at);
    };
    window.drawn = drawn;
})()"""


def test_lanes_have_the_callers_id_and_tenant_and_both_rates_are_the_same(chromium: str) -> None:
    ring = OpenRing(["a"])

    async def test(page: Page) -> None:
        await page.evaluate(NAMES)
        await page.evaluate(
            "fetch('v1/completions', {method: 'POST',"
            " body: JSON.stringify({prompt: 'a', stream: true}),"
            " headers: {'Content-Type': 'application/json', 'X-Request-Id': 'load-19'}})"
            ".then((response) => response.body.getReader().read()).then(() => true)"
        )
        requests = [make_request(0, request_id="0", tenant="alice")]
        for second in range(5):
            step = make_step(second, {0: RowKind.DECODE}, None, requests, is_whole=True)
            total = 100 * second * second
            gauges = msgspec.structs.replace(step.gauges, generation_tokens_total=total)
            ring.live.put_nowait(msgspec.structs.replace(step, gauges=gauges))
            ring.live.put_nowait(LiveServer(1000.0 + second, [], 0, 1, 1, 0))
            await asyncio.sleep(0.15)  # an event of the feed for each second
        await page.until("drawn.has('load-19') && drawn.has(' · alice')")
        await page.until(
            "document.querySelector('.live-charts')?.innerText.includes('generated 500')"
        )
        head = await page.evaluate("document.querySelector('.live-figures').innerText")
        assert "500" in head.split("\n"), head
        await page.evaluate("document.querySelector('.lanes-space canvas').focus()")
        await page.press("ArrowDown")
        assert "load-19" in await page.evaluate(TIP)

    in_browser(chromium, ring, test, at="/#/live")


def test_a_request_has_no_lane_when_its_last_step_is_out_of_view(chromium: str) -> None:
    ring, num_steps = ScriptedRing([]), 60
    ended = {1: [LiveEvent(EventKind.FINISHED, 0, "stop")]}
    for number in range(num_steps):
        rows = {0: RowKind.DECODE} if number == 0 else {}
        requests = [make_request(0)] if number == 0 else []
        ring.live.put_nowait(make_step(number, rows, None, requests, ended.get(number)))

    async def test(page: Page) -> None:
        await page.until(
            "document.querySelector('.lanes-space') && !document.querySelector('.lanes-empty')"
        )
        await page.resize(390, 700, is_phone=True)
        await page.until("document.querySelector('.lanes-empty')")

    in_browser(chromium, ring, test, at="/#/live")


def test_events_pages_and_processes_are_shown(chromium: str) -> None:
    async def test(page: Page) -> None:
        await until_live(page)
        assert "admitted" in await page.evaluate("document.querySelector('.live-events').innerText")
        legend = await page.evaluate("document.querySelector('.kv-legend').innerText")
        assert "shared" in legend and "held" in legend
        await page.click(".live-head button")
        await page.until("document.querySelector('.live-head button').ariaPressed === 'true'")

    in_browser(chromium, live_ring(), test, at="/#/live")


@pytest.mark.parametrize("width", [320, 390, 800])
def test_the_live_view_is_not_wider_than_the_window(chromium: str, width: int) -> None:
    async def test(page: Page) -> None:
        await page.resize(width, 700, is_phone=True)
        await until_live(page)
        widest = "Math.max(document.documentElement.scrollWidth, document.querySelector('.live').scrollWidth)"  # noqa: E501
        assert await page.evaluate(widest) <= width

    in_browser(chromium, live_ring(), test, at="/#/live")


def test_another_replica_can_be_chosen(chromium: str) -> None:
    ring = ScriptedRing([], num_replicas=2)

    async def test(page: Page) -> None:
        ring.live.put_nowait(LiveServer(1001.0, [], 0, 0, 1, 0, num_replicas=2))
        await page.until("document.querySelector('.live-head select')?.options.length === 2")
        await page.evaluate(
            "(() => { const one = document.querySelector('.live-head select'); one.value = '1';"
            " one.dispatchEvent(new Event('change', { bubbles: true })) })()"
        )
        await page.until("location.hash === '#/live/1'")
        while ring.watched != [0, 1]:
            await asyncio.sleep(0.01)
        assert await page.evaluate("document.querySelector('.live-head select').value") == "1"

    in_browser(chromium, ring, test, at="/#/live")


def test_a_ring_that_fails_is_shown_and_the_view_goes_on_when_it_is_back(chromium: str) -> None:
    ring = live_ring()
    ring.error = RequestFailed("the ring is away")

    async def test(page: Page) -> None:
        await page.until("document.querySelector('.live-state')?.innerText === 'the ring is away'")
        ring.error = None
        await until_live(page)
        await page.until("!document.querySelector('.live-state')")

    in_browser(chromium, ring, test, at="/#/live")


NUM_BATCHES, BATCH_S = 12, 300  # an hour
MAX_HEAP_GROWTH = 0.1


def one_second(second: int, resident_bytes: int) -> list[LiveStep | LiveServer]:
    """Return the messages of a second, in which one of 20 requests ends and another begins."""
    seqs = range(second, second + 20)
    rows = dict.fromkeys(seqs, RowKind.DECODE)
    requests = [make_request(seq, request_id=f"request-{seq}") for seq in seqs]
    ended = LiveEvent(EventKind.FINISHED, second, "length")
    whole = make_step(2 * second, rows, requests=requests, is_whole=True, time=float(second))
    last = make_step(2 * second + 1, rows, events=[ended], time=second + 0.5)
    process = LiveProcess("worker_proc", 42, 0.5 * second, resident_bytes, 1.0)
    return [whole, last, LiveServer(float(second), [process], 0, 20, 1, 0)]


async def usage(page: Page) -> tuple[int, int]:
    """Return the bytes of the page's heap, and the number of its nodes."""
    await page.send("HeapProfiler.collectGarbage")
    heap = await page.send("Runtime.getHeapUsage")
    counters = await page.send("Memory.getDOMCounters")
    return heap["usedSize"], counters["nodes"]


def test_a_page_that_is_open_for_an_hour_does_not_grow(
    chromium: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FLUSH_S", 0.005)
    ring = ScriptedRing([])

    async def test(page: Page) -> None:
        sizes = []
        for batch in range(NUM_BATCHES):
            shown = 100 + batch
            for second in range(batch * BATCH_S, (batch + 1) * BATCH_S):
                for message in one_second(second, shown << 20):
                    ring.live.put_nowait(message)
            cell = "document.querySelector('.processes')"
            await page.until(f"{cell}?.innerText.includes('{shown} MiB')")
            if batch in (NUM_BATCHES // 2, NUM_BATCHES - 1):
                sizes.append(await usage(page))
        (half_bytes, half_nodes), (all_bytes, all_nodes) = sizes
        assert all_bytes < (1 + MAX_HEAP_GROWTH) * half_bytes, sizes
        assert all_nodes <= half_nodes + 50, sizes
        rows = await page.evaluate("document.querySelector('.lanes-space').offsetHeight")
        assert rows < 18 * 400

    in_browser(chromium, ring, test, at="/#/live")
