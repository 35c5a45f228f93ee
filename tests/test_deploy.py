"""What is in deploy/ names things that exist: metrics, labels, options, routes."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from inflight.cli.main import main
from inflight.engine.stats import EngineStats
from inflight.events import KVUsage
from inflight.server.access.keys import Caller
from inflight.server.config import SERVE_OPTIONS, ServerConfig
from inflight.server.observability.metrics import Metrics

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "inflight.service"
MANIFEST = DEPLOY / "kubernetes" / "inflight.yaml"
RAY_MANIFEST = DEPLOY / "kubernetes" / "kuberay.yaml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
GUIDE = (ROOT / "docs" / "deploy.md").read_text()
DASHBOARD = json.loads((DEPLOY / "grafana" / "inflight.json").read_text())
OTHER_VARIABLES = {"INFLIGHT_CACHE"}  # not of `inflight serve`
ADDED_BY_PROMETHEUS = {"instance", "le"}


# ---- metrics ----


def exposed() -> dict[str, set[str]]:
    """Every metric that a server shows, with its labels."""
    metrics = Metrics("m")
    metrics.finished["stop"] += 1
    metrics.refused["queue_full"] += 1
    metrics.responses["/v1/completions", "200"] += 1
    kv = KVUsage(num_blocks=4, num_empty=1, num_cached=1, num_used=2, num_tokens=20, block_size=16)
    stats = EngineStats(1, 1, 1, 1, 1, 1, 1, 1, 1, kv)
    found: dict[str, set[str]] = {}
    for family in metrics.families(stats, 0, [Caller(name="a")]):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


EXPOSED = exposed()


def expressions() -> list[str]:
    """Every query of the dashboard."""
    queries = [target["expr"] for panel in panels() for target in panel.get("targets", ())]
    return [*queries, *(item["query"]["query"] for item in variables() if item["type"] == "query")]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARD["panels"]
    return found


def variables() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = DASHBOARD["templating"]["list"]
    return found


def metric_names(text: str) -> set[str]:
    return set(re.findall(r"inflight:[a-z0-9_]+", text))


@pytest.mark.parametrize("expression", expressions())
def test_dashboard_queries_existing_metrics(expression: str) -> None:
    names = metric_names(expression)
    assert names
    assert names <= set(EXPOSED)
    labels = set(re.findall(r"[{,]\s*([a-z_]+)\s*=~?\"", expression))
    for group in re.findall(r"by \(([^)]*)\)", expression):
        labels |= {label.strip() for label in group.split(",")}
    for name in names:
        assert labels - ADDED_BY_PROMETHEUS <= EXPOSED[name], f"{name} has no such label"


def test_dashboard_shows_the_important_metrics() -> None:
    asked = {name for expression in expressions() for name in metric_names(expression)}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket",
        "generation_tokens_total",
        "num_preemptions_total",
        "prefix_cache_hits_total",
        "http_responses_total",
        "engine_restarts_total",
        "key_generation_tokens_total",
    ):
        assert f"inflight:{name}" in asked


def test_counters_are_shown_as_rates_and_histograms_by_bucket() -> None:
    for expression in expressions():
        for name in metric_names(expression):
            if name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert re.search(rf"(rate|increase)\({name}", expression), expression


def test_panels_have_unique_ids_and_positions() -> None:
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another"
        taken |= cells


def test_variables_of_the_dashboard_are_defined() -> None:
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?([a-z]\w*)\}?", text))
    assert used == {item["name"] for item in variables()}


def test_metrics_in_the_guide_exist() -> None:
    assert metric_names(GUIDE) <= set(EXPOSED)


def test_prometheus_reads_the_right_path() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{SERVE_OPTIONS['port'].default}"]}]


# ---- commands ----


def unit() -> dict[str, list[str]]:
    """The settings of the service, each of which may be there more than once."""
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def docker_commands() -> list[list[str]]:
    entry, command = (
        json.loads(re.search(rf"^{name} (\[.*\])$", DOCKERFILE, re.M)[1])  # type: ignore[index]
        for name in ("ENTRYPOINT", "CMD")
    )
    return [entry + command]


def unit_commands() -> list[list[str]]:
    return [["inflight", *shlex.split(line)[1:]] for line in unit()["ExecStart"]]


def kubernetes(manifest: Path = MANIFEST) -> dict[str, Any]:
    """The manifests by kind."""
    return {item["kind"]: item for item in yaml.safe_load_all(manifest.read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = kubernetes()["Deployment"]["spec"]["template"]["spec"]
    return found


def pod_commands() -> list[list[str]]:
    return [["inflight", "serve", *container["args"]] for container in pod()["containers"]]


def ray_cluster() -> dict[str, Any]:
    found: dict[str, Any] = kubernetes(RAY_MANIFEST)["RayCluster"]["spec"]
    return found


def ray_head() -> dict[str, Any]:
    (container,) = ray_cluster()["headGroupSpec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def ray_worker() -> dict[str, Any]:
    (group,) = ray_cluster()["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    found: dict[str, Any] = container
    return found


def ray_commands() -> list[list[str]]:
    """The last line of the head's script."""
    (script,) = ray_head()["args"]
    return [shlex.split(script.splitlines()[-1].removeprefix("exec "))]


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """What servers were started with, none of which really was."""
    started: list[ServerConfig] = []
    monkeypatch.setattr("inflight.server.run.run", lambda options, _: started.append(options))
    return started


@pytest.mark.parametrize(
    "command", [*docker_commands(), *unit_commands(), *pod_commands(), *ray_commands()], ids=" ".join
)
def test_deployed_commands_are_valid(
    command: list[str], options: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in re.findall(r"(INFLIGHT_[A-Z_]+)=(\S+)", DOCKERFILE):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    (found,) = options
    assert (found.process.log_format, found.port) == ("json", 8000)


def help_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *command: str
) -> set[str]:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["inflight", *command, "--help"])
    with pytest.raises(SystemExit):
        main()
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


def test_flags_in_the_guide_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving, measuring = GUIDE.split("## Load testing")
    known = help_flags(capsys, monkeypatch, "serve")
    of_docker = {"--rm", "--stop-timeout", "--build-arg", "--gpus", "--now"}
    assert set(re.findall(r"--[a-z][a-z-]*", serving)) - of_docker <= known
    known = help_flags(capsys, monkeypatch, "bench", "serve")
    assert set(re.findall(r"--[a-z][a-z-]*", measuring)) - {"--compare-offline"} <= known


def test_variables_are_options() -> None:
    text = DOCKERFILE + UNIT.read_text() + MANIFEST.read_text() + RAY_MANIFEST.read_text() + GUIDE
    names = set(re.findall(r"INFLIGHT_[A-Z_]+", text)) - {"INFLIGHT_"}
    assert names - OTHER_VARIABLES <= {f"INFLIGHT_{name.upper()}" for name in SERVE_OPTIONS}


# ---- the unit and the image ----


def test_unit_lets_streams_finish(options: list[ServerConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = unit_commands()
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    found = unit()
    assert float(found["TimeoutStopSec"][0]) > options[0].shutdown_timeout
    assert (found["KillSignal"], found["KillMode"]) == (["SIGTERM"], ["mixed"])


def test_pod_lets_streams_finish_and_models_load(
    options: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = pod_commands()
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    (container,) = pod()["containers"]
    assert pod()["terminationGracePeriodSeconds"] > options[0].shutdown_timeout
    assert container["resources"]["limits"]["nvidia.com/gpu"] == options[0].router.replicas
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300
    assert (startup["httpGet"]["path"], container["readinessProbe"]["httpGet"]["path"]) == (
        "/health",
        "/ready",
    )
    assert container["ports"][0]["containerPort"] == SERVE_OPTIONS["port"].default
    assert pod()["securityContext"]["runAsUser"] == int(re.search(r"--uid (\d+)", DOCKERFILE)[1])  # type: ignore[index]
    labels = kubernetes()["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert kubernetes()["Service"]["spec"]["selector"].items() <= labels.items()


def test_ray_pods_have_gpus_for_all_replicas(
    options: list[ServerConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = ray_commands()
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    router = options[0].router
    (group,) = ray_cluster()["workerGroupSpecs"]
    limits = ray_worker()["resources"]["limits"]
    assert router.ray_address == "auto"
    assert router.replicas == group["replicas"] * limits["nvidia.com/gpu"]
    assert router.ray_num_cpus is not None
    assert router.ray_num_cpus * limits["nvidia.com/gpu"] <= float(limits["cpu"])
    assert f"ray=={ray_cluster()['rayVersion']}" in (ROOT / "constraints.txt").read_text().split()
    template = ray_cluster()["headGroupSpec"]["template"]
    assert template["spec"]["terminationGracePeriodSeconds"] > options[0].shutdown_timeout


def test_ray_pods_are_hardened_like_the_others() -> None:
    (other,) = pod()["containers"]
    head, worker = ray_head(), ray_worker()
    for name in ("startupProbe", "livenessProbe", "readinessProbe", "securityContext", "volumeMounts"):
        assert head[name] == other[name]
    assert head["ports"][0] == other["ports"][0]
    (group,) = ray_cluster()["workerGroupSpecs"]
    assert worker["livenessProbe"]["tcpSocket"]["port"] == int(group["rayStartParams"]["node-manager-port"])
    for template in (ray_cluster()["headGroupSpec"]["template"], group["template"]):
        assert template["spec"]["securityContext"] == pod()["securityContext"]
        assert template["spec"]["volumes"] == pod()["volumes"]
    service = kubernetes(RAY_MANIFEST)["Service"]["spec"]
    labels = ray_cluster()["headGroupSpec"]["template"]["metadata"]["labels"]
    assert service == kubernetes()["Service"]["spec"]
    assert service["selector"].items() <= labels.items()
    assert not service["selector"].items() <= group["template"]["metadata"]["labels"].items()


def test_unit_is_hardened() -> None:
    found = unit()
    for name, value in (
        ("DynamicUser", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("CapabilityBoundingSet", ""),
    ):
        assert found[name] == [value]
    assert int(found["LimitNOFILE"][0]) > ServerConfig().max_connections


def test_unit_has_sections() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read(UNIT)
    assert parser.sections() == ["Unit", "Service", "Install"]


def test_image_is_safe_and_has_a_health_check() -> None:
    lines = DOCKERFILE.splitlines()
    assert lines.index("USER inflight") < next(
        i for i, line in enumerate(lines) if line.startswith("ENTRYPOINT")
    )
    assert not any(line.startswith("USER root") for line in lines)
    (check,) = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert "/health" in check
    for line in lines:
        if line.startswith("COPY"):
            for name in line.split()[1:-1]:
                assert (ROOT / name).exists(), name
