"""Name the packages of a wheel; everything else about the distribution is in pyproject.toml.

A wheel has the programs (the processes of a server, launcher.py, the simulator and the bench) in
`quadriga/_programs`, where `quadriga/programs.py` finds them, so `quadriga` is its only top-level
name. An editable installation adds the checkout's root to sys.path.
"""

import sys

from setuptools import find_packages, setup

PROGRAMS = ["*_proc", "*_proc.*", "simulator", "simulator.*", "bench", "bench.*"]
# Developer tools: they measure this checkout, other servers, or one machine.
LAB = ["roofline", "quality", "capacity", "peers", "start", "gpu"]

packages = find_packages(include=["quadriga", "quadriga.*"])
if "editable_wheel" in sys.argv:
    setup(packages=packages, package_dir={"": "."})
else:
    programs = find_packages(include=PROGRAMS, exclude=[f"bench.{name}*" for name in LAB])
    setup(
        packages=packages + [f"quadriga._programs.{name}" for name in programs],
        py_modules=["quadriga._programs.launcher"],
        package_dir={"quadriga._programs": "."},
        include_package_data=False,
    )
