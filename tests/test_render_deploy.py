"""Rendered manifests are checked by the tools that their readers use, and planted faults are caught."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from ralbuild.errors import UsageError
from ralbuild.release.compose import render_compose
from ralbuild.release.kubernetes import STRATEGIES, Deployment, parse_autoscale, render_kubernetes
from ralbuild.release.pipelines import Pipeline, render_pipeline
from ralbuild.release.proxy import haproxy_files
from ralbuild.release.site import default_settings

SCHEMAS = Path(__file__).parent.parent / "ralbuild" / "data" / "schemas"
VERSIONS = ("1.25", "1.28", "1.31", "1.37")
IMAGE = "registry.example/models/m@sha256:" + "b" * 64
PROBE = "registry.example/tools/ralbuild@sha256:" + "c" * 64
LABELS = {
    "io.ralbuild.bundle": "sha256:" + "a" * 64,
    "io.ralbuild.weights.memory": str(540 << 20),
    "io.ralbuild.weights.bytes": str(30 << 30),
    "io.ralbuild.target": "cpu",
}
CUSTOM = {"Rollout", "AnalysisTemplate", "ServiceMonitor", "PrometheusRule"}


def rendered(folder: Path, strategy: str, **changes: object) -> Path:
    values = {"replicas": 2, "most": 4, "probe_image": PROBE, "nodes": 3} | changes
    for file in render_kubernetes(Deployment("chat", IMAGE, LABELS, strategy, **values)):
        path = folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.data)
    return folder


def documents(folder: Path) -> dict[Path, dict]:
    paths = [path for path in sorted(folder.rglob("*.yaml")) if path.name != "kustomization.yaml"]
    return {path: yaml.safe_load(path.read_text()) for path in paths}


def problems(folder: Path, version: str) -> str:
    """What the validators say about every file; a resource that no schema knows is a problem too."""
    out = []
    for path, item in documents(folder).items():
        try:
            if item["kind"] in CUSTOM:
                schema = json.loads((SCHEMAS / f"{item['kind'].lower()}.schema.json").read_text())
                jsonschema.validate(item, schema)
            else:
                kubernetes_validate.validate(item, version, strict=True)
        except (jsonschema.ValidationError, kubernetes_validate.ValidationError) as error:
            out.append(f"{path.name}: {error}")
    return "\n".join(out)


def as_builtin(folder: Path) -> None:
    """Turn what custom resources carry into the built-in kinds that have a schema: pod and job."""
    for path, item in documents(folder).items():
        if item["kind"] == "Rollout":
            spec = {key: item["spec"][key] for key in ("replicas", "selector", "template")}
            plain = item | {"kind": "Deployment", "apiVersion": "apps/v1", "spec": spec}
            path.with_name("as-deployment.yaml").write_text(yaml.safe_dump(plain))
        elif item["kind"] == "AnalysisTemplate":
            spec = item["spec"]["metrics"][0]["provider"]["job"]["spec"]
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
            path.with_name(f"as-job-{path.name}").write_text(yaml.safe_dump(job))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_file_passes_strict_validation_for_four_versions(tmp_path: Path, strategy: str) -> None:
    folder = rendered(tmp_path, strategy)
    as_builtin(folder)
    for version in VERSIONS:
        assert problems(folder, version) == ""


@pytest.mark.parametrize(
    ("strategy", "file", "good", "bad"),
    [
        ("service-switch", "deployment-blue.yaml", "readOnlyRootFilesystem", "readonlyRootFilesystem"),
        ("service-switch", "hpa.yaml", "        metric: {", "        weight: 0.3\n        metric: {"),
        ("service-switch", "service.yaml", "targetPort", "target_port"),
        ("rollout", "rollout.yaml", "autoPromotionEnabled", "autoPromotion"),
        ("rollout", "analysis-gate.yaml", "failureLimit: 0", "failureLimit: none"),
        ("recreate", "servicemonitor.yaml", "interval: 15s", "interval: 15"),
        ("recreate", "prometheusrule.yaml", "record: ralbuild_pressure", "record: ralbuild-pressure"),
        ("recreate", "prepull.yaml", "completions: 3", "completion: 3"),
        ("recreate", "pdb.yaml", "maxUnavailable: 1", "maxUnavailable: [1]"),
    ],
)
def test_a_planted_fault_is_caught(tmp_path: Path, strategy: str, file: str, good: str, bad: str) -> None:
    path = rendered(tmp_path, strategy) / "base" / file
    assert good in path.read_text()
    path.write_text(path.read_text().replace(good, bad))
    assert problems(tmp_path, "1.31") != ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kustomize_layout_names_every_file_and_only_those(tmp_path: Path, strategy: str) -> None:
    folder = rendered(tmp_path, strategy)
    listed = yaml.safe_load((folder / "base" / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(
        p.name for p in (folder / "base").iterdir() if p.name != "kustomization.yaml"
    )
    for environment in ("staging", "production"):
        plain = yaml.safe_load((folder / "environments" / environment / "kustomization.yaml").read_text())
        assert plain["resources"] == ["../../base"]
        assert plain["namespace"] == f"chat-{environment}"


def test_sizes_come_from_the_image(tmp_path: Path) -> None:
    item = yaml.safe_load(
        (rendered(tmp_path, "recreate", replicas=1, most=1) / "base" / "deployment.yaml").read_text()
    )
    pod = item["spec"]["template"]["spec"]
    startup = pod["containers"][0]["startupProbe"]
    # 30 GiB at 50 MiB a second and two minutes of imports.
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 30 * 1024 / 50 + 120
    assert item["spec"]["progressDeadlineSeconds"] > startup["periodSeconds"] * startup["failureThreshold"]
    assert pod["terminationGracePeriodSeconds"] > 300 + 15
    assert item["spec"]["strategy"] == {"type": "Recreate"}
    assert not (tmp_path / "base" / "pdb.yaml").exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rules_of_the_serving_side_are_mounted_as_a_folder_and_named_to_the_server(
    tmp_path: Path, strategy: str
) -> None:
    folder = rendered(tmp_path, strategy, rules_map="chat-rules", rules_least=20261201)
    as_builtin(folder)
    for version in VERSIONS:
        assert problems(folder, version) == ""
    pods = [
        item["spec"]["template"]["spec"] for item in documents(folder).values() if "replicas" in item["spec"]
    ]
    assert pods
    for pod in pods:
        (server,) = pod["containers"]
        env = {item["name"]: item["value"] for item in server["env"]}
        (mount,) = [item for item in server["volumeMounts"] if item["name"] == "rules"]
        assert mount["readOnly"]
        assert "subPath" not in mount  # a file that is mounted alone never changes
        for name in ("RAL_RUNTIME_RULES", "RAL_RUNTIME_RULES_KEY"):
            assert Path(env[name]).parent == Path(mount["mountPath"])
        assert env["RAL_RUNTIME_RULES_LEAST"] == "20261201"
        assert {"name": "rules", "configMap": {"name": "chat-rules"}} in pod["volumes"]


def test_the_green_colour_is_off_and_has_no_autoscaler(tmp_path: Path) -> None:
    items = documents(rendered(tmp_path, "service-switch"))
    deployments = {item["metadata"]["name"]: item for item in items.values() if item["kind"] == "Deployment"}
    assert deployments["chat-green"]["spec"]["replicas"] == 0
    scaled = [
        i["spec"]["scaleTargetRef"]["name"] for i in items.values() if i["kind"] == "HorizontalPodAutoscaler"
    ]
    assert scaled == ["chat-blue"]


@pytest.mark.parametrize("text", ["4,weight=0.3", "0", "x", "4,target=0", "4,target=-1", "4,tarjet=1"])
def test_what_an_autoscaler_cannot_do_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_autoscale(text)
    if "weight" in text:
        assert "takes the largest answer" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "registry.example/m:latest"},
        {"app": "Chat"},
        {"app": "x" * 60},
        {"probe_image": "", "strategy": "rollout"},
        {"rules_map": "Not A Name"},
    ],
)
def test_what_kubernetes_would_refuse_is_refused_before(changes: dict[str, str]) -> None:
    values = {"app": "chat", "image": IMAGE, "labels": LABELS, "strategy": "recreate"} | changes
    with pytest.raises(UsageError):
        render_kubernetes(Deployment(**values))


def compose_schema() -> dict[str, Any]:
    vendored = resources.files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"
    schema: dict[str, Any] = json.loads(vendored.read_text())
    return schema


@pytest.mark.parametrize(
    ("folder", "source"),
    [("rules", "./rules"), ("/srv/a $b: #c", "/srv/a $$b: #c"), ("../x", "../x"), ("./y", "./y")],
)
def test_compose_mounts_rules_of_the_serving_side_for_both_colours(folder: str, source: str) -> None:
    settings = default_settings()
    files = render_compose("chat", IMAGE, PROBE, LABELS, settings, 0, rules_folder=folder, rules_least=7)
    text = next(file.data for file in files if file.path == "compose.yaml").decode()
    project = yaml.safe_load(text)
    jsonschema.validate(project, compose_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(
            yaml.safe_load(text.replace("read_only: true\n        bind", "readonly: x\n        bind")),
            compose_schema(),
        )
    for colour in ("blue", "green"):
        server = project["services"][colour]
        (volume,) = server["volumes"]
        assert (volume["type"], volume["source"], volume["read_only"]) == ("bind", source, True)
        env = server["environment"]
        for name in ("RAL_RUNTIME_RULES", "RAL_RUNTIME_RULES_KEY"):
            assert Path(env[name]).parent == Path(volume["target"])
        assert env["RAL_RUNTIME_RULES_LEAST"] == "7"
    assert "volumes" not in next(
        yaml.safe_load(file.data)["services"]["blue"]
        for file in render_compose("chat", IMAGE, PROBE, LABELS, settings, 0)
        if file.path == "compose.yaml"
    )


def test_compose_passes_its_schema_and_a_planted_fault_does_not(tmp_path: Path) -> None:
    files = render_compose("chat", IMAGE, PROBE, LABELS, default_settings(), 1)
    text = next(file.data for file in files if file.path == "compose.yaml").decode()
    assert {"proxy/haproxy.cfg", "proxy/park.lua", "proxy/503.http", "proxy/state.map"} <= {
        f.path for f in files
    }
    schema = compose_schema()
    jsonschema.validate(yaml.safe_load(text), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text.replace("cap_drop", "cap_dorp")), schema)
    stops = yaml.safe_load(text)["services"]["blue"]["stop_grace_period"]
    assert int(stops.removesuffix("s")) > default_settings().drain_seconds


def test_haproxy_accepts_the_files_of_a_compose_project(tmp_path: Path) -> None:
    for name, data in haproxy_files(tmp_path, default_settings()).items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run(
        ["/usr/sbin/haproxy", "-c", "-f", tmp_path / "haproxy.cfg"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_schemas_are_schemas() -> None:
    schemas = [json.loads(path.read_text()) for path in sorted(SCHEMAS.glob("*.json"))]
    assert {schema["title"] for schema in schemas} == CUSTOM
    for schema in schemas:
        jsonschema.Draft202012Validator.check_schema(schema)


def pipeline(kind: str) -> str:
    (file,) = render_pipeline(
        kind, Pipeline("registry.example/models/chat", "/srv/weights", "ral-config.yaml", "probes.yaml")
    )
    return file.data.decode()


def test_pipelines_pass_their_schemas_and_a_planted_fault_does_not() -> None:
    vendored = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    planted = {"github": ("runs-on", "run-on"), "gitlab": ("resource_group", "resource-group")}
    for kind, name in (("github", "github-workflows.json"), ("gitlab", "gitlab-ci.json")):
        schema = json.loads((vendored / name).read_text())
        validator = jsonschema.validators.validator_for(schema)(schema)
        text = pipeline(kind)
        assert list(validator.iter_errors(yaml.safe_load(text))) == []
        assert list(validator.iter_errors(yaml.safe_load(text.replace(*planted[kind]))))


def test_zizmor_finds_nothing_in_the_workflow_and_finds_a_planted_injection(tmp_path: Path) -> None:
    folder = tmp_path / ".github" / "workflows"
    folder.mkdir(parents=True)
    planted = pipeline("github").replace("--strict --format github", "--strict ${{ github.head_ref }}")
    for name, text, good in (("good", pipeline("github"), True), ("bad", planted, False)):
        (folder / f"{name}.yaml").write_text(text)
        command = [
            Path(sys.executable).parent / "zizmor",
            "--offline",
            "--no-progress",
            folder / f"{name}.yaml",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) is good, done.stdout


def test_a_pipeline_gates_production_by_hand_and_never_writes_a_key_into_a_log() -> None:
    jobs = yaml.safe_load(pipeline("github"))["jobs"]
    assert jobs["production"]["needs"] == ["build", "staging"]
    assert jobs["production"]["environment"] == "production"
    gitlab = yaml.safe_load(pipeline("gitlab"))
    assert gitlab["production"]["rules"][0]["when"] == "manual"
    assert gitlab["staging"]["environment"]["on_stop"] == "rollback-staging"
    for step in jobs["build"]["steps"]:
        assert "secrets." not in step.get("run", "")
        uses = step.get("uses", "@" + "0" * 40)
        assert len(uses.split("@")[1]) == 40


def test_every_script_of_the_pipelines_passes_shellcheck(tmp_path: Path) -> None:
    scripts = [
        step["run"]
        for job in yaml.safe_load(pipeline("github"))["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    for job in yaml.safe_load(pipeline("gitlab")).values():
        scripts += job.get("script", []) + job.get("before_script", []) if isinstance(job, dict) else []
    paths = []
    for number, text in enumerate(scripts):
        path = tmp_path / f"{number}.sh"
        path.write_text(f"#!/bin/bash\n{text}\n")
        paths.append(path)
    command = [Path(sys.executable).parent / "shellcheck", "-e", "SC2154", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "change", [{"image": "registry.example/m:tag"}, {"model": "my weights"}, {"probes": "a;b"}]
)
def test_a_pipeline_of_what_needs_quoting_is_refused(change: dict[str, str]) -> None:
    values = {"image": "registry.example/m", "model": "w", "config": "c.yaml", "probes": "p.yaml"} | change
    with pytest.raises(UsageError):
        render_pipeline("github", Pipeline(**values))
