"""deploy/quadriga.service and its drop-in for GPUs, as systemd-analyze and the server read them."""

import argparse
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from quadriga.server.config import server_config as configuration
from quadriga.server.config.server_config import ServerConfig
from tests.server import ROOT

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "quadriga.service"
PROGRAM = "/opt/quadriga/bin/quadriga"
# Exposure from 0 to 10, times ten; systemd calls everything below 5 "OK".
MAX_EXPOSURE = 40


def settings(path: Path) -> dict[str, str]:
    """Return the settings of a unit, the last one of each name."""
    return dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.M))


def installed(directory: Path, is_gpu: bool) -> dict[str, str]:
    """Install the unit in a directory, with a program that exists, and return the environment."""
    text = UNIT.read_text()
    assert PROGRAM in text
    (directory / "quadriga.service").write_text(text.replace(PROGRAM, "/bin/true"))
    if is_gpu:
        drop_in = directory / "quadriga.service.d"
        drop_in.mkdir()
        shutil.copy(DEPLOY / "quadriga-gpu.conf", drop_in / "gpu.conf")
    return {**os.environ, "SYSTEMD_UNIT_PATH": f"{directory}:"}  # ":" adds systemd's own


@pytest.mark.parametrize("is_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "action", [["verify"], ["security", "--offline=true", f"--threshold={MAX_EXPOSURE}"]], ids=str
)
def test_systemd_takes_the_unit_and_finds_it_well_confined(
    tmp_path: Path, action: list[str], is_gpu: bool
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: install it (Debian: systemd)")
    environment = installed(tmp_path, is_gpu)
    done = subprocess.run(
        ["systemd-analyze", *action, "--no-pager", str(tmp_path / "quadriga.service")],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if action == ["verify"]:
        assert done.stdout + done.stderr == ""


def test_a_setting_that_does_not_exist_would_be_found(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze: install it (Debian: systemd)")
    environment = installed(tmp_path, False)
    unit = tmp_path / "quadriga.service"
    unit.write_text(unit.read_text().replace("KillMode=", "KillMood="))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "KillMood" in done.stderr


def config() -> ServerConfig:
    """Return the flags of deploy/quadriga.yaml."""
    parser = argparse.ArgumentParser()
    configuration.add_flags(parser)
    return configuration.from_namespace(
        parser.parse_args(["--config", str(DEPLOY / "quadriga.yaml")])
    )


def test_the_service_starts_with_the_file_of_flags() -> None:
    assert settings(UNIT)["ExecStart"] == f"{PROGRAM} serve --config /etc/quadriga/quadriga.yaml"
    flags = config()
    assert flags.scheduler.resume
    assert flags.frontend.endpoint == "ipc", "with keys the ZeroMQ socket is closed"


def test_its_user_can_write_what_the_flags_name_and_read_the_keys() -> None:
    unit, flags = settings(UNIT), config()
    assert unit["ProtectSystem"] == "strict" and unit["User"] == "quadriga"
    assert "DynamicUser" not in unit, "root could not write files for a user that changes"
    writable = [f"/var/lib/{unit['StateDirectory']}", f"/var/cache/{unit['CacheDirectory']}"]
    paths = [flags.tenants.keys, flags.tenants.usage_log, flags.scheduler.journal]
    paths += re.findall(r"=(/\S+)", unit["Environment"])
    assert len(paths) >= 5
    assert [path for path in paths if not any(path.startswith(f"{d}/") or path == d
                                              for d in writable)] == []  # fmt: skip
    assert f"runuser -u {unit['User']} -- {PROGRAM} keys add" in UNIT.read_text()


def test_a_stop_has_time_for_open_requests_and_a_reload_is_a_sighup() -> None:
    unit = settings(UNIT)
    assert int(unit["TimeoutStopSec"]) > config().launch.shutdown_timeout
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    logrotate = (DEPLOY / "logrotate.conf").read_text()
    assert f"\n{config().tenants.usage_log} {{" in logrotate
    assert f"su {unit['User']} {unit['Group']}" in logrotate
    assert "postrotate" not in logrotate and "copytruncate\n" not in logrotate


def test_the_variant_for_gpus_shows_the_devices() -> None:
    assert settings(UNIT)["PrivateDevices"] == "yes"
    assert settings(DEPLOY / "quadriga-gpu.conf")["PrivateDevices"] == "no"
