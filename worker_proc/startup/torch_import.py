"""Import torch without what only its exporter and its tracing compiler use.

`import torch` takes most of a worker's start. A third of that are modules that register Python
versions of C++ operators, for tensors without values and for `torch.export`. A native model on a
CPU has no use for them. They are put into `sys.modules` unexecuted, and run at the first access to
one of their attributes, so that code that does need them finds them as ever.
"""

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from quadriga.server.config.engine_args import WorkerArgs
from quadriga.server.models.model_impl import ModelImpl

# Releases whose import works with DEFERRED; a test checks the installed one. Others are imported
# whole.
TESTED_RELEASES = ("2.13",)
DEFERRED = frozenset({"torch._meta_registrations", "torch.export"})
NVIDIA_DRIVER = "/dev/nvidiactl"
_LOADER = "_deferred_loader"


def import_torch(args: WorkerArgs, impl: ModelImpl) -> None:
    """Import torch, without DEFERRED where nothing will need them.

    Its C++ code logs errors only, unless TORCH_CPP_LOG_LEVEL is set: a choice between cuBLAS and
    cuBLASLt would be a warning at each start.

    Args:
        args: the worker's flags.
        impl: what runs the model.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if can_defer(args, impl):
        with deferred_imports(DEFERRED):
            _import_uncollected()
    else:
        _import_uncollected()
        for name in DEFERRED:  # a spare worker has deferred them, before it had a model
            if is_deferred(name):
                getattr(sys.modules[name], "__all__", None)


def can_defer(args: WorkerArgs, impl: ModelImpl) -> bool:
    """Return whether one rank runs a native model on a CPU, with a tested release of torch."""
    on_cpu = args.device == "cpu" or (
        args.device == "auto" and sys.platform == "linux" and not os.path.exists(NVIDIA_DRIVER)
    )
    return on_cpu and args.tp == 1 and impl is ModelImpl.NATIVE and _has_tested_release()


def _has_tested_release() -> bool:
    try:
        release = version("torch")
    except PackageNotFoundError:  # torch that was built in place
        return False
    return release.startswith(tuple(f"{tested}." for tested in TESTED_RELEASES))


@contextmanager
def deferred_imports(names: frozenset[str]) -> Iterator[None]:
    """Import modules of these names, within the context, only at the first use of an attribute."""
    finder = _DeferringFinder(names)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def is_deferred(name: str) -> bool:
    """Return whether a module is imported, but not executed yet."""
    return isinstance(sys.modules.get(name), _DeferredModule)


def _import_uncollected() -> None:
    """Import torch without searches for garbage, of which an import makes little.

    What was imported stays, and no later search looks at it.
    """
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


class _DeferredModule(ModuleType):
    """A module that is executed when an attribute is missing."""

    def __getattr__(self, name: str) -> object:
        # Python's import system asks for attributes like __path__ of modules that have none.
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        loader: Loader = self.__dict__.pop(_LOADER)
        if self.__spec__ is not None:
            self.__spec__.loader = loader
        loader.exec_module(self)
        return getattr(self, name)


class _DeferringLoader(Loader):
    """Makes a module that its own loader executes later."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _DeferredModule(spec.name)
        module.__dict__[_LOADER] = self._loader
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module unexecuted."""


class _DeferringFinder(MetaPathFinder):
    """Finds modules of some names, which are executed later."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in self._names else None
        if spec is None or spec.loader is None:
            return None
        spec.loader = _DeferringLoader(spec.loader)
        return spec
