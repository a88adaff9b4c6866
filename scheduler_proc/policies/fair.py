"""Clients take turns: deficit round robin over one waiting queue for each of them.

After Shreedhar and Varghese, "Efficient Fair Queueing using Deficit Round Robin" (1995): in each
round a client may spend QUANTUM tokens more, saves what it does not use, and is served as far as
that lasts. Here the rounds are not walked through. A client that has spent `spent` tokens since it
came in round `since` can afford a request of c tokens in round since + ceil((spent + c) / QUANTUM);
so that is where it stands in a sorted order, and rounds in which nobody can afford anything, or
clients whose turn is far away, cost nothing.

A request's cost is its prompt and all that it may still generate. It must be affordable before it
is served, so nobody ever owes anything, and a client without waiting requests can be forgotten: it
comes back as a new one, whose first turn is in the round after the present one.

What a client would send next may depend on the prefix tree and on the room in a step, and looking
at every client again in every step would cost too much. So a client keeps the place of the request
that was its next when it last sent, lost or was served one. Whichever its policy chooses goes
there, and is charged with what it costs.
"""

import heapq
from collections.abc import Callable, Iterator
from itertools import islice

from sortedcontainers import SortedDict

from scheduler_proc.policies.base import WaitingQueue
from scheduler_proc.state.request import Request

QUANTUM = 512
"""Tokens. As rounds cost nothing, it need not be as large as the largest request; it only says how
much of one client may come in a row."""


class ClientQueue:
    """What waits of one client. arrival: counts clients, so that each round has the same order.

    turn: where its next request stood when that was looked up the last time; it decides.
    """

    __slots__ = ("arrival", "queue", "since", "spent", "turn")

    def __init__(self, queue: WaitingQueue, since: int, arrival: int) -> None:
        self.queue = queue
        self.since = since
        self.arrival = arrival
        self.spent = 0
        self.turn = (since, arrival)

    def round_after(self, spent: int) -> int:
        """The round in which it can have spent so much."""
        return self.since - (-spent // QUANTUM)

    def upcoming(self, share: int, most: int, budget: int) -> Iterator[tuple[int, int, Request]]:
        """Its requests with their turns: (round, arrival, request). share: how many are probably
        wanted, most: how many at most."""
        (turn, _), spent, seen = self.turn, self.spent, 0
        while seen < most:
            requests = self.queue.first(min(share, most), budget)
            for index, request in enumerate(islice(requests, seen, None), seen):
                spent += cost(request)
                if index > 0:
                    turn = max(turn, self.round_after(spent))
                yield turn, self.arrival, request
            if len(requests) < share:
                return
            seen, share = share, 2 * share


class FairClients:
    """A waiting queue of waiting queues. Within a client, its own queue's policy decides."""

    def __init__(self, make_queue: Callable[[], WaitingQueue]) -> None:
        self._make_queue = make_queue
        self._clients: dict[bytes, ClientQueue] = {}
        self._turns: SortedDict = SortedDict()
        self._moved: dict[bytes, ClientQueue] = {}
        self._round = 0
        self._arrivals = 0
        self._length = 0

    @property
    def lookahead(self) -> int:
        """That of the client whose turn it is: nobody overtakes it who may not."""
        self._settle()
        return self._turns.peekitem(0)[1].queue.lookahead if self._turns else 0

    def push(self, request: Request) -> None:
        client = self._clients.get(request.client)
        if client is None:
            client = ClientQueue(self._make_queue(), self._round, self._arrivals)
            self._arrivals += 1
            self._clients[request.client] = self._turns[client.turn] = client
        client.queue.push(request)
        self._length += 1
        self._moved[request.client] = client

    def first(self, count: int, budget: int) -> list[Request]:
        # Whoever is among the first `count` requests is among the first `count` clients, too.
        self._settle()
        clients = list(islice(self._turns.values(), count))
        share = count // max(1, len(clients)) + 2
        upcoming = [client.upcoming(share, count, budget) for client in clients]
        return [request for *_, request in islice(heapq.merge(*upcoming), count)]

    def take(self, request: Request) -> None:
        client = self._clients[request.client]
        client.queue.take(request)
        client.spent += cost(request)
        self._round = max(self._round, client.round_after(client.spent))
        self._shortened(request.client, client)

    def remove(self, request: Request) -> None:
        client = self._clients.get(request.client)
        if client is None:
            return
        before = len(client.queue)
        client.queue.remove(request)
        if len(client.queue) < before:
            self._shortened(request.client, client)

    def _shortened(self, name: bytes, client: ClientQueue) -> None:
        self._length -= 1
        if len(client.queue):
            self._moved[name] = client
        else:
            self._moved.pop(name, None)
            del self._clients[name], self._turns[client.turn]

    def _settle(self) -> None:
        """Find the place of those clients whose next request may be another one than before."""
        for client in self._moved.values():
            spent = client.spent + cost(client.queue.first(1, 0)[0])
            del self._turns[client.turn]
            client.turn = (client.round_after(spent), client.arrival)
            self._turns[client.turn] = client
        self._moved.clear()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        return iter([request for client in self._clients.values() for request in client.queue])


def cost(request: Request) -> int:
    """Tokens that a client is charged for when the request is admitted: its prompt, and what it may
    still generate. One that was retracted has been charged: that it waits again is not its fault.
    """
    return 0 if request.admitted_at else request.num_prompt + request.num_remaining_tokens
