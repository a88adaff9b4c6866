"""Which models of a server are loaded: a memory budget, turns, and models that are not used.

A model is loaded when a request waits for it. Where the budget does not hold it beside the others,
the model that was not used for longest is unloaded; where all others are busy, the one whose turn
is over is suspended: its requests stay open, and go on when it is loaded again.
"""

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass


class ModelState(enum.Enum):
    """Whether the worker of a model runs. LOST: no process of the model does, for good."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"
    LOST = "lost"


# A turn takes at least this many times as long as the loads around it, so that loads take at most a
# fifth of the time.
LOADS_PER_TURN = 4.0
# Before a model was loaded once.
EXPECTED_LOAD_S = 5.0
# A model that could not be loaded is not tried again for this time.
FAILED_FOR_S = 30.0


@dataclass(slots=True, eq=False)
class ModelUse:
    """What is known of a model.

    Attributes:
        num_bytes: memory of its worker: measured, or before that estimated.
        is_pinned: it is never unloaded to make room for others.
        idle_unload_s: seconds without a request after which it is unloaded; None: never.
        keep_alive_s: the same as a client has asked for it, until the model is unloaded; infinite:
            never; None: no client has.
        state: whether its worker runs.
        num_open: open requests.
        is_wanted: it is to be loaded although no request waits for it.
        waits_since: time since which requests have waited for it; None: none wait.
        changed_at: time of the last change of its state.
        used_at: last time at which it had open requests, or was loaded.
        load_s: seconds of its last load.
        num_loads, num_unloads: how often it was loaded and unloaded.
        stretch: its turns are so many times as long as usual, since in shorter ones no request came
            further: a prompt of which a turn computes a part only is computed from its begin again.
    """

    num_bytes: int
    is_pinned: bool = False
    idle_unload_s: float | None = None
    keep_alive_s: float | None = None
    state: ModelState = ModelState.UNLOADED
    num_open: int = 0
    is_wanted: bool = False
    waits_since: float | None = None
    changed_at: float = 0.0
    used_at: float = 0.0
    load_s: float = EXPECTED_LOAD_S
    num_loads: int = 0
    num_unloads: int = 0
    stretch: float = 1.0

    @property
    def takes_memory(self) -> bool:
        """Whether its worker has memory, or is about to."""
        return self.state in (ModelState.LOADING, ModelState.LOADED, ModelState.UNLOADING)

    @property
    def idle_s(self) -> float:
        """Seconds without a request after which it is unloaded; infinite: never."""
        if self.is_pinned:
            return math.inf
        if self.keep_alive_s is not None:
            return self.keep_alive_s
        return math.inf if self.idle_unload_s is None else self.idle_unload_s


class ModelTurns:
    """Decides which model is loaded or unloaded next. It changes no state but by its methods.

    Args:
        models: the models by their names.
        budget: bytes that the workers of loaded models may have together; None: no bound.
        longest_turn_s: seconds after which a busy model is suspended for one that waits, at most.
        loads_at_once: several models may be loaded at one time, where there is no budget.
    """

    def __init__(
        self,
        models: dict[str, ModelUse],
        budget: int | None,
        longest_turn_s: float,
        loads_at_once: bool = True,
    ) -> None:
        self.models = models
        self._budget = budget
        self._loads_at_once = loads_at_once and budget is None
        self._longest_turn_s = longest_turn_s

    # --- what happens -----------------------------------------------------------------------------

    def on_open(self, name: str, num_open: int, now: float) -> None:
        """Take in the number of a model's open requests."""
        model = self.models[name]
        if num_open or model.num_open:
            model.used_at = now
        model.num_open = num_open
        self._note_waiting(model, now)

    def want(self, name: str, now: float) -> None:
        """Load a model as soon as there is room, also without a request."""
        model = self.models[name]
        model.is_wanted = True
        if model.state is ModelState.FAILED:
            self.on_state(name, ModelState.UNLOADED, now)
        self._note_waiting(model, now)

    def keep(self, name: str, seconds: float, now: float) -> None:
        """Unload a model after other idle seconds than it was said at the start.

        Args:
            name: the model. This counts as a use of it.
            seconds: seconds without a request; infinite: it is not unloaded.
            now: the time.
        """
        model = self.models[name]
        model.keep_alive_s, model.used_at = seconds, now

    def want_none(self, now: float) -> None:
        """Load models for requests alone from now on."""
        for model in self.models.values():
            model.is_wanted = False
            self._note_waiting(model, now)

    def on_state(self, name: str, state: ModelState, now: float) -> None:
        """Take in the state of a model."""
        model = self.models[name]
        if state is ModelState.LOADED:
            if model.state is ModelState.LOADING:
                model.load_s = now - model.changed_at
                model.num_loads += 1
            model.is_wanted = False
            model.used_at = now
        if state is ModelState.FAILED:
            model.is_wanted = False
        if state is ModelState.UNLOADED and model.takes_memory:
            model.num_unloads += 1
        if state is ModelState.UNLOADED and not model.num_open:
            model.keep_alive_s = None
        model.state, model.changed_at = state, now
        self._note_waiting(model, now)

    def on_turn_over(self, name: str, num_tokens: int) -> None:
        """Take in how many tokens a model gave in its turn."""
        model = self.models[name]
        model.stretch = 1.0 if num_tokens or not model.num_open else 2.0 * model.stretch

    def forget(self, name: str) -> None:
        """Take a model out, whose processes have ended for good."""
        self.models.pop(name, None)

    def _note_waiting(self, model: ModelUse, now: float) -> None:
        waits = model.state is ModelState.UNLOADED and (model.num_open or model.is_wanted)
        if not waits:
            model.waits_since = None
        elif model.waits_since is None:
            model.waits_since = now

    # --- what is to be done -----------------------------------------------------------------------

    def to_load(self) -> str | None:
        """Return the model that is to be loaded now; None: none waits, or there is no room yet."""
        name = self._first_waiting()
        if name is None or self._is_changing or self._missing_bytes(name) > 0:
            return None
        return name

    def to_unload(self, now: float) -> str | None:
        """Return the model that is to be unloaded or suspended now."""
        if self._is_changing:
            return None
        waiting = self._first_waiting()
        if waiting is not None and self._missing_bytes(waiting) > 0:
            return self._victim(waiting, now)
        for name, model in self._loaded():
            if self._idle_until(model) <= now:
                return name
        return None

    def next_at(self) -> float | None:
        """Return when time alone may give something to do; None: never."""
        times = [
            model.changed_at + FAILED_FOR_S
            for model in self.models.values()
            if model.state is ModelState.FAILED
        ]
        if not self._is_changing:
            times += [self._idle_until(model) for _, model in self._loaded()]
            waiting = self._first_waiting()
            if waiting is not None and self._missing_bytes(waiting) > 0:
                times += [
                    self._turn_ends_at(model, self.models[waiting])
                    for _, model in self._loaded()
                    if not model.is_pinned
                ]
        return min((time for time in times if time < math.inf), default=None)

    @property
    def is_short_of_memory(self) -> bool:
        """Whether a model waits for memory that others have."""
        waiting = self._first_waiting()
        return waiting is not None and self._missing_bytes(waiting) > 0

    def retry_failed(self, now: float) -> None:
        """Allow models to be loaded again that could not be loaded some time ago."""
        for name, model in self.models.items():
            if model.state is ModelState.FAILED and now >= model.changed_at + FAILED_FOR_S:
                self.on_state(name, ModelState.UNLOADED, now)

    @property
    def _is_changing(self) -> bool:
        """Whether a model is being loaded or unloaded: one at a time, so that memory is known."""
        if self._loads_at_once:
            return False
        changing = (ModelState.LOADING, ModelState.UNLOADING)
        return any(model.state in changing for model in self.models.values())

    def _loaded(self) -> list[tuple[str, ModelUse]]:
        states = self.models.items()
        return [(name, model) for name, model in states if model.state is ModelState.LOADED]

    def _first_waiting(self) -> str | None:
        """Return the model that has waited for longest."""
        waiting = [
            (model.waits_since, name)
            for name, model in self.models.items()
            if model.waits_since is not None
        ]
        return min(waiting)[1] if waiting else None

    def _missing_bytes(self, name: str) -> int:
        """Return how many bytes have to become free before a model can be loaded.

        Nothing has to where all the others are unloaded that can be: a model that proved to be
        larger than the budget after it was accepted would else never be loaded again.
        """
        others = [model for model in self.models.values() if model.takes_memory]
        if self._budget is None or all(model.is_pinned for model in others):
            return 0
        return _bytes(others) + self.models[name].num_bytes - self._budget

    def _victim(self, waiting: str, now: float) -> str | None:
        """Return the model that makes room: the idle one that was not used for longest.

        Without an idle one it is the busy one whose turn has been over for longest.
        """
        loaded = [(name, model) for name, model in self._loaded() if not model.is_pinned]
        idle = [(model.used_at, name) for name, model in loaded if not model.num_open]
        if idle:
            return min(idle)[1]
        over = [
            (ends_at, name)
            for name, model in loaded
            if (ends_at := self._turn_ends_at(model, self.models[waiting])) <= now
        ]
        return min(over)[1] if over else None

    def _turn_ends_at(self, busy: ModelUse, waiting: ModelUse) -> float:
        """Return when a loaded model may be suspended for one that waits."""
        if not busy.num_open:
            return busy.changed_at
        turn_s = LOADS_PER_TURN * (busy.load_s + waiting.load_s)
        return busy.changed_at + busy.stretch * min(turn_s, self._longest_turn_s)

    def _idle_until(self, model: ModelUse) -> float:
        """Return when a loaded model is unloaded, as nothing asks for it; infinite: never."""
        return math.inf if model.num_open else model.used_at + model.idle_s


def _bytes(models: Iterable[ModelUse]) -> int:
    return sum(model.num_bytes for model in models)
