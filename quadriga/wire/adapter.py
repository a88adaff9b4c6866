"""An adapter of the served model, on its way from the frontend to the worker."""

import msgspec


class AdapterRef(msgspec.Struct, array_like=True, frozen=True):
    """An adapter as it was when a request began.

    Attributes:
        id: hash of its content, as adapter_id gives it: equal ids are equal answers.
        name: what clients call it.
        path: where its files came from. A worker that finds none in the run's directory reads
            these, if their id is still the same.
    """

    id: str
    name: str
    path: str = ""
