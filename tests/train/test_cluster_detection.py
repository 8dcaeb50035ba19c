"""How the processes of a run find each other by the variables that schedulers set.

The variables are those that Slurm 22.05 and Open MPI 4.1 set for the processes of a job on this
machine, written down from such jobs; those of Open MPI 5 and of Kubernetes are from their
documentation. The fields of an Indexed Job are those of Kubernetes' types, which the tests do not
install.
"""

import os
import re
import sys
import types
from typing import Any

import pytest
import yaml

from tests.house.test_docs import blocks
from tests.runs import ROOT
from tests.sweep.test_schedulers import kubernetes, paths
from trainer.cli import options
from trainer.messages import UserError
from trainer.train import multihost

SCHEDULERS = re.compile(r"SLURM|OMPI_|PMI|JAX_|KUBERNETES_|TPU_|JOB_COMPLETION_INDEX")
BATCH = {
    "SLURM_JOB_ID": "4099",
    "SLURM_JOB_NODELIST": "node[07-09],extra1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
STEP = BATCH | {
    "SLURM_STEP_NODELIST": "node[07-09],extra1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
# jax takes a port of the last 4096, by the number of the job.
SLURM_PORT = 65535 - 4096 + 1 + 4099 % 4096
RANKS = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "PMIX_RANK": "1",
}
OMPI = RANKS | {"OMPI_MCA_orte_hnp_uri": "514195456.0;tcp://192.0.2.2:53623;tcp6://[fd00::2]:40417"}
OMPI_PORT = 65535 - 4096 + 1 + (514195456 // 4096) % 4096
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "pod"}
EXPLICIT = {
    "JAX_COORDINATOR_ADDRESS": "node1:1234",
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "2",
}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what a process finds with the variables given, and no others of schedulers."""

    def find(*variables: dict[str, str]) -> tuple[Any, ...]:
        for name in [*os.environ]:
            if SCHEDULERS.match(name):
                monkeypatch.delenv(name)
        for name, value in {k: v for each in variables for k, v in each.items()}.items():
            monkeypatch.setenv(name, value)
        return tuple(multihost._processes_of_the_run(1))

    return find


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node[07-09],extra1", "node07"), ("gpu5", "gpu5"), ("a1,b2", "a1"), ("n[3,8]", "n3")],
)
def test_slurm_gives_the_first_node_the_number_and_the_index(found, nodes, first):
    variables = STEP | {"SLURM_STEP_NODELIST": nodes}
    assert found(variables) == (f"{first}:{SLURM_PORT}", 4, 3, [1])


def test_open_mpi_gives_the_address_of_mpirun_the_number_and_the_index(found):
    assert found(OMPI) == (f"192.0.2.2:{OMPI_PORT}", 2, 1, [0])


def test_another_port_and_another_address_replace_those_of_the_scheduler(found):
    assert found(STEP, {"JAX_COORDINATOR_PORT": "1234"})[0] == "node07:1234"
    assert found(OMPI, {"JAX_COORDINATOR_ADDRESS": "node3:99"}) == ("node3:99", 2, 1, [0])


def test_variables_of_jax_replace_what_a_scheduler_says(found):
    assert found(EXPLICIT) == ("node1:1234", 3, 2, None)
    # jax lets a process under Slurm see one GPU, that of its number on the node.
    assert found(EXPLICIT, STEP) == ("node1:1234", 3, 2, [1])
    assert found(EXPLICIT, POD) == ("node1:1234", 3, 2, None)


def test_a_task_of_a_slurm_array_with_one_task_is_a_run_of_one_process(found):
    array = {"SLURM_ARRAY_JOB_ID": "4090", "SLURM_ARRAY_TASK_ID": "9", "SLURM_NTASKS": "1"}
    one = STEP | array | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "n2"}
    assert found(one) == (f"n2:{SLURM_PORT}", 1, 0, [0])


def test_mpirun_in_a_slurm_job_counts(found):
    # The daemon that mpirun has started by srun is number 1 of 2, on the second node.
    daemon = STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
    ranks = OMPI | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}
    assert found(daemon, ranks) == (f"192.0.2.2:{OMPI_PORT}", 8, 5, [0])


def test_mpirun_that_jax_does_not_detect_in_a_slurm_job_is_refused(found, monkeypatch):
    # Each process would otherwise believe that it is number 0 of 1, and compute the whole run.
    monkeypatch.setattr(multihost, "ClusterEnv", _Detects(("n:1", 1, 0, [0])))
    with pytest.raises(UserError, match="mpirun says that this process is number 1 of 2, and jax"):
        found(STEP, RANKS)


class _Detects:
    """Stands for jax's detection."""

    def __init__(self, result: Any):
        self._result = result

    def auto_detect_unset_distributed_params(self, *_: object) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, r"found no scheduler that jax [\d.]+ knows\. Start the command under one\. Or set "),
        (BATCH, r"no step of a Slurm job: .* Start the command by srun in it\. Or set JAX_"),
        (
            {"JAX_COORDINATOR_ADDRESS": "n:1"},
            r"found no scheduler that jax [\d.]+ knows\. .* Or set JAX_COORDINATOR_ADDRESS",
        ),
    ],
)
def test_no_scheduler_is_a_user_error_that_says_what_to_do(found, variables, why):
    with pytest.raises(UserError, match=why):
        found(variables)


def test_open_mpi_5_without_what_jax_needs_is_a_user_error(found):
    with pytest.raises(UserError, match=r"Open MPI 5 .*Set JAX_|Open MPI 5 .* Or set JAX_"):
        found(RANKS)


def test_a_pod_without_the_package_kubernetes_is_a_user_error(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UserError, match="package kubernetes, which is not installed. Install it"):
        found(POD)


@pytest.mark.parametrize(
    ("variables", "unset"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID are not set"),
        ({"JAX_COORDINATOR_ADDRESS": "n:1", "JAX_PROCESS_ID": "0"}, "JAX_NUM_PROCESSES is not"),
    ],
)
def test_a_part_of_the_variables_of_jax_is_a_user_error(found, variables, unset):
    with pytest.raises(UserError, match=unset):
        found(variables, STEP)


def test_errors_of_a_detection_are_user_errors_in_one_line(found, monkeypatch):
    monkeypatch.setattr(multihost, "ClusterEnv", _Detects(OSError("no token\nof the pod.")))
    with pytest.raises(UserError) as refused:
        found(POD)
    assert (
        "could not ask the scheduler for the processes of the run: OSError: no token of the "
        in (str(refused.value))
    )
    assert found(POD, EXPLICIT) == ("node1:1234", 3, 2, None)


# An Indexed Job of Kubernetes: what the client returns in a pod of one, in the fields that jax
# reads.


def _kubernetes(subdomain: str | None) -> types.ModuleType:
    space = types.SimpleNamespace
    labels = {"job-name": "gpt"}
    owner = space(controller=True, kind="Job")
    pod = space(
        metadata=space(name="gpt-2", labels=labels, owner_references=[owner]),
        spec=space(subdomain=subdomain),
    )
    job = space(metadata=space(name="gpt", labels=labels), spec=space(parallelism=4))
    core = space(
        list_namespaced_pod=lambda **_: space(items=[pod]),
        list_namespaced_service=lambda _: space(items=[]),
    )
    module: Any = types.ModuleType("kubernetes")
    module.config = space(load_incluster_config=lambda: None)
    module.client = space(
        CoreV1Api=lambda: core,
        BatchV1Api=lambda: space(read_namespaced_job=lambda **_: job),
        exceptions=space(ApiException=RuntimeError),
    )
    return module


@pytest.mark.parametrize("subdomain", ["pods", None])
def test_an_indexed_job_of_kubernetes_needs_a_headless_service(found, monkeypatch, subdomain):
    from jax._src.clusters import K8sCluster

    kept = {name: K8sCluster.__dict__[name] for name in ("_namespace", "_pod", "_job")}
    for method in ("_pod", "_job", "_headless_svc", "_controller"):
        getattr(K8sCluster, method).cache_clear()
    monkeypatch.setattr(K8sCluster, "_namespace", classmethod(lambda _: "default"))
    monkeypatch.setattr("socket.gethostbyname", lambda _: "10.1.0.7")
    monkeypatch.setitem(sys.modules, "kubernetes", _kubernetes(subdomain))
    assert kept
    if subdomain:
        assert found(POD) == ("gpt-0.pods:55527", 4, 2, None)
    else:
        with pytest.raises(UserError, match="need a headless service in order to communicate"):
            found(POD)


PAGE = "docs/processes.md"
CONTAINER = "spec.template.spec.containers"
RULE = "spec.podFailurePolicy.rules"
JOB = {
    *("apiVersion", "kind", "metadata.name", "spec.completionMode", "spec.completions"),
    *("spec.parallelism", "spec.backoffLimit", f"{RULE}.action"),
    *(f"{RULE}.onPodConditions.{name}" for name in ("type", "status")),
    *(f"{RULE}.onExitCodes.{name}" for name in ("containerName", "operator", "values")),
    *("spec.template.spec.restartPolicy", "spec.template.spec.terminationGracePeriodSeconds"),
    *(f"{CONTAINER}.{name}" for name in ("name", "image", "command", "env.name", "env.value")),
    f"{CONTAINER}.env.valueFrom.fieldRef.fieldPath",
    *(f"{CONTAINER}.resources.limits.nvidia.com/gpu", f"{CONTAINER}.volumeMounts.name"),
    *(f"{CONTAINER}.volumeMounts.mountPath", "spec.template.spec.volumes.name"),
    *("spec.template.spec.volumes.persistentVolumeClaim.claimName", "spec.template.spec.subdomain"),
}
SERVICE = {
    *("apiVersion", "kind", "metadata.name", "spec.clusterIP", "spec.publishNotReadyAddresses"),
    "spec.selector.batch.kubernetes.io/job-name",
}


def _file(name: str) -> dict[str, Any]:
    """Returns a file of the page."""
    found = blocks(PAGE, (ROOT / PAGE).read_text(encoding="utf-8"))
    (text,) = [block.text for block in found if block.file == name]
    return yaml.safe_load(text)


def test_the_files_of_kubernetes_have_fields_that_it_knows() -> None:
    assert set(paths(_file("train_job.yaml"))) == JOB
    assert set(paths(_file("train_service.yaml"))) == SERVICE


def test_the_pods_of_the_indexed_job_find_the_first_one(found) -> None:
    job, service = _file("train_job.yaml"), _file("train_service.yaml")
    pod = job["spec"]["template"]["spec"]
    name, count = job["metadata"]["name"], job["spec"]["completions"]
    assert count == job["spec"]["parallelism"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert (
        service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    )
    (container,) = pod["containers"]
    assert container["command"][:3] == ["python", "-m", "trainer"]
    arguments = options.parser().parse_args(["train", *container["command"][3:]])
    assert arguments.distributed and arguments.join_timeout > 360  # Kubernetes' longest delay
    # What Kubernetes writes into the annotations of a pod of an Indexed Job.
    fields = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": "2"}
    variables = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    first = f"{name}-0.{service['metadata']['name']}:8476"
    assert found(POD, variables) == (first, count, 2, None)


def test_kubernetes_starts_processes_again_but_after_a_mistake() -> None:
    job = _file("train_job.yaml")
    actions = {code: kubernetes(job, code) for code in (75, 1, 2, 137)}
    assert actions == {75: "Ignore", 1: "Count", 2: "FailJob", 137: "Count"}
    assert kubernetes(job, 137, disrupted=True) == "Ignore"
