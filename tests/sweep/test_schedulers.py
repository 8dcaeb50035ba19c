"""The files of docs/sweeps.md with which Kubernetes and SkyPilot run the workers of a sweep.

Their commands run here, as these systems would run them, and their rules are applied to the exit
codes. The fields are those that were found in the types of the Kubernetes client 37.0 and in the
schemas of SkyPilot 0.14, which the tests do not install.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house.test_docs import blocks
from tests.runs import ROOT, SWEPT, replaced
from tests.sweep.test_sweep import write_sweep
from trainer.__main__ import main

LONG = 200.0  # seconds that a worker may take
PAGE = "docs/sweeps.md"
CONTAINER = "spec.template.spec.containers"
RULE = "spec.podFailurePolicy.rules"
KUBERNETES = {
    *("apiVersion", "kind", "metadata.name", "spec.completionMode", "spec.completions"),
    *("spec.parallelism", "spec.backoffLimitPerIndex", f"{RULE}.action"),
    *(f"{RULE}.onPodConditions.{name}" for name in ("type", "status")),
    *(f"{RULE}.onExitCodes.{name}" for name in ("containerName", "operator", "values")),
    *("spec.template.spec.restartPolicy", "spec.template.spec.terminationGracePeriodSeconds"),
    *(f"{CONTAINER}.{name}" for name in ("name", "image", "workingDir", "command")),
    *(f"{CONTAINER}.resources.limits.nvidia.com/gpu", f"{CONTAINER}.volumeMounts.name"),
    *(f"{CONTAINER}.volumeMounts.mountPath", "spec.template.spec.volumes.name"),
    "spec.template.spec.volumes.persistentVolumeClaim.claimName",
}
SKYPILOT = {
    *("name", "run", "volumes./shared", "envs.SWEEP", "envs.WORKERS"),
    *(f"resources.{name}" for name in ("accelerators", "use_spot", "image_id")),
    *(f"resources.job_recovery.{x}" for x in ("recover_on_exit_codes", "max_restarts_on_errors")),
}


def content(name: str, shared: Path | None = None) -> dict[str, Any]:
    """Returns a file of the page; with `shared` in place of the folder /shared."""
    found = blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"))
    (text,) = [block.text for block in found if block.file == name]
    return yaml.safe_load(text if shared is None else text.replace("/shared", str(shared)))


def paths(value: Any, above: str = "") -> Iterator[str]:
    """Yields the fields of a file that have no fields themselves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from paths(inner, f"{above}.{key}" if above else key)
    elif isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        for each in value:
            yield from paths(each, above)
    else:
        yield above


@pytest.mark.parametrize(("name", "known"), [("job.yaml", KUBERNETES), ("sky.yaml", SKYPILOT)])
def test_a_file_has_fields_that_its_system_knows(name: str, known: set[str]) -> None:
    assert set(paths(content(name))) == known


def kubernetes(job: dict[str, Any], code: int, disrupted: bool = False) -> str:
    """Returns what Kubernetes does after an exit code: the action of the first rule that matches.

    `disrupted` says whether it has ended the pod itself.
    """
    assert job["spec"]["completionMode"] == "Indexed"
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "podFailurePolicy and backoffLimitPerIndex need it"
    names = [container["name"] for container in pod["containers"]]
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            codes = rule["onExitCodes"]
            assert codes["containerName"] in names and codes["operator"] == "In"
            matches = code in codes["values"]
        else:
            assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
            matches = disrupted
        if matches:
            return rule["action"]
    return "Count"


def test_kubernetes_starts_a_stopped_worker_again_and_not_one_that_failed() -> None:
    job = content("job.yaml")
    actions = {code: kubernetes(job, code) for code in (75, 1, 2, 137)}
    assert actions == {75: "Ignore", 1: "FailIndex", 2: "FailIndex", 137: "Count"}
    assert kubernetes(job, 137, disrupted=True) == "Ignore"


def skypilot(task: dict[str, Any], code: int) -> bool:
    """Returns whether SkyPilot starts a managed job again after an exit code."""
    rules = task["resources"]["job_recovery"]
    return code in rules["recover_on_exit_codes"] or rules["max_restarts_on_errors"] > 0


def test_skypilot_starts_a_stopped_worker_again_and_not_one_that_failed() -> None:
    task = content("sky.yaml")
    assert [skypilot(task, code) for code in (75, 1, 2)] == [True, False, False]


def begin(system: str, shared: Path) -> "subprocess.Popen[str]":
    """Starts a worker as a system would."""
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = str(ROOT)
    if system == "kubernetes":
        pod = content("job.yaml", shared)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        command, here = container["command"], container["workingDir"]
        environment["JOB_COMPLETION_INDEX"] = "0"
    else:
        task = content("sky.yaml", shared)
        command, here = ["bash", "-c", task["run"]], str(shared)
        environment |= task["envs"]
    return subprocess.Popen(
        command,
        cwd=here,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.long
@pytest.mark.parametrize("system", ["kubernetes", "skypilot"])
def test_a_worker_that_is_stopped_and_started_again_completes_the_sweep(
    system: str, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    base = SWEPT
    for name, value in (("data", "!data.digits {batch_size: 64}"), ("steps", "2000")):
        base = replaced(name, value, base)
    base = replaced("model", "!models.mlp {width: 8, depth: 1}", base)
    file = write_sweep(shared / "experiments", replaced("eval_every", "500", base))
    # Before there is a plan, it is a mistake.
    process = begin(system, shared)
    said, _ = process.communicate(timeout=LONG)
    assert process.returncode == 2, said
    plan = ["sweep", f"--config={file}", f"--workdir={shared}/sweeps/muon", "--plan_only"]
    assert main(plan) == 0
    process = begin(system, shared)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if "trials from" in line or "trial from" in line:
                break
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=LONG)
        assert process.returncode == 75, said
        assert not list((shared / "sweeps").glob("*/final.json"))
        process = begin(system, shared)
        said, _ = process.communicate(timeout=LONG)
        assert process.returncode == 0, said
    finally:
        process.kill()
    assert main(["sweep", "check", str(shared / "sweeps" / "muon")]) == 0
