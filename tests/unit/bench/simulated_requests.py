"""Requests of simulated servers."""

from typing import Any

from bench.load.synthetic import Lengths, TraceSpec, generate
from simulator.cost_model import CostModel, Delays, MeasuredOn
from simulator.trace import TraceRequest

VOCABULARY = 1000
PAGE = 4
# A decode step of one row takes 11 ms, the prefill of a prompt of 8 tokens 18 ms.
MODEL = CostModel(
    ms={"steps": 10.0, "tokens": 1.0},
    measured_on=MeasuredOn(
        model="tiny",
        dtype="float32",
        device="cpu",
        threads=1,
        date="2026-01-01",
        vocab_size=VOCABULARY,
        context_length=256,
        max_total_tokens=4096,
    ),
    delays_ms=Delays(message_in=3.0, plan=0.5, gap=0.25, result=0.5, delivery=2.0),
)


def request(
    at: float = 0.0, prompt: int = 8, output: int = 5, segment: int = 0, **fields: Any
) -> TraceRequest:
    return TraceRequest(at, ((segment, prompt),), output, **fields)


def requests(count: int, **spec: Any) -> list[TraceRequest]:
    lengths = {"input_len": Lengths(4, 30), "output_len": Lengths(2, 20)}
    return list(generate(TraceSpec(count, **(lengths | spec))))
