"""The files of clusters and docs/cluster.md: by the launcher's own validation, offline, and against the repository."""

import copy
import re
import shlex
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from treenet.config import TrainConfig
from treenet.experiments.settings import ScalingConfig
from treeproc.common.settings import load_settings
from treeproc.stages.preprocess import PreprocessConfig

launcher = pytest.importorskip("ray.autoscaler._private.util", reason="this Ray has no launcher validation to call")


def validate(config: dict) -> None:
    launcher.validate_config(launcher.prepare_config(copy.deepcopy(config)))


@pytest.fixture
def cluster(repository) -> dict:
    return yaml.safe_load((repository / "cluster.yaml").read_text())


@pytest.fixture
def page(repository) -> str:
    return (repository / "docs" / "cluster.md").read_text()


def test_cluster_yaml_is_valid(cluster):
    validate(cluster)
    assert any("constraints.txt" in command for command in cluster["setup_commands"])
    with pytest.raises(ValueError, match="head_node_type"):
        validate({**cluster, "head_node_type": "none"})


def test_groups_start_at_zero_and_gpus_are_those_of_training(cluster):
    types = cluster["available_node_types"]
    assert set(types) == {"head", "parse", "train"} and cluster["head_node_type"] == "head"
    assert types["head"]["resources"] == {"CPU": 0}
    assert types["parse"]["min_workers"] == types["train"]["min_workers"] == 0
    assert "GPU" not in types["parse"]["resources"] and types["train"]["resources"]["GPU"] > 0
    assert cluster["max_workers"] >= types["parse"]["max_workers"] + types["train"]["max_workers"]
    # Whoever may submit jobs has the token; without it on the nodes, they could not join.
    assert "~/.ray/auth_token" in cluster["file_mounts"] and "RAY_AUTH_MODE=token" in "".join(cluster["setup_commands"])


def test_worker_nodes_ask_for_spot_notices(cluster, repository):
    *_, start = cluster["worker_start_ray_commands"]
    assert (repository / re.search(r"~/tree-attention/(\S+)", start)[1]).is_file()


def test_nodes_have_room_for_cuda_and_gpu_nodes_a_fast_network(cluster):
    """The launcher's own rules check the network interfaces, without asking AWS."""
    from ray.autoscaler._private.aws.config import _configure_subnets_and_groups_from_network_interfaces

    nodes = {name: node["node_config"] for name, node in cluster["available_node_types"].items()}
    for node in nodes.values():
        [disk] = node["BlockDeviceMappings"]
        assert disk["Ebs"]["VolumeSize"] >= 100
    train = _configure_subnets_and_groups_from_network_interfaces(nodes.pop("train"))
    assert [interface["InterfaceType"] for interface in train["NetworkInterfaces"]] == ["efa"]
    assert train["Placement"]["GroupName"] and train["SecurityGroupIds"] == nodes["head"]["SecurityGroupIds"]
    assert nodes["parse"]["SecurityGroupIds"] == nodes["head"]["SecurityGroupIds"]


def test_the_launcher_uploads_no_outputs_of_jobs(cluster, repository):
    ignored = (repository / ".gitignore").read_text().replace("/", "").split()
    assert {".venv", "runs", "demo-output"} <= set(ignored) and {".venv", "runs", "demo-output"} <= set(cluster["rsync_exclude"])


def test_a_submission_has_what_jobs_read_and_no_more(cluster, repository, tmp_path):
    """Ray's own packaging, as `ray job submit --working-dir .` calls it."""
    packaging = pytest.importorskip("ray._private.runtime_env.packaging", reason="this Ray has another packaging")
    packaging.create_package(str(repository), tmp_path / "package.zip", include_gitignore=True, excludes=[".git", ".venv"])
    names = ZipFile(tmp_path / "package.zip").namelist()
    folders = {name.partition("/")[0] for name in names if "/" in name}
    assert {"treenet", "treeproc", "workflows"} <= folders and not folders & {"docs", "tests", "benchmarks"}
    assert "workflows/configs/wmt14_en_de_base.yaml" in names and "treeproc/models/en/depparse.pt" in names
    assert cluster["rsync_filter"] == [".gitignore", ".rayignore"]  # the launcher leaves out the same


def test_the_launcher_file_for_machines_that_are_there_is_valid(repository):
    local = yaml.safe_load((repository / "workflows" / "clusters" / "machines.yaml").read_text())
    assert local["provider"]["type"] == "local"
    validate(local)


@pytest.fixture
def manifests(repository) -> dict[str, dict]:
    """The RayJobs: of a training, of preprocessing and of a study."""
    paths = (repository / "workflows" / "clusters").glob("rayjob*.yaml")
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted(paths)}


@pytest.mark.parametrize(("name", "group"), [("rayjob", "train"), ("rayjob-preprocess", "parse"), ("rayjob-study", "train")])
def test_a_rayjob_names_what_the_repository_has(name, group, manifests, page, repository):
    job = manifests[name]
    assert job["kind"] == "RayJob" and "CHANGE" not in job["spec"]["entrypoint"]
    spec = job["spec"]["rayClusterSpec"]
    groups = {one["groupName"]: one for one in spec["workerGroupSpecs"]}
    assert set(groups) == {group} and groups[group]["minReplicas"] == groups[group]["replicas"] == 0
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"} and spec["authOptions"] == {"mode": "token"}
    pod = groups[group]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == container["resources"]["requests"]
    if group == "train":
        drain = {one["name"]: one["value"] for one in container["env"]}["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]
        assert 0 < float(drain) < pod["terminationGracePeriodSeconds"]
    version = re.search(r"^ray==(.*)$", (repository / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert spec["rayVersion"] == version
    # The images are those that the page builds; only that of the nodes with GPUs has CUDA.
    built = dict(re.findall(r"docker build --tag (\S+) (.*?)\. &&", page))
    pods = {"head": spec["headGroupSpec"], **groups}
    images = {name: pod["template"]["spec"]["containers"][0]["image"] for name, pod in pods.items()}
    arguments = {name: built[image].strip() for name, image in images.items()}
    assert arguments == {"head": "", group: "--build-arg PIP_EXTRA_INDEX_URL=" * (group == "train")}
    dockerfile = (repository / "Dockerfile").read_text()
    assert "\nARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu\nRUN pip install" in dockerfile
    assert "\nWORKDIR /home/ray/tree-attention\n" in dockerfile and "--constraint constraints.txt" in dockerfile
    command = job["spec"]["entrypoint"].replace("/home/ray/tree-attention", str(repository)).split()
    check_command(command, repository)


def test_rayjobs_differ_in_name_command_and_group_alone(manifests):
    """Three files, so that each is one that `kubectl apply` takes."""
    training = manifests.pop("rayjob")
    for job in manifests.values():
        job["metadata"], job["spec"]["entrypoint"] = training["metadata"], training["spec"]["entrypoint"]
        [group], [trains] = (one["spec"]["rayClusterSpec"]["workerGroupSpecs"] for one in (job, training))
        if group["groupName"] != trains["groupName"]:
            job["spec"]["rayClusterSpec"]["workerGroupSpecs"] = [trains]
        assert job == training


def test_a_rayjob_for_kueue_has_the_queue_and_may_grow(manifests, repository):
    """Kueue refuses an autoscaling job without the annotation of an elastic one."""
    for name in manifests:
        text = (repository / "workflows" / "clusters" / f"{name}.yaml").read_text()
        metadata = yaml.safe_load(re.sub("^  # (labels|annotations):", r"  \1:", text, flags=re.MULTILINE))["metadata"]
        assert list(metadata["labels"]) == ["kueue.x-k8s.io/queue-name"]
        assert metadata["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}


def test_every_command_of_the_page_can_be_given(page, repository):
    commands = re.findall(r"-- (python workflows/\S+\.py .*)", page)
    assert len(commands) > 5
    for command in commands:
        check_command(command.split(), repository)


def test_the_page_tells_where_every_workflow_works(page, repository):
    """In actors of Ray, or in the script; the others write to this machine, or serve from it."""
    [actors, script] = re.findall(r"^- \*\*Work in (?:Ray's actors|the script)\*\*: (.*?)(?=^- )", page, re.MULTILINE | re.DOTALL)
    places = [re.findall(r"`(\w+)\.py`", listed) for listed in (actors, script)]
    assert not set(places[0]) & set(places[1])
    workflows = {path.stem for path in (repository / "workflows").glob("*.py")}
    assert {name for listed in places for name in listed} == workflows - {"control", "demo", "serve"}


def check_command(command: list[str], repository) -> None:
    """The script and the configuration are there, and the configuration takes the settings."""
    assert command[0] == "python" and (repository / command[1]).is_file(), command
    options = dict(zip(command[2:], command[3:], strict=False))
    config = options.get("--config", "")
    if "workflows/configs" in config:
        assert (repository / config).is_file(), config
    if settings := {"train_wmt": TrainConfig, "scaling": ScalingConfig}.get(Path(command[1]).stem):
        load_settings(settings, repository / config, [part for part in command[2:] if "=" in part])


@pytest.mark.parametrize(
    ("name", "settings"), [("preprocess", PreprocessConfig), ("train", TrainConfig), ("study", ScalingConfig)]
)
def test_the_command_of_a_slurm_script_is_there_and_takes_its_settings(name, settings, repository, monkeypatch):
    script = (repository / "workflows" / "slurm" / f"{name}.sbatch").read_text()
    [command] = re.findall(r"^run_with_ray python (.*)$", script, re.MULTILINE)
    workflow, _, config, _, out, *overrides = shlex.split(re.sub(r"\$\(\(.*?\)\)", "8", command))
    assert (repository / workflow).is_file() and out.startswith("/shared/")
    monkeypatch.chdir(repository)
    loaded = load_settings(settings, Path(config), overrides)
    assert name == "preprocess" or (loaded.workers > 0 and loaded.use_gpu and str(loaded.data).startswith("/shared/"))
    assert ("--gpus-per-node" in script) == (name != "preprocess")
    assert script.count("# CHANGE") == 2 and "--signal=B:TERM@" in script and "--requeue --open-mode=append" in script
