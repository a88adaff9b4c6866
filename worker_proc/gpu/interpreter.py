"""Triton's interpreter, which runs the kernels on a CPU, with a numpy newer than itself."""

from typing import Any


def accept_numpy_scalars() -> None:
    """Let kernels count up to a value that the interpreter keeps as an array of one element.

    Triton 3.6 makes an int of such an array, which numpy refuses since 2.4. Newer ones mend it.
    """
    from triton.runtime import interpreter

    if getattr(interpreter, "accepts_numpy_scalars", False):
        return
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_with_index
    interpreter.accepts_numpy_scalars = True
