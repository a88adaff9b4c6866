"""Expected waits against the waits that follow, in simulated time, which is deterministic."""

import pytest

from bench.simulate.expected_wait import MIN_WAIT_S, WaitErrors, WaitSample, main
from tests.everything import more

SHORT = "--input-len 16:64 --max-new-tokens 8:64"
LONG = "--input-len 16:64 --max-new-tokens 16:48 --request-rate 9 --long-every 20"
CROWDED = "--input-len 16:64 --max-new-tokens 16:48 --request-rate 12 --long-every 15"
CACHED = "--input-len 16:64 --max-new-tokens 8:64"


@pytest.mark.parametrize(
    "flags",
    [
        f"{SHORT} --slots 16 --request-rate 30",
        more(f"{SHORT} --slots 32 --request-rate 20"),
        "--input-len 64:256 --max-new-tokens 2:8 --slots 256 --request-rate 20 --num-requests 400",
        LONG,
        more(f"{CROWDED} --itl-target 45 --slots 32"),
        more(f"{CACHED} --prefix-groups 16"),
        f"{CACHED} --prefix-groups 64",
    ],
)
def test_the_median_error_is_below_12_percent(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--simulate", "--limit", "0.12", *flags.split()]) == 0
    assert "in the median" in capsys.readouterr().out


def test_errors_count_requests_that_wait_and_have_an_estimate() -> None:
    samples = [WaitSample(2.0, 4.0), WaitSample(5.0, 4.0), WaitSample(None, 9.0)]
    errors = WaitErrors.of([*samples, WaitSample(7.0, MIN_WAIT_S / 2)])
    assert (errors.num_asked, errors.num_unknown, errors.num_counted) == (4, 1, 2)
    assert errors.median == pytest.approx(0.375)
    assert errors.bias == pytest.approx(0.875)


def test_a_median_over_the_limit_fails_and_so_does_a_run_without_waits() -> None:
    assert main(["--simulate", "--num-requests", "300", "--limit", "0.0001"]) == 1
    assert main(["--simulate", "--num-requests", "3"]) == 1


def test_a_rate_that_is_none_is_an_error_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--simulate", "--request-rate", "0"]) == 2
    assert capsys.readouterr().err == (
        "bench.simulate.expected_wait: --request-rate is 0.0: it must be positive\n"
    )
