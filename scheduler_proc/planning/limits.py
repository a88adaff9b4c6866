"""Limits on new requests. The frontend checks them, too, as far as it knows their state."""

from quadriga.config.scheduler_args import SchedulerArgs
from quadriga.errors import QuadrigaError, QueueFull, ServerStopping

RETRY_AFTER_S = 1.0


def refusal(
    args: SchedulerArgs, is_draining: bool, num_waiting: int, num_choices: int, num_open: int
) -> QuadrigaError | None:
    """Return why a new request is refused; None where it is accepted.

    Args:
        args: the limits.
        is_draining: the server stops.
        num_waiting: number of requests without a slot.
        num_choices: number of choices of the new request.
        num_open: number of other open requests of its client.
    """
    if is_draining:
        return ServerStopping("the server is stopping and takes no new requests")
    if num_waiting + num_choices > args.max_queued_requests:
        return QueueFull(
            f"{num_waiting} requests are waiting and --max-queued-requests is"
            f" {args.max_queued_requests}; try again in {RETRY_AFTER_S:g} s",
            RETRY_AFTER_S,
        )
    limit = args.max_requests_per_client
    if limit is not None and num_open >= limit:
        return QueueFull(
            f"this client has {num_open} open requests and --max-requests-per-client is {limit};"
            f" wait until one has ended, or try again in {RETRY_AFTER_S:g} s",
            RETRY_AFTER_S,
        )
    return None
