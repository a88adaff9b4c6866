"""Name the packages of a wheel; everything else about the distribution is in pyproject.toml.

A wheel has the programs (the processes of a server, launcher.py and the simulator) in
`quadriga/_programs`, where `quadriga/programs.py` finds them, so `quadriga` is its only top-level
name. An editable installation adds the checkout's root, with the bench, to sys.path.

QUADRIGA_WHEEL_KERNELS=x86_64 or =aarch64 adds compiled kernels for that machine, as
worker_proc/cpu/levels.py says. Without it a wheel is for every machine, and compiles them at the
first start.
"""

import os
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from worker_proc.cpu import levels

PROGRAMS = ["*_proc", "*_proc.*", "simulator", "simulator.*"]
MACHINE = os.environ.get("QUADRIGA_WHEEL_KERNELS", "")


class BuildWithKernels(build_py):
    """Copies the packages, and adds compiled kernels if they are asked for."""

    def run(self) -> None:
        """Build."""
        super().run()
        if MACHINE and not self.editable_mode:
            program = Path(self.build_lib, "quadriga/_programs/worker_proc/cpu")
            levels.build(MACHINE, program / levels.PREBUILT.name)


class WheelOfMachine(bdist_wheel):
    """Gives a wheel with kernels the tag of its machine; it fits every Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags for Python, its ABI and the platform."""
        if not MACHINE:
            tag: tuple[str, str, str] = super().get_tag()
            return tag
        return "py3", "none", f"manylinux_{levels.GLIBC}_{MACHINE}"


class KernelDistribution(Distribution):
    """Has compiled files where kernels are asked for."""

    def has_ext_modules(self) -> bool:
        """Return whether the files depend on the machine."""
        return bool(MACHINE)


options = {
    "cmdclass": {"build_py": BuildWithKernels, "bdist_wheel": WheelOfMachine},
    "distclass": KernelDistribution,
}
packages = find_packages(include=["quadriga", "quadriga.*"])
if "editable_wheel" in sys.argv:
    setup(packages=packages, package_dir={"": "."}, **options)
else:
    programs = find_packages(include=PROGRAMS)
    setup(
        packages=packages + [f"quadriga._programs.{name}" for name in programs],
        py_modules=["quadriga._programs.launcher"],
        package_dir={"quadriga._programs": "."},
        include_package_data=False,
        **options,
    )
