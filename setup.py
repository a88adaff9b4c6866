"""Name the packages of a wheel; everything else about the distribution is in pyproject.toml.

A wheel has the programs (the processes of a server, launcher.py and the simulator) in
`quadriga/_programs`, where `quadriga/programs.py` finds them, so `quadriga` is its only top-level
name. An editable installation adds the checkout's root, with the bench, to sys.path.
"""

import sys

from setuptools import find_packages, setup

PROGRAMS = ["*_proc", "*_proc.*", "simulator", "simulator.*"]

packages = find_packages(include=["quadriga", "quadriga.*"])
if "editable_wheel" in sys.argv:
    setup(packages=packages, package_dir={"": "."})
else:
    programs = find_packages(include=PROGRAMS)
    setup(
        packages=packages + [f"quadriga._programs.{name}" for name in programs],
        py_modules=["quadriga._programs.launcher"],
        package_dir={"quadriga._programs": "."},
        include_package_data=False,
    )
