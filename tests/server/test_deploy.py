"""Files for deployment: what they refer to exists, and Prometheus accepts its part."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from forerun.server.guard import ApiKey

DEPLOY = Path(__file__).parents[2] / "deploy"
IMAGE = (DEPLOY / "Containerfile").read_text()


def read_yaml(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


COMPOSE = read_yaml("compose.yaml")
SERVICES = COMPOSE["services"]


def with_defaults(text: str) -> str:
    """Replace variables by their defaults; one without a default fails the test."""
    found = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert "${" not in found, text
    return found


def mounts() -> list[tuple[str, str, str]]:
    """Return service, source and target of every volume."""
    found = []
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source, target, *_ = with_defaults(volume).split(":")
            found.append((name, source, target))
    return found


def test_compose_starts_without_any_setting():
    for service in SERVICES.values():
        for text in (*service.get("command", ()), *service.get("environment", {}).values()):
            with_defaults(text)
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:")
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    for _, source, _ in mounts():
        named = source in COMPOSE["volumes"]
        assert named or (DEPLOY / source).is_file(), source
    keys = {SERVICES["forerun"]["environment"]["FORERUN_API_KEY"]}
    keys.add(COMPOSE["configs"]["key"]["content"])
    (key,) = map(with_defaults, keys)
    ApiKey.of("default", key)  # it is long enough for the server


def test_the_server_is_built_from_files_that_exist_and_keeps_its_cache():
    build = SERVICES["forerun"]["build"]
    root = (DEPLOY / build["context"]).resolve()
    assert (root / build["dockerfile"]).samefile(DEPLOY / "Containerfile")
    for sources in re.findall(r"^COPY (.+) \S+$", IMAGE, re.M):
        assert all((root / source).exists() for source in sources.split())
    folder = re.search(r"FORERUN_CACHE=(\S+)", IMAGE)[1]
    assert f"VOLUME {folder}\n" in IMAGE
    assert ("forerun", "cache", folder) in mounts()
    steps = [IMAGE.index(step) for step in ("USER forerun", "compiled_kernels()", "VOLUME")]
    assert steps == sorted(steps)
    gpu = read_yaml("compose.gpu.yaml")["services"]["forerun"]
    assert all(f"ARG {name}=" in IMAGE for name in gpu["build"]["args"])


def test_prometheus_reads_its_key_and_its_rules_and_grafana_its_dashboard():
    config = read_yaml("prometheus/prometheus.yml")
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert f":{port}:{port}" in SERVICES[host]["ports"][0]
    (mounted,) = SERVICES["prometheus"]["configs"]
    assert job["authorization"]["credentials_file"] == mounted["target"]
    assert mounted["source"] in COMPOSE["configs"]
    targets = {target for name, _, target in mounts() if name == "prometheus"}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= targets
    (source,) = read_yaml("grafana/datasources.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = read_yaml("grafana/dashboards.yml")["providers"]
    dashboard = f"{provider['options']['path']}/forerun.json"
    assert ("grafana", "./grafana/forerun.json", dashboard) in mounts()
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == dashboard


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on the PATH")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "--syntax-only", "prometheus.yml"),
        ("check", "rules", "forerun.rules.yml"),
        ("test", "rules", "forerun.rules.test.yml"),
    ],
)
def test_promtool_accepts(arguments):
    done = subprocess.run(
        ["promtool", *arguments],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


SYSTEMD = shutil.which("systemd-analyze")


@pytest.mark.skipif(SYSTEMD is None, reason="no systemd-analyze on the PATH")
def test_systemd_accepts_the_unit_for_processors_and_the_one_for_gpus(tmp_path):
    unit = (DEPLOY / "systemd/forerun.service").read_text()
    (tmp_path / "forerun.service").write_text(unit.replace("/opt/forerun/bin/forerun", "/bin/true"))
    more = tmp_path / "forerun.service.d"
    for extended in (False, True):
        if extended:
            more.mkdir()
            text = (DEPLOY / "systemd/forerun.service.d/gpu.conf").read_text()
            (more / "gpu.conf").write_text(re.sub(r"/usr/bin/\S+", "/bin/true", text))
        done = subprocess.run(
            [SYSTEMD, "verify", str(tmp_path / "forerun.service")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "forerun.service" not in done.stdout + done.stderr
        assert done.returncode == 0
