"""Turns between clients (--fair-clients): deficit round robin over one waiting queue per client.

After Shreedhar and Varghese, "Efficient Fair Queueing using Deficit Round Robin" (1995): in each
round a client may spend QUANTUM tokens more, saves what it does not use, and is served as far as
that lasts. Here the rounds are not walked through. A client that has spent `spent` tokens since
round `first_round` can afford a request of c tokens in round
first_round + ceil((spent + c) / QUANTUM). That round is its place in a sorted order, so rounds in
which no client can afford a request, and clients whose turn is far away, cost nothing.

The cost of a request is its prompt and all that it may still generate. It must be affordable before
the request is served, so no client owes anything, and a client without waiting requests can be
forgotten: it comes back as a new one, whose first turn is in the round after the present one.

Which request a client would send next may depend on the prefix tree and on the room in a step. To
ask every client in every step would cost too much, so a client keeps the place of the request that
was next when a request of it was last pushed, removed or taken. The request that its policy chooses
later takes this place, and is charged with its own cost.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from sortedcontainers import SortedDict

from scheduler_proc.policies.base import WaitingQueue
from scheduler_proc.state.request import Request

# As rounds cost nothing, it need not be as large as the largest request. It bounds how many tokens
# of one client come in a row.
QUANTUM = 512


class ClientQueue:
    """The waiting requests of one client.

    Attributes:
        first_round: round in which the client arrived.
        arrival: number of the client, which orders the clients of a round.
        spent: tokens that the client was charged since it arrived.
        turn: round and arrival of its next request, as of the last update; it decides.
    """

    __slots__ = ("arrival", "first_round", "queue", "spent", "turn")

    def __init__(self, queue: WaitingQueue, first_round: int, arrival: int) -> None:
        self.queue = queue
        self.first_round = first_round
        self.arrival = arrival
        self.spent = 0
        self.turn = (first_round, arrival)

    def round_after(self, spent: int) -> int:
        """Return the first round in which the client can have spent so many tokens."""
        return self.first_round - (-spent // QUANTUM)

    def upcoming(
        self, num_expected: int, max_count: int, budget: int
    ) -> Iterator[tuple[int, int, Request]]:
        """Yield round, arrival and request for each of the next requests.

        Args:
            num_expected: number of requests that the caller will probably consume.
            max_count: number of requests that it will consume at most.
            budget: as in WaitingQueue.first.
        """
        (turn, _), spent, num_seen = self.turn, self.spent, 0
        while num_seen < max_count:
            requests = self.queue.first(min(num_expected, max_count), budget)
            for index, request in enumerate(islice(requests, num_seen, None), num_seen):
                spent += cost(request)
                if index > 0:
                    turn = max(turn, self.round_after(spent))
                yield turn, self.arrival, request
            if len(requests) < num_expected:
                return
            num_seen, num_expected = num_expected, 2 * num_expected


class FairClients:
    """A waiting queue of waiting queues. Within a client, the policy of its queue decides."""

    def __init__(self, make_queue: Callable[[], WaitingQueue]) -> None:
        self._make_queue = make_queue
        self._clients: dict[bytes, ClientQueue] = {}
        self._turns: SortedDict = SortedDict()
        self._outdated: dict[bytes, ClientQueue] = {}
        self._round = 0
        self._num_arrivals = 0
        self._length = 0

    @property
    def lookahead(self) -> int:
        """The lookahead of the client whose turn it is."""
        self._update_turns()
        return self._turns.peekitem(0)[1].queue.lookahead if self._turns else 0

    def push(self, request: Request) -> None:
        """Add a request to the queue of its client."""
        client = self._clients.get(request.client)
        if client is None:
            client = ClientQueue(self._make_queue(), self._round, self._num_arrivals)
            self._num_arrivals += 1
            self._clients[request.client] = self._turns[client.turn] = client
        client.queue.push(request)
        self._length += 1
        self._outdated[request.client] = client

    def first(self, count: int, budget: int) -> list[Request]:
        """Return the next requests, in the order of their turns."""
        # The first `count` requests are of the first `count` clients.
        self._update_turns()
        clients = list(islice(self._turns.values(), count))
        num_expected = count // max(1, len(clients)) + 2
        upcoming = [client.upcoming(num_expected, count, budget) for client in clients]
        return [request for *_, request in islice(heapq.merge(*upcoming), count)]

    def take(self, request: Request) -> None:
        """Remove a request that is admitted, and charge its client."""
        client = self._clients[request.client]
        client.queue.take(request)
        client.spent += cost(request)
        self._round = max(self._round, client.round_after(client.spent))
        self._on_removed(request.client, client)

    def remove(self, request: Request) -> None:
        """Remove a request, if it waits."""
        client = self._clients.get(request.client)
        if client is None:
            return
        before = len(client.queue)
        client.queue.remove(request)
        if len(client.queue) < before:
            self._on_removed(request.client, client)

    def _on_removed(self, name: bytes, client: ClientQueue) -> None:
        self._length -= 1
        if len(client.queue):
            self._outdated[name] = client
        else:
            self._outdated.pop(name, None)
            del self._clients[name], self._turns[client.turn]

    def _update_turns(self) -> None:
        """Update the turn of each client whose next request may have changed."""
        for client in self._outdated.values():
            spent = client.spent + cost(client.queue.first(1, 0)[0])
            del self._turns[client.turn]
            client.turn = (client.round_after(spent), client.arrival)
            self._turns[client.turn] = client
        self._outdated.clear()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter([request for client in self._clients.values() for request in client.queue])


def cost(request: Request) -> int:
    """Return the tokens that a client is charged for: the prompt, and all that may be generated.

    A request that was retracted costs nothing: it was charged when it was first admitted.
    """
    return 0 if request.admitted_at else request.num_prompt + request.num_remaining_tokens
