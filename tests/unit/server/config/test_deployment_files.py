"""The files for Docker, systemd, KubeRay and the docs name flags and packages that exist."""

import argparse
import ast
import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from quadriga import __version__
from quadriga.server.config import server_config as configuration
from quadriga.server.config.flags import FOREIGN_FLAGS
from tests.unit.server.config.command_line import parse

ROOT = Path(__file__).resolve().parents[4]
KUBERAY = ROOT / "deploy" / "kuberay"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.fixture(autouse=True)
def _key_as_the_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_API_KEY", "a key")


def test_the_container_starts_a_server_that_its_port_reaches() -> None:
    entry = re.search(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    command = re.search(r"^ *command: (.*)$", (ROOT / "compose.yaml").read_text(), re.M)
    assert entry
    assert command
    argv = [*ast.literal_eval(entry.group(1)), *ast.literal_eval(command.group(1))]
    assert argv[:2] == ["quadriga", "serve"]
    config = parse(argv[2:])
    assert config.http.host == "0.0.0.0"
    assert config.http.port == 8000
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    # `:?`: compose refuses to start without the variable.
    assert service["environment"]["QUADRIGA_API_KEY"].startswith("${QUADRIGA_API_KEY:?")
    # `on-failure` would not start it after a reboot.
    assert service["restart"] == "unless-stopped"


def test_the_variant_of_compose_for_gpus_starts_a_server_and_builds_torch_with_cuda() -> None:
    (service,) = yaml.safe_load((ROOT / "compose.gpu.yaml").read_text())["services"].values()
    assert parse(service["command"]).scheduler.resume
    (base,) = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values()
    assert base["build"] == "." and not base["command"][0].startswith("quadriga")
    ((name, index),) = service["build"]["args"].items()
    assert f"ARG {name}=" in (ROOT / "Dockerfile").read_text() and "/cpu" not in index


@pytest.mark.parametrize("name", ["Dockerfile", "deploy/quadriga-gpu.conf"])
def test_compiled_kernels_are_kept_where_a_server_on_a_gpu_may_write(name: str) -> None:
    caches = set(re.findall(r"(\w+)=/var/cache/quadriga", (ROOT / name).read_text()))
    assert caches >= {"TRITON_CACHE_DIR", "HUMMING_CACHE_DIR"}


def test_what_the_files_copy_and_the_workflows_run_exists() -> None:
    docker = (ROOT / "Dockerfile").read_text()
    for names in re.findall(r"^COPY (.*) \S+$", docker, re.M):
        assert [n for n in names.split() if n != "." and not (ROOT / n).exists()] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
        runs = "\n".join(step.get("run", "") for step in steps)
        assert set(re.findall(r"\bmake ([\w-]+)", runs)) <= targets, path
        assert all((ROOT / name).exists() for name in re.findall(r"^(\.\w+/\w+)", runs, re.M))
        args = [step.get("with", {}).get("build-args", "") for step in steps]
        assert all(f"ARG {arg.partition('=')[0]}=" in docker for arg in args if arg), path


def test_the_version_has_a_dated_section_of_the_changelog_below_what_is_unreleased() -> None:
    heads = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert heads[0] == "Unreleased"
    assert re.fullmatch(re.escape(__version__) + r" - \d{4}-\d\d-\d\d", heads[1])
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", head) for head in heads[1:])


def test_the_container_is_built_from_every_package() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    builds = {path.name for path in ROOT.glob("*.py")} | {"pyproject.toml", "constraints.txt"}
    copied = set(re.findall(r"^!(.*)$", (ROOT / ".dockerignore").read_text(), re.M))
    assert packages | builds <= copied


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_docs_start_a_server_with_flags_that_exist(page: Path) -> None:
    parser = argparse.ArgumentParser()
    configuration.add_flags(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    known |= {"--config", "--help", "--help-all"}  # of the launcher itself
    if page.name == "coming-from.md":  # which shows what an error says
        known |= FOREIGN_FLAGS.keys()
    # A command ends with its line, a backtick or a comment.
    commands = re.findall(r"(?:quadriga serve|launcher\.py) ([^`#\n]*)", page.read_text())
    flags = [flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z-]+", command)]
    assert not [flag for flag in flags if flag not in known]


# --- the manifests for KubeRay: well-formed, agree with each other, and start a server ------------


class Template(msgspec.Struct, forbid_unknown_fields=True):
    metadata: dict[str, dict[str, str]]
    spec: dict[str, Any]


class Head(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    ray_start_params: dict[str, str]
    template: Template


class Workers(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    ray_start_params: dict[str, str]
    template: Template


class ClusterSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    ray_version: str
    head_group_spec: Head
    worker_group_specs: list[Workers]


class RayCluster(msgspec.Struct, forbid_unknown_fields=True, rename={"api_version": "apiVersion"}):
    api_version: str
    kind: str
    metadata: dict[str, Any]
    spec: ClusterSpec


def manifests() -> tuple[RayCluster, dict[str, Any]]:
    cluster, service = yaml.safe_load_all((KUBERAY / "quadriga.yaml").read_text())
    return msgspec.convert(cluster, RayCluster, strict=True), service


def container_of(template: Template) -> dict[str, Any]:
    (container,) = template.spec["containers"]
    return dict(container)


def serve_flags(container: dict[str, Any]) -> list[str]:
    command = re.search(r"exec quadriga serve (.*)", container["args"][0], re.S)
    assert command
    return shlex.split(command.group(1).replace("\\\n", " "))


def test_its_commands_start_a_server_that_its_workers_have_room_for() -> None:
    cluster, _ = manifests()
    head, (workers,) = cluster.spec.head_group_spec, cluster.spec.worker_group_specs
    config = parse(serve_flags(container_of(head.template)))
    assert config.replicas.in_cluster
    assert config.replicas.dp == workers.replicas
    assert workers.min_replicas <= workers.replicas <= workers.max_replicas
    requested = container_of(workers.template)["resources"]["requests"]["cpu"]
    offered = workers.ray_start_params["num-cpus"]
    assert float(offered) == float(requested) == config.replicas.replica_cpus
    assert head.ray_start_params["num-cpus"] == "0"
    grace = head.template.spec["terminationGracePeriodSeconds"]
    assert grace > config.launch.shutdown_timeout


def test_all_machines_have_the_keys_at_the_same_place_and_a_token_for_ray() -> None:
    cluster, _ = manifests()
    head, (workers,) = cluster.spec.head_group_spec, cluster.spec.worker_group_specs
    config = parse(serve_flags(container_of(head.template)))
    for template in (head.template, workers.template):
        container = container_of(template)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template.spec["volumes"]}
        assert volumes[mounts[config.frontend.curve_dir]]["secret"]["defaultMode"] == 0o440
        assert volumes.keys() == set(mounts.values())
        environment = {variable["name"]: variable for variable in container["env"]}
        assert environment["RAY_AUTH_MODE"]["value"] == "token"
        for name in ("RAY_AUTH_TOKEN", "QUADRIGA_API_KEY"):
            assert "secretKeyRef" in environment[name]["valueFrom"]


def test_the_service_and_the_probes_reach_the_gateway() -> None:
    cluster, service = manifests()
    template = cluster.spec.head_group_spec.template
    container = container_of(template)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    config = parse(serve_flags(container))
    assert ports["http"] == config.http.port
    assert config.http.host == "0.0.0.0"
    assert container["readinessProbe"]["httpGet"]["port"] in ports
    (port,) = service["spec"]["ports"]
    assert port["targetPort"] in ports
    selector = dict(service["spec"]["selector"])
    assert selector.pop("ray.io/node-type") == "head"  # a label of KubeRay's
    assert selector.items() <= template.metadata["labels"].items()


def test_the_versions_of_ray_are_the_same_and_those_of_the_extra() -> None:
    cluster, _ = manifests()
    in_image = re.search(r'"ray\[default\]==(.+)"', (KUBERAY / "Dockerfile").read_text())
    assert in_image
    assert in_image[1] == cluster.spec.ray_version
    extra = re.search(r'"ray\[default\]>=(.+),<(.+)"', (ROOT / "pyproject.toml").read_text())
    assert extra
    assert as_numbers(extra[1]) <= as_numbers(in_image[1]) < as_numbers(extra[2])


def as_numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]
