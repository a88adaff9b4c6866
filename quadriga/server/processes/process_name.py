"""Names of a server's processes: worker_proc, worker_proc/1 of a replica, worker_proc/1@MODEL."""

from typing import NamedTuple


class ProcessName(NamedTuple):
    """Which process of a server is meant.

    Attributes:
        program: the module that it runs, such as worker_proc.
        replica: number of its replica where there are several; None: there is one, or it belongs to
            none.
        model: name of its model, where the server has several; "": there is one, or it belongs to
            none.
    """

    program: str
    replica: int | None = None
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> "ProcessName":
        """Return the name of a text that `str` has made, whatever the model is called."""
        place, _, model = text.partition("@")
        program, slash, number = place.partition("/")
        return cls(program, int(number) if slash else None, model)

    def __str__(self) -> str:
        """Return the name as logs and commands have it."""
        replica = "" if self.replica is None else f"/{self.replica}"
        model = f"@{self.model}" if self.model else ""
        return f"{self.program}{replica}{model}"

    @property
    def in_model(self) -> str:
        """The name among the processes of its model."""
        return str(self._replace(model=""))
